"""Schemes of quantisation: one file each says how it names and lays out what belongs to a weight."""
