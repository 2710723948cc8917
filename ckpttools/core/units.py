"""Human-readable bytes on disk (powers of 1000), memory (powers of 1024), counts and durations."""

from __future__ import annotations

_STEPS = ("", "k", "M", "G", "T", "P")


def format_disk(nbytes: float) -> str:
    """Format 2471645184 as "2.47 GB"."""
    return f"{_scale(nbytes, 1000)}B"


def format_memory(nbytes: int) -> str:
    """Format 1 << 30 as "1.00 GiB", like process monitors."""
    text = _scale(nbytes, 1024)
    return f"{text}B" if text.endswith(" ") else f"{text[:-1]}{text[-1].upper()}iB"


def format_exact(nbytes: int) -> str:
    """Format 2471645184 as "2.47 GB (2,471,645,184 bytes)"."""
    return f"{format_disk(nbytes)} ({nbytes:,} bytes)" if nbytes >= 1000 else f"{nbytes} bytes"


def format_count(number: int) -> str:
    """Format 1235814400 as "1.24 B": billions, as in model names."""
    return _scale(number, 1000).replace("G", "B").strip()


def format_duration(seconds: float) -> str:
    """Format 3725 as "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _scale(number: float, base: int) -> str:
    """Format three digits, a space and the prefix of a power of `base`."""
    power = 0
    # 999.5 would round to four digits, so it uses the next power.
    while number >= 999.5 and power < len(_STEPS) - 1:
        number /= base
        power += 1
    if power == 0:
        return f"{number:.0f} "
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} {_STEPS[power]}"
