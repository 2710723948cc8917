"""Crash tests: power cuts, failing calls, and two commands at once.

`taps` intercepts the file system calls of a command, and `disk` computes which states a disk may have after a
crash between them. `handlers` makes calls fail and lets two commands take turns. `zygote` runs commands
quickly, `scenarios` lists them, and `verdict` checks the results.
"""
