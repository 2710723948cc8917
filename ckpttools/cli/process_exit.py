"""Exit of the process `ckpt`."""

from __future__ import annotations

import atexit
import sys
import threading

from ckpttools.core.process_exit import end_process

# typing.TYPE_CHECKING is not used, because fewer imports let the process handle signals sooner.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """End the process and leave its memory to the system.

    The interpreter would free every object first, which takes 0.08 s of a command that takes 0.30 s. If
    threads are still running, or under a debugger or profiler, the interpreter exits normally.

    Raises:
        SystemExit: The interpreter must end the process.
    """
    if threading.active_count() > 1 or _is_watched():
        sys.exit(code)
    atexit._run_exitfuncs()  # Prints the exceptions of these functions.
    end_process(code)


def _is_watched() -> bool:
    """Return whether a debugger, profiler or coverage tool traces calls."""
    # Since Python 3.12, tools may register with sys.monitoring.
    monitoring = getattr(sys, "monitoring", None)
    tools = map(monitoring.get_tool, range(6)) if monitoring else ()
    return any((sys.gettrace(), sys.getprofile(), sys.flags.inspect, *tools))
