"""The script `ckpt` and `python -m ckpttools`: handle signals before importing anything.

The interpreter's own start, some 15 ms, cannot be covered: until then Ctrl-C shows Python's own traceback.
"""

from __future__ import annotations

import gc
import os


def main() -> None:
    """Run the command line and exit with one of `ckpttools.core.errors.EXIT_CODES`."""
    # A plan of 100,000 arrays keeps a million objects alive. Collecting after every 700 allocations took 1.0
    # of 10.6 s, and 10 ms of every command during imports. Inspecting 100,000 arrays spent 0.6 of 5.4 s on
    # collection with a threshold of 50,000, and 0.1 s with this one.
    gc.set_threshold(1_000_000)
    try:
        from ckpttools.cli import signals
        from ckpttools.cli.process_exit import exit_process

        signals.install_early_handlers()
        from ckpttools.cli.main import main as command

        command(prog_name="ckpt")
    except KeyboardInterrupt:  # before the handler was installed
        os.write(2, b"Stopped.\n")
        os._exit(130)
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            os._exit(end.code)  # does not wait for threads
        signals.ignore()
        code = end.code or 0
        if not isinstance(code, int):
            raise  # a message, which the interpreter prints
        exit_process(code)


if __name__ == "__main__":
    main()
