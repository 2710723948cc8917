"""Whether the tests notice when the package is changed: docs/mutation.md."""
