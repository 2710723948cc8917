"""Human-readable text: folded and ordered names, counts, sizes, durations, and escaping for terminals."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby


def format_ranges(numbers: Iterable[int]) -> str:
    """Format integers as ascending ranges: 0, 1, 2, 5 give "0..2,5"."""
    ordered = sorted(set(numbers))
    runs = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    parts = ([number for _, number in run] for _, run in runs)
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in parts)


def fold_lines(lines: Iterable[str]) -> list[str]:
    """Join lines that differ only in their first number, then in their second, and so on.

    Groups are in the order of their first lines. Numbers are runs of digits without a leading zero.
    """
    split = [_split_numbers(line) for line in lines]
    deepest = max((len(pieces) // 2 for pieces in split), default=0)
    for position in range(deepest):
        split = _fold_at(split, 2 * position + 1)
    return ["".join(pieces) for pieces in split]


def array_count(names: Collection[object]) -> str:
    """Format the number of arrays: "1 array", "12 arrays"."""
    return plural(len(names), "array")


_AGE_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def format_age(seconds: float) -> str:
    """Format seconds in the largest unit of which there are at least two: 7300 s -> "2 hours"."""
    total = max(0, int(seconds))
    count, unit = next(((total // n, unit) for n, unit in _AGE_UNITS if total >= 2 * n), (total, "seconds"))
    return "1 second" if count == 1 else f"{count} {unit}"


def plural(number: int, noun: str) -> str:
    """Format 1 and "array" as "1 array", 12 as "12 arrays"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def plural_with_verb(number: int, noun: str) -> str:
    """Format a count with its verb: "is 1 array", "are 12 arrays"."""
    return f"{'is' if number == 1 else 'are'} {plural(number, noun)}"


def sample_names(names: Iterable[str], limit: int = 3) -> str:
    """Return the first names, folded by their numbers: "layers_{0..31}, norm, …"."""
    folds = fold_lines(names)
    return ", ".join([*folds[:limit], *["…"] * (len(folds) > limit)])


def first_names(names: Sequence[str], limit: int = 1) -> str:
    """Return the first names unfolded, and the number of others: "a, b and 3 more"; "" for none."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def first_and_last(numbers: Sequence[int], limit: int = 8) -> str:
    """Format numbers, abbreviating long lists: "1, 2, 3, 4, …, 97, 98, 99, 100"."""
    half = limit // 2
    shortened = [*numbers[:half], "…", *numbers[-half:]] if len(numbers) > limit else numbers
    return ", ".join(map(str, shortened))


def format_type(dtype: object, shape: Iterable[object]) -> str:
    """Format dtype and shape as JAX does: `bfloat16[4096,14336]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the complete name matches any of the globs, case-sensitively."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def sort_naturally(names: Iterable[str]) -> list[str]:
    """Sort names with numbers by value: `layers.2` before `layers.10`."""
    return sorted(names, key=natural_key)


def printable(text: str) -> str:
    """Escape characters of a name that would control the terminal.

    Bytes that are not UTF-8, which Python represents as lone surrogates, become `\\xff`, so different names
    stay different. Terms of messages (`ckpttools.core.message_terms`) are kept.
    """
    if text.isprintable():
        return text
    if TERM_START in text:
        return "".join(
            part if position % 2 else _escape_all(part)
            for position, part in enumerate(re.split(f"({TERM.pattern})", text))
        )
    return _escape_all(text)


def _escape_all(text: str) -> str:
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_text(text: str) -> str:
    """Escape text of several lines, keeping styles from `mark_style` and line breaks before indented lines.

    A line break in a name would start a line that looks like program output. In the program's own texts, a
    line break is followed by a space, another line break or the end.
    """
    if text.isprintable() or _MARKED.sub("", text).isprintable():
        return text
    return _STYLE_OR_ESCAPE.sub(lambda result: result[1] or _escape_all(result[3]), text)


def mark_style(codes: str) -> str:
    """Return the escape sequence of a style with a mark that `printable_text` recognizes.

    The mark is different in each process, so data cannot contain it, and a color in a name is escaped.
    """
    return f"\x1b[{_MARK};{codes}m"


def unmark_styles(text: str) -> str:
    """Convert the marked styles of `printable_text` to terminal escape sequences."""
    return _MARKED.sub("\x1b[\\1m", text) if _MARK in text else text


# Data was written before this process started, so it cannot contain the process's start time.
_MARK = str(time.time_ns())
_MARKED = re.compile(rf"\x1b\[{_MARK};([0-9;]*)m")

# A term in a message has a start with the same mark, a payload and an end. All are private-use characters, so
# functions that split, fold, strip or wrap text do not break a term.
TERM_FIRST = 0xE100
TERM_START = "\ue000" + "".join(chr(TERM_FIRST + ord(digit)) for digit in _MARK)
TERM_END = "\ue001"
TERM = re.compile(f"{TERM_START}[{chr(TERM_FIRST)}-{chr(TERM_FIRST + 255)}]*{TERM_END}")

# Marked styles, terms, and breaks before indented lines; then any character that may need an escape.
_STYLE_OR_ESCAPE = re.compile(rf"({_MARKED.pattern}|{TERM.pattern}|\n(?=[ \n]|$))|([^ -~])")


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    # `\x80` is not used, because it stands for an undecodable byte.
    return f"\\u{code:04x}" if 0x80 <= code <= 0xFF else character.encode("unicode_escape").decode()


def natural_key(name: str) -> bytes:
    """Return a sort key that orders runs of text and digits, text before numbers.

    The key is one object because a checkpoint may have 100,000 names.
    """
    runs = [_sort_bytes("".join(run), is_number) for is_number, run in groupby(name, key=str.isdecimal)]
    return (b"\xff" if name[:1].isdecimal() else b"") + b"".join(runs)


def _sort_bytes(run: str, is_number: bool) -> bytes:
    """Encode a run of text or digits so that bytes sort naturally; a number ends the preceding text.

    Equal numbers are sorted by their text: "01" before "1", and "0" before "00".
    """
    if not is_number:
        return run.encode("utf-8", "surrogatepass")
    digits = str(int(run)).encode()
    zeros = len(run) - len(digits)
    last = zeros if digits == b"0" else zeros ^ 0xFFFF
    return b"\0" + len(digits).to_bytes(4, "big") + digits + last.to_bytes(4, "big")


def _split_numbers(line: str) -> tuple[str, ...]:
    """Split a line into text, number, text, number, …, text; texts may be empty."""
    pieces = [""]
    for is_number, characters in groupby(line, key=str.isdigit):
        part = "".join(characters)
        if is_number and (part == "0" or not part.startswith("0")) and part.isascii():
            pieces += [part, ""]
        else:
            pieces[-1] += part
    return tuple(pieces)


def _fold_at(lines: Sequence[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for pieces in lines:
        number = pieces[position : position + 1]
        groups.setdefault((pieces[:position], pieces[position + 1 :]), []).extend(number)
    return [
        (*before, _format_range_piece(numbers), *after) if numbers else before
        for (before, after), numbers in groups.items()
    ]


def _format_range_piece(numbers: list[str]) -> str:
    distinct = set(numbers)
    return numbers[0] if len(distinct) == 1 else "{" + format_ranges(map(int, distinct)) + "}"


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
