"""Quantization schemes. Each file defines the names and layout of one scheme's auxiliary tensors."""
