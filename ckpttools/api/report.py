"""Write an HTML report about a checkpoint."""

from __future__ import annotations

from typing import Unpack

from ckpttools.api.options import SCANNING
from ckpttools.api.options.inspect import REPORT
from ckpttools.api.output_file import check_output_file
from ckpttools.api.sources import (
    Scanning,
    ScanSettings,
    Source,
    location_of,
    opened,
    scanning,
)
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, StorageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare
from ckpttools.core.text import printable
from ckpttools.quantized.view import quantized_view
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

_PAGES = (".html", ".htm")
_DOCTYPE = b"<!doctype html"


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """A self-contained HTML report about a checkpoint.

    Attributes:
        output: The file that was written, or None.
        nbytes: Size of the page in bytes.
        num_arrays: Number of arrays on the page.
        stats: Whether the page has statistics.
        html: The page itself.
    """

    output: Location | None
    nbytes: int
    num_arrays: int
    stats: bool
    html: str

    def __repr__(self) -> str:
        where = "not written" if self.output is None else str(self.output)
        return f"<Page of {self.num_arrays:,} arrays, {self.nbytes:,} bytes: {where}>"


@validate_arguments
@declare(*REPORT, *SCANNING)
def report(
    source: Source,
    output: LocationLike | None = None,
    *,
    stats: bool = True,
    overwrite: bool = False,
    **common: Unpack[Scanning],
) -> Page:
    """Create a report that shows where the bytes are, the norm of each layer, and value distributions.

    Args:
        source: A file, item, step or run directory, or a tree.
        output: The file to write; None to return only the page in `html`.
        stats: Whether to read every element once for statistics; otherwise no array is read.

    Raises:
        DestinationExistsError: The file exists and may not be replaced. Nothing was read.
        CheckpointError: An array cannot be read, the memory is too small, or the page cannot be written.
    """
    location = None if output is None else parse(output)
    if location is not None:
        _check(location, location_of(source), overwrite)
    with scanning(common) as scan:
        tree = opened(source, scan.read)
        values, _ = quantized_view(tree).plain_where_possible() if stats else (tree, "")
        scan.fetch(values)
        html, num_arrays = _html(tree, values, scan, stats=stats)
    if location is not None:
        _write(location, html)
    return Page(location, len(html.encode()), num_arrays, stats, html)


def _html(tree: Tree, values: Tree, scan: ScanSettings, *, stats: bool) -> tuple[str, int]:
    """Return the page and the number of arrays on it. `values` is the tree with dequantized weights."""
    from ckpttools.inspection.html_report import MAX_HISTOGRAMS, contents, page
    from ckpttools.inspection.layer_rows import layer_rows
    from ckpttools.inspection.stats import inspect_stats
    from ckpttools.inspection.tree import inspect_tree

    result = None
    if stats:
        result = inspect_stats(
            values,
            memory=scan.memory,
            jobs=scan.jobs,
            per_layer=True,
            histograms=True,
            most_histograms=MAX_HISTOGRAMS,
            observe=scan.observer(values.nbytes),
        )
    report = inspect_tree(tree)
    title = f"Report on {printable(tree.metadata.location)}"
    return page(contents(report, result, layer_rows(values)), title), report.num_arrays


def _check(output: Location, source: Location | None, overwrite: bool) -> None:
    """Reject invalid arguments before anything is read."""
    output.check_accepts_files()
    if output.is_dir():
        raise DestinationExistsError(f"{output} is a directory", expected="the name of a file")
    if source is not None and output.exists() and _is_part(output.resolve(), source.resolve()):
        raise DestinationExistsError(
            f"{output} is a part of the checkpoint", expected="a name outside of it, or one in .html"
        )
    check_output_file(output, source or "")
    if output.exists() and not _is_page(output.resolve()):
        raise DestinationExistsError(
            f"{output} is not a report, and only reports are replaced", expected="another name"
        )
    # A broken link also counts as existing.
    if output.lexists() and not overwrite:
        raise DestinationExistsError(
            f"{output} exists",
            expected="a new name",
            hint=f"choose another with {option('output')}, or allow its replacement with "
            f"{option('overwrite', True)}",
        )
    if not output.absolute().parent.is_dir():
        hint = f"create it, or choose another {option('output')}"
        raise StorageError(f"no such directory: {output.parent}", location=output, hint=hint)


def _is_part(output: Location, source: Location) -> bool:
    """Return whether a file is the checkpoint or is inside it, except earlier reports."""
    return output == source or (source in output.parents and output.suffix != ".html")


def _is_page(path: Location) -> bool:
    """Return whether a file is a report, judging by its name or its first bytes."""
    if not path.is_file():
        return False
    with path.open() as file:
        head = file.read(0, min(file.size, len(_DOCTYPE)))
        return path.suffix.lower() in _PAGES or head.lower() == _DOCTYPE


def _write(output: Location, text: str) -> None:
    """Write the page atomically, following a symbolic link."""
    output.resolve().put(text.encode())
