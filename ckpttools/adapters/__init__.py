"""Low-rank adapters: read, convert between PEFT and MaxText, merge and extract."""
