"""Copying checkpoints byte for byte, from any store to any store."""
