"""How two frameworks spell the same arrays: named axes, rows, tables. No I/O and no model's name in here."""
