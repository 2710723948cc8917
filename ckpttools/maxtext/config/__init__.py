"""Derive MaxText's settings for a model from its `config.json` and arrays, and the reverse."""
