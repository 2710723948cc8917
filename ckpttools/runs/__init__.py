"""What a run holds, which of its steps are kept, and how others are removed."""
