"""What MaxText loads when a run starts: from settings to a directory, by its rules; nothing of it is run."""
