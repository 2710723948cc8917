"""End a process without freeing its memory."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

# typing.TYPE_CHECKING is not used, because fewer imports let the process handle signals sooner.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Flush stdout and stderr, then end the process without freeing objects."""
    for stream in (sys.stdout, sys.stderr):
        # Either stream may be closed or a broken pipe.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
