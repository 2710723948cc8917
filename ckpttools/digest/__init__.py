"""Prove that checkpoints are equal: digests, manifests, and bit-exact comparison."""
