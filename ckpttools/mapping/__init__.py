"""Rules for the names and layouts of the same arrays in two frameworks, without I/O and model names."""
