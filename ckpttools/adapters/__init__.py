"""Low-rank adapters: what they change of a model, and between PEFT, MaxText and merged weights."""
