"""`ckpt inspect report`: a checkpoint as one HTML page."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import ANY_PATH, SOME_TEXT, json_option, read_options, resource_options
from ckpttools.cli.output import print_json, show
from ckpttools.cli.scanning import progress_option, watching
from ckpttools.cli.units import counted, disk
from ckpttools.core.errors import DestinationExistsError, StorageError
from ckpttools.core.text import printable

if TYPE_CHECKING:
    from ckpttools.api.conversion import Resources
    from ckpttools.array.tree import Tree
    from ckpttools.formats.base import ReadOptions


_PAGES = (".html", ".htm")
_DOCTYPE = b"<!doctype html"


@dataclass(frozen=True, slots=True)
class Written:
    """The page that was written.

    Attributes:
        output: its name.
        nbytes: its size.
        num_arrays: arrays that it shows.
        stats: whether it has statistics.
    """

    output: Path
    nbytes: int
    num_arrays: int
    stats: bool


@click.command()
@click.argument("path", type=ANY_PATH)
@click.option(
    "--output",
    "-o",
    "name",
    type=SOME_TEXT,
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="The page to write; - for stdout.",
)
@click.option("--no-stats", is_flag=True, help="Leave out statistics: no array is read.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it is there.")
@progress_option
@json_option
@resource_options
@read_options
def report(
    path: Path,
    name: str,
    no_stats: bool,
    overwrite: bool,
    progress: bool,
    as_json: bool,
    resources: Resources,
    read: ReadOptions,
) -> None:
    """Write a report on a checkpoint: one HTML page that needs no network.

    It shows where the bytes are, how norms run over the layers, how elements are distributed, and a table
    of all arrays to search and sort. It is made for screens, light or dark, and for paper.

    \b
    Example:
      ckpt inspect report ~/maxtext/llama3.1-8b -o llama3.1-8b.html
    """
    from ckpttools.formats.registry import open_tree

    output = None if name == "-" else Path(name)
    if output is None and as_json:
        raise click.UsageError("stdout takes one of both: leave out --json, or name a file with --output")
    if output is not None:
        _check(output, path, overwrite)
    tree = open_tree(path, read)
    text = _page(tree, resources, progress, stats=not no_stats)
    page = f"{counted(len(tree.arrays), 'array')}, a page of {disk(len(text.encode()))}"
    if output is None:
        # Not as text: what it is written in may lack characters.
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
        click.echo(page, err=True)
        return
    _write(output, text)
    if as_json:
        print_json(Written(output, len(text.encode()), len(tree.arrays), not no_stats))
    else:
        show([f"{output}: {page}"])


def _page(tree: Tree, resources: Resources, progress: bool, *, stats: bool) -> str:
    from ckpttools.inspect.layer_rows import layer_rows
    from ckpttools.inspect.report.contents import contents
    from ckpttools.inspect.report.page import page
    from ckpttools.inspect.stats import inspect_stats
    from ckpttools.inspect.tree import inspect_tree

    options: dict[str, Any] = {"memory": resources.memory, "jobs": resources.readers}
    found = None
    if stats:
        with watching(progress, tree.nbytes) as observe:
            found = inspect_stats(tree, per_layer=True, histograms=True, observe=observe, **options)
    return page(
        contents(inspect_tree(tree), found, layer_rows(tree)), f"Report on {printable(tree.metadata.place)}"
    )


def _check(output: Path, source: Path, overwrite: bool) -> None:
    """Refuses before anything is read."""
    from ckpttools.api.beside import check_beside

    if output.is_dir():
        raise DestinationExistsError(f"{output} is a directory", wanted="the name of a file")
    if output.exists() and _is_part(output.resolve(), source.resolve()):
        raise DestinationExistsError(
            f"{output} is a part of the checkpoint", wanted="a name outside of it, or one in .html"
        )
    check_beside(output, source)
    # A link that leads nowhere is something, too.
    if os.path.lexists(output) and not overwrite:
        raise DestinationExistsError(
            f"{output} exists",
            wanted="a new name",
            hint="choose another with --output, or allow its replacement with --overwrite",
        )
    if output.exists() and not _is_page(output.resolve()):
        raise DestinationExistsError(
            f"{output} is no page, and nothing else is replaced by one", wanted="another name"
        )
    if not output.absolute().parent.is_dir():
        raise StorageError(
            f"there is no directory {output.parent}", place=output, hint="make it, or choose another --output"
        )


def _is_part(output: Path, source: Path) -> bool:
    """Whether a file is the checkpoint or lies in it, earlier pages left out."""
    return output == source or (source in output.parents and output.suffix != ".html")


def _is_page(path: Path) -> bool:
    """Whether a file is named as a page, or begins as one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix.lower() in _PAGES or file.read(len(_DOCTYPE)).lower() == _DOCTYPE


def _write(output: Path, text: str) -> None:
    """Writes the page whole, so that nobody finds half of it; of a link, what it leads to."""
    from ckpttools.stores.files import write_error, write_whole

    output = output.resolve()
    try:
        write_whole(output, text.encode())
    except OSError as error:
        raise write_error(output, error) from error
