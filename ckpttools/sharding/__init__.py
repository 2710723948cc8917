"""Where checkpoints meet devices: meshes and rules (which know nothing of jax), loading onto a mesh."""
