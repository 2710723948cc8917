"""Details for debugging: what is opened, requested, decided and repeated.

Details go to the standard library's logger `ckpttools`, at level DEBUG. This module does not import
`logging`: a program that listens has already imported it.
"""

from __future__ import annotations

import sys

LOGGER = "ckpttools"


def log_detail(text: str, *values: object) -> None:
    """Log a detail of the work for programs that listen to this package's logger.

    Args:
        text: Text with a `%s` for each value.
        values: Values, which are formatted only if a program listens.
    """
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.getLogger(LOGGER).debug(text, *values)
