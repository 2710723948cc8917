"""Plan the checkpoints of a training run: memory, time, disk space, and MaxText's settings."""
