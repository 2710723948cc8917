"""Naming and layout rules for the same arrays in two frameworks, without I/O and model names."""
