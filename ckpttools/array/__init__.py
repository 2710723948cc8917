"""The intermediate representation: lazy arrays, the closed set of lazy nodes, trees of them."""
