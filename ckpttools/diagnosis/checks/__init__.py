"""One file for each check: a module here with a `CHECK` is found by itself."""
