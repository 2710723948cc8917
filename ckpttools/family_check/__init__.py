"""Proving a family: that its rows say one thing, go both ways, and are those of a model. Never prints."""
