"""What is wrong with a checkpoint and what to do about it. Looks; changes something only when asked to."""
