"""Naming and layout rules for the same arrays in two frameworks: named axes, rows, tables. No I/O, no model
names.
"""
