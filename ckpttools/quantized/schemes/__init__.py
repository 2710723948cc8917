"""Quantization schemes; each file defines the names and the layout of one scheme's auxiliary tensors."""
