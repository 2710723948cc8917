"""The intermediate representation of a checkpoint: lazy arrays, lazy nodes, and trees of them."""
