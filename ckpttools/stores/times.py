"""Times of files in words."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(nanoseconds: int) -> str:
    """Nanoseconds since 1970 as ISO 8601 in UTC, with all digits, so that different times look different."""
    seconds, rest = divmod(nanoseconds, 10**9)
    try:
        text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        # A file system may have times beyond the year 9999.
        return f"{nanoseconds} ns since 1970"
    return f"{text}.{rest:09}Z" if rest else f"{text}Z"
