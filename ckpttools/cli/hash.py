"""`ckpt hash`: what a checkpoint holds, in a few digits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import ANY_PATH, bundled, json_option, read_options, resource_options
from ckpttools.cli.output import print_json, say, show
from ckpttools.cli.scanning import progress_option, watching
from ckpttools.cli.wording import wording_options
from ckpttools.core.errors import UsageError
from ckpttools.core.text import printable

if TYPE_CHECKING:
    from ckpttools.api.conversion import Resources
    from ckpttools.compare.counterpart import Wording
    from ckpttools.digest.canonical import Selection
    from ckpttools.digest.manifest import Manifest
    from ckpttools.formats.base import ReadOptions


def _selection(**values: Any) -> Selection:
    from ckpttools.digest.canonical import Selection

    return Selection(**values)


selection_options = bundled(
    "selection",
    _selection,
    click.option(
        "--filter",
        "pattern",
        metavar="GLOB",
        default="*",
        help="Only arrays whose whole name matches, such as '*/mlp/*'.",
    ),
    click.option(
        "--per-layer/--whole",
        "layers",
        default=True,
        show_default=True,
        help="Stacked layers one by one, or as they are stored.",
    ),
    click.option("--parameters", is_flag=True, help="Leave out optimizer state, step and random states."),
)


@click.command("hash", short_help="Digests that no format or layout changes.")
@click.argument("path", type=ANY_PATH)
@json_option
@click.option(
    "--manifest",
    type=ANY_PATH,
    metavar="FILE",
    help="Also write the digests to a new file, for ckpt verify PATH --manifest FILE.",
)
@click.option(
    "--algorithm",
    type=click.Choice(("xxh3-128", "sha256")),
    default="xxh3-128",
    show_default=True,
    help="xxh3-128 tells damage and mistakes, sha256 also what was changed on purpose.",
)
@click.option(
    "--as",
    "names",
    type=click.Choice(("stored", "maxtext")),
    default="stored",
    show_default=True,
    help="Under which names: those that are stored, or those of the MaxText checkpoint that a Hugging Face "
    "one becomes, parameters only.",
)
@wording_options
@selection_options
@resource_options
@progress_option
@read_options
def hash_command(
    path: Path,
    as_json: bool,
    manifest: Path | None,
    algorithm: str,
    names: str,
    wording: Wording | None,
    selection: Selection,
    resources: Resources,
    progress: bool,
    read: ReadOptions,
) -> None:
    """Print a digest of every array, one of all parameters, and one of everything.

    They depend on values, shapes, dtypes and names alone: not on the format, chunks, compression or number
    of files. Layers stacked for scanning have a digest each, and names are without what Linen and NNX put
    around them, so that scanned and unscanned checkpoints of one model agree.

    \b
    Example:
      ckpt hash ~/maxtext/llama3.1-8b --manifest llama.json
      diff <(ckpt hash a) <(ckpt hash b)
    """
    from ckpttools.api.beside import check_beside
    from ckpttools.digest.hashing import hash_tree
    from ckpttools.digest.manifest import check_name
    from ckpttools.formats.registry import open_tree

    if manifest is not None:
        check_beside(manifest, path)
        check_name(manifest)
    tree = open_tree(path, read)
    remarks: tuple[str, ...] = ()
    if names == "maxtext":
        from ckpttools.compare.counterpart import in_maxtext_names

        if not selection.layers:
            raise UsageError("--as maxtext names single layers", hint="leave out --whole or --as")
        named = in_maxtext_names(tree, wording)
        selection = replace(selection, spelling=lambda tree: named.arrays, parameters=True)
        remarks = named.remarks
    elif wording is not None:
        raise UsageError("names are as they are stored", hint="--as maxtext asks for those of a conversion")
    with watching(progress, selection.nbytes(tree)) as observe:
        made = hash_tree(
            tree,
            selection,
            algorithm=algorithm,
            memory=resources.memory,
            jobs=resources.readers,
            observe=observe,
        )
    if manifest is not None:
        replace(made, names=names).write(manifest)
    if as_json:
        print_json(_described(made, tree.metadata.place, remarks))
    else:
        for each in remarks:
            say(each)
        show(_lines(made))


def _described(made: Manifest, place: str, remarks: tuple[str, ...]) -> dict[str, object]:
    """What `--json` prints: the manifest without the digests of blocks, which can be long."""
    arrays = [
        {"name": name, "dtype": each.dtype, "shape": each.shape, "digest": each.digest}
        for name, each in made.arrays.items()
    ]
    return {
        "path": place,
        "algorithm": made.algorithm,
        "per_layer": made.selection.layers,
        "digest": made.digest,
        "parameters": made.parameters,
        "remarks": remarks,
        "arrays": arrays,
    }


def _lines(made: Manifest) -> list[str]:
    """As sha256sum prints them; the same for checkpoints that hold the same."""
    lines = [f"{each.digest}  {printable(name)}" for name, each in made.arrays.items()]
    return [*lines, f"{made.parameters}  (parameters)", f"{made.digest}  (everything)"]
