"""Where bytes live. Local files today; other stores answer to the same few calls."""
