"""How plain weights become quantised ones: one file for each scheme that is written."""
