"""From a tree to what is worth knowing about it: frozen dataclasses, nothing printed, no array read."""
