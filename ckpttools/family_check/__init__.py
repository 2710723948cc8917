"""Check that the rows of a family are unambiguous, invertible, and match a model. Never prints."""
