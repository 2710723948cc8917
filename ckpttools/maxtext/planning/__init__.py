"""Plan the checkpoints of a training run: memory, time, disk space, and the settings for them."""
