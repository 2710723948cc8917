"""Details for people who debug: what is opened, requested, decided and repeated.

They go to the logger `ckpttools` of the standard library, at level DEBUG. This module does not import
`logging`: a program that listens has imported it.
"""

from __future__ import annotations

import sys

LOGGER = "ckpttools"


def log_detail(text: str, *values: object) -> None:
    """Log a detail.

    Args:
        text: With a `%s` for each value.
        values: Formatted only if a program listens.
    """
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.getLogger(LOGGER).debug(text, *values)
