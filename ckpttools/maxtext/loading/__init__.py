"""Predict what MaxText loads when a run starts, by applying its rules to the settings without running it."""
