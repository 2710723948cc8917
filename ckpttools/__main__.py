"""The script `ckpt`, and `python -m ckpttools`: ready to be stopped before anything is imported.

The interpreter's own start, some 15 ms, cannot be covered: until then Ctrl-C shows Python's own traceback.
"""

from __future__ import annotations

import gc
import os


def main() -> None:
    """Runs the command line and ends the process with one of `ckpttools.core.errors.EXIT_CODES`."""
    # Plans of 100,000 arrays are a million objects that stay: looking for garbage among them after every 700
    # took 1.0 of 10.6 s, and among what imports make 10 ms of each command; after every 50,000 of 100,000
    # arrays that are inspected 0.6 of 5.4 s, and 0.1 so.
    gc.set_threshold(1_000_000)
    try:
        from ckpttools.cli import signals
        from ckpttools.cli.process_exit import exit_process

        signals.install_early_handlers()
        from ckpttools.cli.main import main as command

        command(prog_name="ckpt")
    except KeyboardInterrupt:  # before there was a handler
        os.write(2, b"Stopped.\n")
        os._exit(130)
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            os._exit(end.code)  # waits for no thread that was left
        signals.ignore()
        code = end.code or 0
        if not isinstance(code, int):
            raise  # a message, which the interpreter shows
        exit_process(code)


if __name__ == "__main__":
    main()
