"""Proving that checkpoints hold the same: digests, manifests of them, and comparing bit by bit."""
