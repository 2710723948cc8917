"""What `ckpt inspect tree --against` found, on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttools.cli.output import styled, wrapped
from ckpttools.core.text import plural, printable, type_text

if TYPE_CHECKING:
    from ckpttools.inspect.comparison import ArraySpec, Comparison, Different

# Beyond this many lines a list says only how many more there are.
_MOST_LINES = 100


def comparison_lines(comparison: Comparison, room: int | None, *, flat: bool) -> Iterator[str]:
    """The verdict, and every list that is not empty.

    Args:
        comparison: what was found.
        room: columns of the terminal; None for no limit.
        flat: whether names that differ in numbers only have lines of their own.
    """
    against = printable(comparison.against)
    if comparison.is_same:
        number = plural(comparison.num_compared, "array")
        shapes = ", every shape as it should be" if comparison.shapes_compared else ""
        yield from wrapped(f"Against {against}: {number}, none missing, none left over{shapes}.", room)
    else:
        yield from wrapped(f"Against {against}:", room)
    lists = {
        "missing": [(each.path, _type(each)) for each in comparison.missing],
        "not expected": [(each.path, _type(each)) for each in comparison.extra],
        "of another shape or dtype": [(each.path, _difference(each)) for each in comparison.different],
    }
    for what, entries in lists.items():
        if entries:
            yield ""
            # A name of which no shape is known may stand for all layers.
            noun = "array" if all(text for _, text in entries) else "name"
            are = "is" if len(entries) == 1 else "are"
            yield styled(f"{plural(len(entries), noun)} {are} {what}", bold=True)
            yield from _listed(_shown(entries) if flat else _folded(entries), room)
    if comparison.reasons:
        yield ""
        for reason in comparison.reasons:
            yield from wrapped(printable(reason), room)


def _listed(lines: Sequence[tuple[str, str]], room: int | None) -> Iterator[str]:
    """Names, each with what is to say of it: behind it, or where there is no room below it."""
    shown = lines[:_MOST_LINES]
    width = max(len(name) for name, _ in shown)
    if room is not None:
        width = min(width, max(room // 3, room - 4 - max(len(text) for _, text in shown)))
    for name, text in shown:
        line = f"  {name:{width}}  {styled(text, fg='cyan')}" if text else f"  {name}"
        if room is not None and 4 + max(width, len(name)) + len(text) > room:
            yield from _broken(name, text, room)
        else:
            yield line
    if len(lines) > _MOST_LINES:
        yield f"  … and {len(lines) - _MOST_LINES:,} more lines; --json has all of them"


def _broken(name: str, text: str, room: int) -> Iterator[str]:
    """A name and below it what is to say of it, each in as many lines as it needs."""
    first, *more = wrapped(name, room - 6)
    yield f"  {first}"
    yield from (f"    {part}" for part in more)
    yield from (styled(f"      {part}", fg="cyan") for part in wrapped(text, room - 6) if text)


def _shown(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(printable(name), printable(text)) for name, text in entries]


def _folded(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names of which the same is to say and that differ in numbers only as one."""
    from ckpttools.core.text import folded

    names: dict[str, list[str]] = {}
    for name, text in entries:
        names.setdefault(text, []).append(name)
    return _shown((name, text) for text, alike in names.items() for name in folded(alike))


def _difference(each: Different) -> str:
    why = f" ({each.why})" if each.why else ""
    got = each.got if each.wanted.dtype else replace(each.got, dtype=None)
    return f"{_type(got)}, should be {_type(each.wanted)}{why}"


def _type(spec: ArraySpec) -> str:
    """`bfloat16[64,128]`, or `[64,128]` where any dtype will do."""
    return (spec.dtype or "") if spec.shape is None else type_text(spec.dtype or "", spec.shape)
