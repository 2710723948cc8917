"""What survives of a conversion when the machine stops, a call fails or two commands meet.

`taps` sees the calls to the file system that a command makes, `disk` says what a disk may hold after a crash
between them, `faults` lets them fail, `gate` lets two commands take turns. `zygote` runs commands quickly,
`scenarios` says which, `verdict` what may come of it.
"""
