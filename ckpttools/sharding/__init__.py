"""Meshes, sharding rules (neither of which needs jax), and loading onto the devices of a mesh."""
