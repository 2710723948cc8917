"""The end of a process whose memory is left to the system."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

# Not that of typing: the fewer imports, the sooner a process can be stopped in order.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Ends the process at once, with all that was printed: an interpreter takes its objects apart first."""
    for stream in (sys.stdout, sys.stderr):
        # Either may be closed, or at a pipe that nobody reads.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
