"""Copy checkpoints byte for byte between any two stores."""
