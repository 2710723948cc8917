"""MaxText's settings for a model, from its `config.json` and its arrays; and the way back."""
