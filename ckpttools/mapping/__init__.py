"""How two frameworks name and arrange the same arrays: named axes, rows, tables. No I/O, no model names."""
