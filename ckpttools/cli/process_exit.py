"""The end of the process `ckpt`."""

from __future__ import annotations

import atexit
import sys
import threading

from ckpttools.core.process_exit import end_process

# Not that of typing: the fewer imports, the sooner a process can be stopped in order.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """Ends the process, and leaves its memory to the system.

    The interpreter takes every object apart before it ends: of a command that took 0.30 s that was 0.08 s.
    Where threads are left, which it waits for, or somebody watches, it does so here, too.

    Raises:
        SystemExit: to have the interpreter end the process.
    """
    if threading.active_count() > 1 or _is_watched():
        sys.exit(code)
    atexit._run_exitfuncs()  # shows what they raise
    end_process(code)


def _is_watched() -> bool:
    """Whether a debugger, a profiler or a measurement of coverage follows what is called."""
    # From Python 3.12 on they may have this.
    monitoring = getattr(sys, "monitoring", None)
    tools = map(monitoring.get_tool, range(6)) if monitoring else ()
    return any((sys.gettrace(), sys.getprofile(), sys.flags.inspect, *tools))
