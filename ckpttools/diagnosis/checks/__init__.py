"""One file per check: modules here with a `CHECK` are found automatically."""
