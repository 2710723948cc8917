"""The command line `ckpt`: the only room that may import click and rich.

A command parses its options, makes one call of the library and renders the result. Results go to stdout;
progress, notes and errors go to stderr.
"""

import os

# Nothing here uses BLAS. Each of its threads would take 32 MiB of address space, and if that is refused,
# OpenBLAS ends or interrupts the process without an error that could be caught.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
