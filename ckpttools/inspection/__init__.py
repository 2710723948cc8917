"""Reports on trees, as frozen dataclasses; nothing is printed, and no array is read."""
