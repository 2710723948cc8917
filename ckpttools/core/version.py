"""The version of this package: also in pyproject.toml."""

__version__ = "0.1.0"
