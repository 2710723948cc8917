"""Low-rank adapters: read them, convert between PEFT and MaxText, merge and extract."""
