"""`ckpt browse`: a browser in the terminal, and the pages that it shows.

A page is a list of rows: the steps of a run, the arrays of a checkpoint, the layers of an array, or the
differences between two checkpoints. Pages know nothing about the screen, which `ckpttools.cli.browser` draws.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import click

from ckpttools.api.options import LIMITS, OPENING
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags
from ckpttools.cli.output import format_labeled, styled, wrap
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.extras import require_package
from ckpttools.core.memory_limit import BASELINE_BYTES, extra_resident, limit_memory
from ckpttools.core.message_terms import action
from ckpttools.core.options import Option
from ckpttools.core.process_memory import current_bytes
from ckpttools.core.text import format_age, format_disk, format_type, plural, printable
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.fetching import observe_bytes
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.api.cat import ArrayValues
    from ckpttools.api.diff import DiffReport
    from ckpttools.api.sources import Opening
    from ckpttools.array.tree import Path, Tree
    from ckpttools.compare.diff import ArrayDiff
    from ckpttools.compare.groups import GroupDiff
    from ckpttools.inspection.folding import FoldedLine
    from ckpttools.inspection.stats import ArrayStats, Statistics
    from ckpttools.inspection.tree import ArrayReport, TreeReport
    from ckpttools.runs.collection import CollectionListing
    from ckpttools.runs.listing import RunListing


@click.command(short_help="Browse a checkpoint or a run in the terminal.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@flags(
    Option("against", parse, None, "Compare with this checkpoint, and rank the differences.", "PATH"),
    *LIMITS,
    *OPENING,
)
def browse(
    path: Location,
    against: Location | None,
    memory: int,
    jobs: int | None,
    requests: int | None,
    **reading: Unpack[Opening],
) -> None:
    """Browse a checkpoint or a run in the terminal.

    Shows the steps of a run, a tree of arrays with folded layers, statistics, histograms and values of an
    array, its layers side by side, and the differences between two checkpoints or steps, largest first. An
    array is read when you open it, within the memory limit; Esc stops reading. Press ? for the keys; the
    mouse also works.

    Needs `pip install 'ckpttools[browse]'`.

    \b
    Examples:
      $ ckpt browse ~/models/Llama-3.1-8B
      $ ckpt browse ~/maxtext/run/checkpoints
      $ ckpt browse checkpoints/100 --against checkpoints/200
    """
    require_package("textual", "ckpt browse")
    _require_terminal(path)
    from ckpttools.cli.browser import run

    session = Session(memory, jobs, requests, {key: value for key, value in reading.items() if key != "step"})
    run(session, partial(open_location, session, path, reading.get("step"), against), str(path))


def _require_terminal(path: Location) -> None:
    streams = {"stdin": sys.stdin.isatty(), "stdout": sys.stdout.isatty()}
    lacking = [name for name, is_terminal in streams.items() if not is_terminal]
    if lacking or os.environ.get("TERM") == "dumb":
        raise UsageError(
            "the browser needs a terminal",
            got=f"{' and '.join(lacking)} without a terminal" if lacking else "TERM=dumb",
            hint=f"{action('inspect', str(path))} prints the arrays",
        )


Lines = Callable[[int], Iterable[str]]
"""Returns lines for a number of columns, with the styles of `ckpttools.cli.output.styled`."""


class TaskControl(Protocol):
    """The browser as a task sees it. All methods raise an exception if the user has stopped the task."""

    def show(self, lines: Lines) -> None:
        """Show text next to the list."""

    def observe(self, done: int, total: int) -> None:
        """Report the bytes read so far, and the total."""


Task = Callable[[TaskControl], "BrowserPage | None"]
"""Reads something in a thread. Returns a page to open, or shows text."""


@dataclass(frozen=True, slots=True)
class Session:
    """Limits and options of all reads.

    Attributes:
        memory: Memory limit in bytes.
        jobs, requests: Number of workers and of concurrent requests; None for the default.
        reading: Options for opening a path, without the step.
    """

    memory: int
    jobs: int | None
    requests: int | None
    reading: Mapping[str, Any]

    @contextmanager
    def limits(self) -> Iterator[None]:
        """Limit what is read inside the `with`; open pages count, too."""
        extra = max(0, (current_bytes() or 0) - BASELINE_BYTES)
        with extra_resident(extra), limit_memory(self.memory), use_concurrency(self.requests):
            yield

    def open(self, location: Location, step: int | None = None) -> Tree:
        """Open a checkpoint with all its items."""
        from ckpttools.api.sources import opened, read_options

        return opened(location, replace(read_options({**self.reading, "step": step}), all_items=True))


def open_location(
    session: Session, location: Location, step: int | None, against: Location | None, control: TaskControl
) -> BrowserPage:
    """Return the page of a location: the steps of a run, or the arrays of a checkpoint."""
    if against is not None:
        return _compare(session, location, against, step, control)
    if step is None:
        from ckpttools.api.ls import list_detected
        from ckpttools.formats.detect import LocationKind, detect

        detected = detect(location.absolute(), is_content=True)
        if detected.format is None or detected.kind is LocationKind.RUN:
            listing = list_detected(detected)
            if listing is not None:
                return ListingPage(session, listing, location)
    return _open_tree(session, location, step)


def _open_tree(session: Session, location: Location, step: int | None = None) -> TreePage:
    from ckpttools.inspection.tree import inspect_tree
    from ckpttools.maxtext.model_files import sidecar_names

    tree = session.open(location, step)
    return TreePage(session, tree, inspect_tree(tree, or_none=True, sidecars=sidecar_names(tree)))


@dataclass(frozen=True, slots=True)
class Cells:
    """The text of a row: `left` is shortened if `right` leaves too little room."""

    left: str
    right: str = ""
    style: str = ""


class BrowserPage(ABC):
    """A list of rows.

    Attributes:
        title: Name of the page.
        rows: The rows.
        note: Remark about the rows for the status line.
    """

    title: str
    rows: Sequence[Any]
    note: str = ""

    @abstractmethod
    def head(self, width: int) -> Cells:
        """Return the titles of the columns."""

    @abstractmethod
    def cells(self, row: Any, width: int) -> Cells:
        """Return the text of a row."""

    @abstractmethod
    def facts(self, row: Any) -> Lines:
        """Return the facts about a row, or about the page if there is none; reads nothing."""

    @abstractmethod
    def open(self, row: Any) -> Task | None:
        """Return the task that opens a row; None if the page has changed instead."""

    def close(self, row: Any) -> int | None:
        """Close a row, or return the index of the row above it."""
        return None

    def layers(self, row: Any) -> Task | None:
        """Return the task that shows layers side by side; None if the page has changed instead."""
        raise UsageError("only an array has layers: choose an array first")

    def index(self, row: Any, index: str) -> Task | None:
        """Return the task that reads a region of an array."""
        raise UsageError("only an array has regions: choose an array first")

    def compare(self, row: Any, other: Location | None) -> Task | None:
        """Return the task that compares with another checkpoint; None if its location must be asked for."""
        raise UsageError("only checkpoints can be compared: first go back to a tree or a list of checkpoints")

    def about(self) -> Task | None:
        """Return the task that describes the page."""
        return None

    def mark(self, row: Any) -> None:
        """Mark or unmark a row."""
        raise UsageError("only steps and checkpoints in a list can be marked")

    def list_siblings(self, row: Any) -> int | None:
        """List folded rows one by one, or fold them again. Returns the index of the row that has changed."""
        return None

    def sort(self) -> Task | None:
        """Sort the rows in another way."""
        return None

    def filter(self, words: str) -> Task | None:
        """Return the task that keeps only rows with these words."""
        return None

    @abstractmethod
    def copies(self, row: Any) -> list[tuple[str, str]]:
        """Return labels and texts to copy, the name first."""


def command(*words: object) -> str:
    """Return a command to paste into a shell."""
    return " ".join(("ckpt", *(_quote(str(word)) for word in words)))


def _quote(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    characters = (c if c.isprintable() and c not in "'\\" else _escape(c) for c in word)
    return f"$'{''.join(characters)}'"


def _escape(character: str) -> str:
    encoded = character.encode("utf-8", "surrogateescape")
    return "".join(f"\\x{byte:02x}" for byte in encoded)


def _compare(session: Session, a: Location, b: Location, step: int | None, control: TaskControl) -> DiffPage:
    """Compare two checkpoints, with the differences ranked."""
    from ckpttools.api.diff import diff

    trees = session.open(a, step), session.open(b)
    report = diff(
        *trees,
        sort="rel-l2",
        memory=session.memory,
        jobs=session.jobs,
        requests=session.requests,
        observe=control.observe,
    )
    return DiffPage(session, trees, report)


@dataclass(frozen=True, slots=True)
class ListingRow:
    """A step of a run, or a checkpoint in a directory.

    Attributes:
        name: Name in the list.
        location: Path that opens it.
        kind: Kinds of its trees.
        nbytes: Bytes of its files.
        saved: Time of the last change in seconds since 1970; None if unknown.
        facts: Other facts, with their labels.
        problem: What is wrong, such as "unfinished"; "" if nothing is.
    """

    name: str
    location: Location
    kind: str
    nbytes: int
    saved: float | None
    facts: tuple[tuple[str, str], ...]
    problem: str = ""


def _members(listing: RunListing | CollectionListing, top: Location) -> Iterator[ListingRow]:
    """Yield the checkpoints in a directory. The latest step is first, because users look at it most."""
    from ckpttools.runs.listing import RunListing

    if not isinstance(listing, RunListing):
        for item in listing.members:
            problem = "" if item.state == "complete" else item.state
            facts = [("format", item.format or ""), ("steps", "" if item.steps is None else str(item.steps))]
            if problem:
                facts.append((problem, item.reason or ""))
            location = top / item.name if item.name not in ("", ".") else top
            yield ListingRow(
                item.name, location, item.kind, item.nbytes, item.modified, tuple(facts), problem
            )
        return
    for step in reversed(listing.steps):
        problem = "" if step.unfinished_reason is None else "damaged" if step.is_damaged else "unfinished"
        facts = [("items", ", ".join(item.name or "(the step itself)" for item in step.items))]
        facts += [(name, f"{value:.6g}") for name, value in (step.metrics or {}).items()]
        if step.step == listing.resume_step:
            facts.append(("resumes", "a restarted run resumes from this step"))
        if problem:
            facts.append((problem, step.unfinished_reason or ""))
        location = top / step.name
        yield ListingRow(
            str(step.step), location, step.kind, step.nbytes, step.saved_at, tuple(facts), problem
        )


class ListingPage(BrowserPage):
    """The steps of a run, or the checkpoints in a directory."""

    def __init__(self, session: Session, listing: RunListing | CollectionListing, location: Location) -> None:
        # A path is shown as the user typed it, unless the steps are in a directory below.
        top = location if str(location.absolute()) == listing.path else parse(listing.path)
        self._session, self.title = session, str(top)
        self._noun = "step" if listing.rows_field == "steps" else "checkpoint"
        self.rows: Sequence[ListingRow] = tuple(_members(listing, top))
        self._marked: list[ListingRow] = []
        self.note = f"{plural(len(self.rows), self._noun)}; Space marks two, d compares them"

    def head(self, width: int) -> Cells:
        return Cells(f"  {self._noun}", _listing_columns("kind", "size", "saved", width))

    def cells(self, row: ListingRow, width: int) -> Cells:
        mark = "*" if row in self._marked else " "
        left = f"{mark} {row.name}" + f"  {row.problem}" * bool(row.problem)
        right = _listing_columns(row.kind, format_disk(row.nbytes), _age(row), width)
        return Cells(left, right, "warning" if row.problem else "")

    def facts(self, row: ListingRow | None) -> Lines:
        if row is None:
            return lambda width: wrap(printable(self.title), width)
        facts = (("kind", row.kind), ("size", format_disk(row.nbytes)), ("saved", _age(row)), *row.facts)
        return partial(_labeled, str(row.location), facts, "Enter opens it")

    def open(self, row: ListingRow) -> Task:
        return partial(open_location, self._session, row.location, None, None)

    def mark(self, row: ListingRow) -> None:
        if row in self._marked:
            self._marked.remove(row)
        else:
            # The older of two steps comes first.
            self._marked = sorted([*self._marked[-1:], row], key=self.rows.index, reverse=True)

    def compare(self, row: ListingRow, other: Location | None) -> Task | None:
        a, b = row.location, other
        if other is None and len(self._marked) == 2:
            a, b = (item.location for item in self._marked)
        elif other is None and self._marked and row not in self._marked:
            a, b = self._marked[0].location, row.location
        return None if b is None else partial(_compare, self._session, a, b, None)

    def copies(self, row: ListingRow) -> list[tuple[str, str]]:
        copies = [("path", str(row.location)), ("tree", command("inspect", "tree", row.location))]
        if len(self._marked) == 2:
            copies.append(("differences", command("diff", *(item.location for item in self._marked))))
        return [*copies, ("health", command("doctor", row.location))]


def _listing_columns(kind: str, size: str, saved: str, width: int) -> str:
    right = f"  {size:>8}"
    if width >= 45:
        right += f"  {saved:>14}"
    return f"  {kind:>20}{right}" if width >= 65 else right


def _age(row: ListingRow) -> str:
    return "" if row.saved is None else f"{format_age(time.time() - row.saved)} ago"


# Width of the labels of facts.
_LABEL = 11


def _labeled(title: str, facts: Iterable[tuple[str, str]], hint: str, width: int) -> Iterator[str]:
    """Yield a title, the facts that are not empty, and a hint."""
    yield from (styled(line, bold=True) for line in wrap(printable(title), width))
    for label, text in facts:
        if text:
            yield from format_labeled(printable(label), printable(text), _LABEL, width, dim=True)
    if hint:
        yield ""
        yield from (styled(line, dim=True) for line in wrap(hint, width))


@dataclass(slots=True, eq=False)
class OpenLine:
    """A row of the tree.

    Attributes:
        line: The folded line.
        row_above: The row above it; None at the top.
        member: The only sibling of the line that the row stands for; None for all.
        is_open: Whether the rows below it are in the list.
        is_listed: Whether the row is open and lists the siblings one by one.
    """

    line: FoldedLine
    row_above: OpenLine | None = None
    member: int | None = None
    is_open: bool = False
    is_listed: bool = False

    @property
    def members(self) -> Sequence[str]:
        return self.line.members if self.member is None else (self.line.members[self.member],)

    @property
    def depth(self) -> int:
        return 0 if self.row_above is None else self.row_above.depth + 1

    @property
    def parent(self) -> OpenLine | None:
        """The row whose names are prefixes of this row's names."""
        # Siblings that are listed one by one are below the row of all of them.
        return self.row_above if self.member is None or self.row_above is None else self.row_above.row_above

    @property
    def times(self) -> int:
        """Number of nodes that the row stands for."""
        return len(self.members) * (1 if self.parent is None else self.parent.times)

    @property
    def name(self) -> str:
        return self.line.name if self.member is None else self.line.members[self.member]

    def names(self) -> list[str]:
        """Return the names of all nodes that the row stands for."""
        if self.parent is None:
            return list(self.members)
        return [f"{start}{self.line.joint}{end}" for start in self.parent.names() for end in self.members]

    def pattern(self) -> str:
        """Return the name with folded siblings in braces: `model.layers.{0..31}.mlp`."""
        return self.name if self.parent is None else f"{self.parent.pattern()}{self.line.joint}{self.name}"

    def rows_below(self) -> list[OpenLine]:
        """Return the rows below it."""
        if self.is_listed:
            return [OpenLine(self.line, self, number) for number in range(len(self.members))]
        return [OpenLine(line, self) for line in self.line.children()]


# Filtered trees with up to this number of rows are fully open.
_MAX_OPEN_ROWS = 2000


class TreePage(BrowserPage):
    """The arrays of a checkpoint as a tree with folded layers."""

    def __init__(self, session: Session, tree: Tree, report: TreeReport) -> None:
        self._session, self._tree, self._report = session, tree, report
        self._location = report.path
        self.title = report.path
        self._words, self._by_size = "", False
        self._fold()

    def _fold(self) -> None:
        """Fold the arrays that contain all words."""
        from ckpttools.inspection.folding import FoldedLine

        words = self._words.lower().split()
        all_arrays = self._report.arrays
        arrays = [array for array in all_arrays if _has_words(array, words)] if words else all_arrays
        top = FoldedLine.top(arrays, sort="size" if self._by_size else None)
        rows = [OpenLine(line) for line in top.children()] if arrays else []
        if words and arrays:
            rows = _open_rows(rows)
        note = plural(len(all_arrays), "array")
        if words:
            note = f"{len(arrays):,} of {note}: {printable(self._words)}"
        else:
            note += f", {format_disk(self._report.nbytes)}"
        if self._by_size:
            note += ", largest first"
        if self._report.warnings and not words:
            note += f", {plural(len(self._report.warnings), 'warning')}: i shows"
        # Replaced at once, because the screen is drawn in another thread.
        self.rows, self.note = rows, note

    def filter(self, words: str) -> Task:
        return partial(self._refold, words, self._by_size)

    def sort(self) -> Task:
        return partial(self._refold, self._words, not self._by_size)

    def _refold(self, words: str, by_size: bool, control: TaskControl) -> BrowserPage:
        self._words, self._by_size = words, by_size
        self._fold()
        return self

    def head(self, width: int) -> Cells:
        return Cells("name", _tree_columns("dtype and shape", "arrays", "size", width))

    def cells(self, row: OpenLine, width: int) -> Cells:
        array, times = row.line.array, row.times
        marker = "▾" if row.is_open else " " if row.line.is_leaf else "▸"
        left = f"{'  ' * row.depth}{marker} {row.name}"
        kind = "" if array is None else format_type(array.quantized or array.dtype, array.shape)
        count = row.line.count * times
        size = format_disk(row.line.nbytes * times)
        right = _tree_columns(printable(kind), f"{count:,}" if count > 1 else "", size, width)
        return Cells(left, right, "" if array is not None else "bold")

    def facts(self, row: OpenLine | None) -> Lines:
        if row is None:
            from ckpttools.cli.tree_facts import fact_lines

            return partial(fact_lines, self._report)
        line, times, array = row.line, row.times, row.line.array
        title = row.pattern()
        count = line.count * times
        facts = [("arrays", f"{count:,}" if count > 1 else ""), ("bytes", format_disk(line.nbytes * times))]
        facts.append(("elements", f"{line.num_elements * times:,}"))
        if array is None:
            hint = "Enter opens it" + "; u lists them one by one" * (times > 1)
            return partial(_labeled, title, facts, hint)
        facts = [
            ("type", format_type(array.dtype, array.shape)),
            *facts,
            ("role", array.role),
            ("quantized", array.quantized or ""),
        ]
        if times > 1:
            hint = f"Enter reads these {count:,} arrays and shows them side by side; u lists them one by one"
        else:
            hint = "Enter reads its values and statistics; l shows its layers side by side"
        return partial(_labeled, title, facts, hint)

    def open(self, row: OpenLine) -> Task | None:
        if row.line.is_leaf:
            return self.layers(row) if row.times > 1 else self.index(row, "")
        self._set_open(row, not row.is_open)
        return None

    def list_siblings(self, row: OpenLine) -> int:
        folded = row
        while len(folded.members) == 1 and folded.row_above is not None:
            folded = folded.row_above
        if len(folded.members) > 1:
            self._set_open(folded, not folded.is_listed, is_listed=not folded.is_listed)
            row = folded
        return self.rows.index(row)

    def _set_open(self, row: OpenLine, is_open: bool, *, is_listed: bool = False) -> None:
        rows = list(self.rows)
        start = rows.index(row) + 1
        if row.is_open:
            stop = next((k for k in range(start, len(rows)) if rows[k].depth <= row.depth), len(rows))
            del rows[start:stop]
        row.is_open, row.is_listed = is_open, is_listed
        if is_open:
            rows[start:start] = row.rows_below()
        self.rows = rows

    def close(self, row: OpenLine) -> int | None:
        if row.is_open:
            self._set_open(row, False)
            return self.rows.index(row)
        return None if row.row_above is None else self.rows.index(row.row_above)

    def index(self, row: OpenLine, index: str) -> Task | None:
        if not row.line.is_leaf or row.times > 1:
            return super().index(row, index)
        return partial(show_array, self._session, self._tree, row.names()[0], index)

    def layers(self, row: OpenLine) -> Task | None:
        if not row.line.is_leaf:
            return super().layers(row)
        return partial(_read_layers, self._session, self._tree, row.names(), row.pattern())

    def about(self) -> Task:
        return self._describe

    def _describe(self, control: TaskControl) -> None:
        from ckpttools.api.inspect import inspect
        from ckpttools.cli.tree_facts import fact_lines

        control.show(partial(fact_lines, self._report))
        self._report = replace(inspect(self._tree), path=self._location)
        control.show(partial(fact_lines, self._report))

    def compare(self, row: OpenLine, other: Location | None) -> Task | None:
        return None if other is None else partial(_compare, self._session, parse(self._location), other, None)

    def copies(self, row: OpenLine) -> list[tuple[str, str]]:
        names = row.names()
        name, here = names[0], self._location
        # Folded siblings are in braces.
        pattern = name if len(names) == 1 else re.sub(r"\{.*?\}", "*", row.pattern())
        copies = [("name", name), ("path", here)]
        if row.line.is_leaf:
            copies.append(("values", command("cat", here, name)))
        else:
            pattern += f"{row.line.joint}*"
        return [
            *copies,
            ("statistics", command("inspect", "stats", here, "--filter", pattern)),
            ("tree", command("inspect", "tree", here, "--filter", pattern)),
        ]


def _has_words(array: ArrayReport, words: Sequence[str]) -> bool:
    text = f"{array.path} {format_type(array.dtype, array.shape)} {array.role}".lower()
    return all(word in text for word in words)


def _open_rows(rows: Sequence[OpenLine]) -> list[OpenLine]:
    """Return the rows with those below them, level by level, unless there are too many."""
    result = list(rows)
    while len(result) <= _MAX_OPEN_ROWS:
        deeper: list[OpenLine] = []
        for row in result:
            deeper.append(row)
            if not row.line.is_leaf and not row.is_open:
                row.is_open = True
                deeper += row.rows_below()
        if len(deeper) == len(result):
            break
        result = deeper
    return result


def _tree_columns(kind: str, count: str, size: str, width: int) -> str:
    right = f"  {size:>8}"
    if width >= 36:
        right = f"  {count:>7}{right}"
    # Long shapes and schemes must leave room for names.
    return f"  {kind}{right}" if width >= 60 and len(kind) <= 2 * width // 5 else right


def _join_sections(sections: Sequence[Lines], width: int) -> Iterator[str]:
    """Yield the lines of all sections, with an empty line between them."""
    for number, section in enumerate(sections):
        if number:
            yield ""
        yield from section(width)


def _or_error(read: Callable[[], Lines]) -> Lines:
    """Read something, and return its lines or those of the error."""
    from ckpttools.cli.error_boundary import error_lines
    from ckpttools.core.errors import CheckpointError

    try:
        return read()
    except (CheckpointError, OSError, MemoryError) as error:
        return partial(error_lines, error)


def show_array(session: Session, tree: Tree, name: str, index: str, control: TaskControl) -> None:
    """Show values of an array, then its statistics and histogram, which take longer."""
    from ckpttools.api.cat import cat

    title = partial(_labeled, name + (f"[{index}]" if index else ""), (), "")
    read = partial(cat, tree, name, memory=session.memory, requests=session.requests)

    def read_values() -> Lines:
        return partial(_value_lines, read(index=index or None))

    def read_statistics() -> Lines:
        if index:
            region = read(index=index, stats=True)
            assert region.statistics is not None
            return partial(_statistics_lines, region.statistics, None)
        from ckpttools.inspection.stats import inspect_stats

        numeric = _numeric(tree)
        path = numeric.find_path(name)
        if path not in numeric.arrays:
            return lambda width: ()
        report = inspect_stats(
            numeric,
            [path],
            memory=session.memory,
            jobs=session.jobs,
            histograms=True,
            observe=observe_bytes(control.observe, numeric.arrays[path].nbytes),
        )
        (array,) = report.arrays
        return partial(_statistics_lines, array.statistics, array)

    values = _or_error(read_values)
    control.show(partial(_join_sections, (title, values)))
    statistics = _or_error(read_statistics)
    control.show(partial(_join_sections, (title, statistics, values)))


def _numeric(tree: Tree) -> Tree:
    """Return the tree with quantized weights dequantized, as for `ckpt inspect stats`."""
    from ckpttools.quantized.view import quantized_view

    return quantized_view(tree).plain_where_possible().tree


def _value_lines(values: ArrayValues, width: int) -> Iterator[str]:
    from ckpttools.cli.cat import format_values

    kind = values.dtype or ""
    yield styled(kind if kind == "text" else format_type(kind, values.selected_shape), bold=True)
    yield from values.remarks
    if values.excerpt:
        yield styled("first and last items of each axis; v reads a region", dim=True)
    if values.values is not None:
        yield from format_values(values, width).splitlines()


def _statistics_lines(statistics: Statistics, array: ArrayStats | None, width: int) -> Iterator[str]:
    from ckpttools.cli.cat import statistics_lines
    from ckpttools.cli.stats import histogram_lines

    if array is not None and array.first_bad is not None:
        location = f"[{', '.join(map(str, array.first_bad))}]"
        bad = statistics.nan + statistics.inf
        yield styled(f"NaN or Inf: first of {bad:,} at {location}", fg="red", bold=True)
    yield from statistics_lines(statistics)
    if array is not None and array.distribution is not None:
        yield ""
        yield from histogram_lines(array.distribution, statistics.zeros, width)


@dataclass(frozen=True, slots=True)
class _LayerStatistics:
    """Statistics of a layer, or of an array that belongs to none.

    Attributes:
        label: `layer 3`, or the name of the array.
        name, index: The first array, and the region of the layer; "" for all of it.
        num_arrays: Number of arrays, such as those of experts.
        norm, std, max_abs, mean: Statistics of the finite elements; None if there are none.
        bad: Number of NaN and infinite elements.
    """

    label: str
    name: str
    index: str
    num_arrays: int
    norm: float | None
    std: float | None
    max_abs: float | None
    mean: float | None
    bad: int


def _read_layers(
    session: Session, tree: Tree, names: Sequence[str], title: str, control: TaskControl
) -> LayersPage:
    """Read the layers of arrays, and show them side by side.

    Args:
        session: Limits.
        tree: The checkpoint.
        names: Names of the arrays. If there is one that belongs to one layer, the other layers are read, too.
        title: Name of the page.
        control: The running task.
    """
    import numpy as np

    from ckpttools.inspection.layer_rows import layer_rows
    from ckpttools.inspection.stats import inspect_stats

    numeric = _numeric(tree)
    known = numeric.once(layer_rows)
    paths: list[Path] = [numeric.find_path(name) for name in names]
    first = known.get(paths[0])
    if len(paths) == 1 and first is not None and not first.axes:
        paths = [path for path, row in known.items() if row.name == first.name]
        title = first.name
    total = sum(numeric.arrays[path].nbytes for path in paths)
    report = inspect_stats(
        numeric,
        paths,
        memory=session.memory,
        jobs=session.jobs,
        per_layer=True,
        observe=observe_bytes(control.observe, total),
    )
    parts: dict[tuple[int, str], list[tuple[str, str, Statistics]]] = {}
    for path, array in zip(paths, report.arrays, strict=True):
        row = known.get(path)
        if row is None:
            parts[len(parts), array.path] = [(array.path, "", array.statistics)]
            continue
        for layer, statistics in (array.layers or {row.numbers[0]: array.statistics}).items():
            index = ""
            if row.axes:
                lengths = [array.shape[axis] for axis in row.axes]
                at = np.unravel_index(row.numbers.index(layer), lengths)
                index = ", ".join([*[":"] * row.axes[0], *map(str, at)])
            parts.setdefault((layer, f"layer {layer}"), []).append((array.path, index, statistics))
    rows = [_combine_layer(label, parts[number, label]) for number, label in sorted(parts)]
    return LayersPage(session, tree, rows, title)


def _combine_layer(label: str, parts: Sequence[tuple[str, str, Statistics]]) -> _LayerStatistics:
    """Combine the arrays of a layer, such as those of experts."""
    from ckpttools.inspection.moment_statistics import Moments

    total = Moments()
    for _, _, item in parts:
        total += Moments(nan=item.nan, inf=item.inf)
        if item.mean is not None and item.std is not None:
            finite = item.elements - item.nan - item.inf
            total += Moments(finite=finite, mean=item.mean, spread=item.std * sqrt(finite))
    name, index, _ = parts[0]
    return _LayerStatistics(
        label,
        name,
        index,
        num_arrays=len(parts),
        norm=total.norm,
        std=total.deviation,
        max_abs=max((item.max_abs for _, _, item in parts if item.max_abs is not None), default=None),
        mean=total.mean if total.finite else None,
        bad=total.nan + total.inf,
    )


class LayersPage(BrowserPage):
    """The layers of an array side by side."""

    def __init__(self, session: Session, tree: Tree, rows: Sequence[_LayerStatistics], title: str) -> None:
        self._session, self._tree = session, tree
        self.rows: Sequence[_LayerStatistics] = ()
        self._all = tuple(rows)
        self._label_width = max((len(printable(row.label)) for row in self._all), default=0)
        self._largest_std = max((row.std or 0.0 for row in self._all), default=0.0)
        self.title = title
        self._keys: tuple[str, ...] = ("label", "norm", "std", "max_abs")
        self._order()

    def _order(self) -> None:
        key = self._keys[0]
        if key == "label":
            self.rows, order = self._all, "in order"
        else:
            self.rows = sorted(self._all, key=lambda row: -(getattr(row, key) or 0))
            order = f"largest {key.replace('_', ' ')} first"
        bad = sum(bool(row.bad) for row in self._all)
        self.note = f"{plural(len(self.rows), 'row')}, {order}" + (f"; NaN or Inf in {bad:,}" if bad else "")

    def sort(self) -> None:
        self._keys = (*self._keys[1:], self._keys[0])
        self._order()

    def head(self, width: int) -> Cells:
        right = _layer_columns(("norm", "std", "max abs", "mean"), width)
        return Cells(f"{'':<{self._label_width}}  bars: std" if self._bar_room(right, width) else "", right)

    def _bar_room(self, right: str, width: int) -> int:
        """Return the columns of the longest bar; 0 if there are no bars."""
        room = min(30, width - len(right) - self._label_width - 3)
        return room if room >= 10 and self._largest_std else 0

    def cells(self, row: _LayerStatistics, width: int) -> Cells:
        from ckpttools.cli.stats import format_number

        numbers = tuple(map(format_number, (row.norm, row.std, row.max_abs, row.mean)))
        right = _layer_columns(numbers, width)
        left = printable(row.label)
        if row.bad:
            return Cells(f"{left}  {row.bad:,} NaN or Inf", right, "error")
        if room := self._bar_room(right, width):
            left = f"{left:<{self._label_width}}  {'█' * round(room * (row.std or 0.0) / self._largest_std)}"
        return Cells(left, right)

    def facts(self, row: _LayerStatistics | None) -> Lines:
        if row is None:
            return lambda width: ()
        title = row.name + (f"[{row.index}]" if row.index else "")
        numbers = [
            (label, "" if value is None else f"{value:.6g}")
            for label, value in (
                ("norm", row.norm),
                ("std", row.std),
                ("max abs", row.max_abs),
                ("mean", row.mean),
            )
        ]
        facts = (*numbers, ("NaN or Inf", f"{row.bad:,}" if row.bad else ""))
        target = "it" if row.num_arrays == 1 else f"the first of these {row.num_arrays:,} arrays"
        return partial(_labeled, title, facts, f"Enter reads {target}; s sorts by norm, std or max abs")

    def open(self, row: _LayerStatistics) -> Task:
        return self.index(row, row.index)

    def index(self, row: _LayerStatistics, index: str) -> Task:
        return partial(show_array, self._session, self._tree, row.name, index)

    def copies(self, row: _LayerStatistics) -> list[tuple[str, str]]:
        name = row.name + (f"[{row.index}]" if row.index else "")
        here = self._tree.metadata.location
        return [
            ("name", row.name),
            ("path", here),
            ("values", command("cat", here, name)),
            ("statistics", command("inspect", "stats", here, "--per-layer", "--filter", row.name)),
        ]


def _layer_columns(numbers: Sequence[str], width: int) -> str:
    shown = numbers if width >= 70 else numbers[:3] if width >= 50 else numbers[:2]
    return "".join(f" {number:>10}" for number in shown)


class DiffPage(BrowserPage):
    """The differences between two checkpoints, largest first."""

    def __init__(self, session: Session, trees: tuple[Tree, Tree], report: DiffReport) -> None:
        self._session, self._trees, self._report = session, trees, report
        self.title = f"{report.a.path} and {report.b.path}"
        self.rows: Sequence[ArrayDiff | GroupDiff] = report.arrays
        self._words, self._by_layer = "", False
        self._choose()

    def _choose(self) -> None:
        words = self._words.lower().split()
        rows = self._report.layers if self._by_layer else self._report.arrays
        self.rows = [row for row in rows if all(word in row.name.lower() for word in words)]
        counts = ", ".join(
            f"{count:,} {'different' if outcome == 'differs' else outcome}"
            for outcome, count in self._report.outcomes.items()
        )
        ranked = "layers" if self._by_layer else "arrays"
        self.note = f"equal: {counts}" if self._report.equal else f"{ranked} by relative L2; {counts}"

    def filter(self, words: str) -> Task:
        return partial(self._refilter, words)

    def _refilter(self, words: str, control: TaskControl) -> BrowserPage:
        self._words = words
        self._choose()
        return self

    def layers(self, row: object) -> None:
        self._by_layer = not self._by_layer
        self._choose()

    def head(self, width: int) -> Cells:
        return Cells(
            "layer" if self._by_layer else "array", _diff_columns(("rel L2", "cosine", "max abs"), width)
        )

    def cells(self, row: ArrayDiff | GroupDiff, width: int) -> Cells:
        distance, outcome = row.distance, getattr(row, "outcome", "differs")
        if distance is None:
            return Cells(row.name, f"  {outcome}", "warning")
        rel_l2, largest = _measures(row)
        cosine = "" if distance.cosine is None else f"{distance.cosine:.6f}"
        right = _diff_columns((f"{rel_l2:.3g}", cosine, f"{largest:.3g}"), width)
        return Cells(row.name, right, "error" if rel_l2 != rel_l2 else "")

    def facts(self, row: ArrayDiff | GroupDiff | None) -> Lines:
        if row is None:
            remarks = [*self._report.remarks, *self._report.uncompared, *self._report.hints]
            facts = (("A", self._report.a.path), ("B", self._report.b.path))
            verdict = "equal" if self._report.equal else "different"
            return lambda width: (
                *_labeled(verdict, facts, "", width),
                *(line for remark in remarks for line in ("", *wrap(printable(str(remark)), width))),
            )
        return partial(_labeled, row.name, tuple(_difference_facts(row)), "Enter reads both sides")

    def about(self) -> Task:
        return lambda control: control.show(self.facts(None))

    def open(self, row: ArrayDiff | GroupDiff) -> Task:
        return partial(self._read_both, row, getattr(row, "most_different", None) or row.name)

    def _read_both(self, row: ArrayDiff | GroupDiff, name: str, control: TaskControl) -> None:
        from ckpttools.inspection.stats import inspect_stats

        facts = partial(_labeled, row.name, tuple(_difference_facts(row)), "")
        sides: list[Statistics | None] = []
        for tree in map(_numeric, self._trees):
            path: Path = tree.find_path(name) if tree.get(name) is not None else ()
            if path not in tree.arrays:
                sides.append(None)
                continue
            report = inspect_stats(
                tree,
                [path],
                memory=self._session.memory,
                jobs=self._session.jobs,
                observe=observe_bytes(control.observe, tree.arrays[path].nbytes),
            )
            sides.append(report.arrays[0].statistics)
        if any(sides):
            both: Lines = partial(_side_lines, name, sides)
        else:
            both = partial(wrap, "neither side stores an array of this name: layers are stacked")
        control.show(partial(_join_sections, (facts, both)))

    def copies(self, row: ArrayDiff | GroupDiff) -> list[tuple[str, str]]:
        a, b = self._report.a.path, self._report.b.path
        pattern = f"{row.name}*" if self._by_layer else row.name
        return [
            ("name", row.name),
            ("difference", command("diff", a, b, "--filter", pattern)),
            ("all", command("diff", a, b, "--sort", "rel-l2")),
        ]


def _measures(row: ArrayDiff | GroupDiff) -> tuple[float, float]:
    """Return the relative L2 distance and the largest difference."""
    from ckpttools.compare.groups import GroupDiff, grouped

    group = row if isinstance(row, GroupDiff) else grouped("", [row])
    return (0.0 if group.rel_l2 is None else group.rel_l2), group.max_abs


def _diff_columns(numbers: Sequence[str], width: int) -> str:
    shown = numbers if width >= 55 else numbers[:1]
    return "".join(f" {number:>9}" for number in shown)


def _difference_facts(row: ArrayDiff | GroupDiff) -> Iterator[tuple[str, str]]:
    from ckpttools.compare.groups import GroupDiff

    distance = row.distance
    if isinstance(row, GroupDiff):
        yield "arrays", f"{row.num_differing:,} of {row.arrays:,} differ"
        yield "most in", row.most_different or ""
    else:
        yield "outcome", row.outcome
        for side, kind in (("A", row.a), ("B", row.b)):
            yield side, "" if kind is None else format_type(kind.dtype, kind.shape)
    if distance is not None:
        rel_l2, largest = _measures(row)
        yield "rel L2", f"{rel_l2:.4g}"
        yield "cosine", "" if distance.cosine is None else f"{distance.cosine:.8f}"
        yield "rms", f"{distance.rms:.4g}"
        yield "norms", f"{distance.norm_a:.6g} and {distance.norm_b:.6g}"
        yield "max abs", f"{largest:.4g}"
    if isinstance(row, GroupDiff):
        yield "NaN", f"{row.nan:,} on one side" if row.nan else ""
        return
    if row.deviation is not None and row.deviation.num_differing:
        yield "differing", f"{row.deviation.num_differing:,} of {row.deviation.elements:,} elements"
        first = row.deviation.first
        yield "first", "" if first is None else f"[{', '.join(map(str, first))}]"
        yield "NaN", f"{row.deviation.nan:,} on one side" if row.deviation.nan else ""
    if row.cause is not None:
        yield "because", row.cause.text
        yield "next", row.cause.advice


def _side_lines(name: str, sides: Sequence[Statistics | None], width: int) -> Iterator[str]:
    """Yield the statistics of both sides next to each other."""
    from ckpttools.cli.stats import format_number

    yield from (styled(line, bold=True) for line in wrap(printable(name), width))
    yield styled(f"{'':<{_LABEL}}{'A':>12}{'B':>12}", dim=True)
    for field in ("min", "max", "mean", "std", "norm", "zeros", "nan", "inf"):
        numbers = ["–" if side is None else format_number(getattr(side, field)) for side in sides]
        yield f"{field:<{_LABEL}}{numbers[0]:>12}{numbers[1]:>12}"
