"""What checkpoints of a training take: memory, time, room, and the settings for them."""
