"""`ckpt verify`: verify that two checkpoints have the same arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import click
from click.core import ParameterSource

from ckpttools.api.options import OPENING
from ckpttools.api.options.inspect import VERIFY
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.message_terms import flag
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option, resource_options
from ckpttools.cli.output import exit_with_differences, print_report, styled
from ckpttools.cli.progress import progress_events
from ckpttools.core.errors import UsageError
from ckpttools.core.text import fold_lines, format_disk, plural, printable
from ckpttools.stores.contents import SupportsContents
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.sources import Scanning
    from ckpttools.api.verify import FileVerification, Verification
    from ckpttools.digest.pairing import Difference, Reason

_MAX_LINES = 20
# Beginnings of descriptions of leaves that are not arrays.
_OTHER_NODES = ("text ", "empty node", "file ")
# Texts of `Difference.reason` after an array count; reasons are listed in this order.
_REASONS: dict[Reason, str] = {
    "values": "with different values",
    "dtype": "of a different dtype",
    "shape": "of a different shape",
    "kind": "of a different kind",
    "missing": "missing",
    "extra": "too many",
}


@click.command(short_help="Verify bit for bit that two checkpoints hold the same arrays.", cls=BaseCommand)
@click.argument("path", metavar="DST", type=ANY_PATH)
@flags(*VERIFY)
@json_option
@resource_options
@progress_option
@flags(*OPENING)
def verify(
    path: Location,
    against: Location | None,
    manifest: Location | None,
    cast: bool,
    padding_rows: str | None,
    rope_layout: str | None,
    family: str | None,
    tied: str | None,
    drop: tuple[str, ...],
    as_json: bool,
    filter: str,
    per_layer: bool,
    parameters: bool,
    progress: bool,
    **scanning: Unpack[Scanning],
) -> None:
    """Verify bit for bit that DST has the same arrays as SRC, or as a manifest.

    A Hub model alone (hf://org/name) is verified against the Hub's digests; this reads all of its files.

    Both may have any format and layout; arrays are named as by ckpt hash. If one is a Hugging Face checkpoint
    and the other MaxText's, SRC is converted on the fly in the same way as DST; --parameters ignores
    training state. All differences are counted, with the position of the first one in each array. --step
    applies to DST; SRC may be the directory of a step.

    Exit codes: 0 equal, 1 different; 3 (bad input) and 5 (input/output) mean that no comparison was possible.

    \b
    Examples:
      $ ckpt verify ~/unscanned --against ~/maxtext/llama3.1-8b
      $ ckpt verify ~/decode --against ~/run/checkpoints --parameters
      $ ckpt verify ~/maxtext/llama3.1-8b --manifest llama.json
      $ ckpt verify hf://meta-llama/Llama-3.1-8B
    """
    if against is None and manifest is None and isinstance(path.store, SupportsContents):
        _verify_files(path, as_json, progress, scanning)
        return
    from ckpttools.api.verify import verify as compare

    with progress_events(progress) as scanning["observe"]:
        result = compare(
            path,
            against,
            manifest=manifest,
            cast=cast,
            padding_rows=padding_rows,
            rope_layout=rope_layout,
            family=family,
            tied=tied,
            drop=drop,
            filter=filter,
            per_layer=per_layer,
            parameters=parameters,
            **scanning,
        )
    print_report(result, _report_lines(result), as_json=as_json, is_summary=True)
    if not result.equal:
        exit_with_differences()


# Options for arrays do not apply to files.
_FILE_OPTIONS = ("memory", "jobs", "requests")
_ACCEPTED_OPTIONS = ("path", "as_json", "progress", *_FILE_OPTIONS)


def _verify_files(path: Location, as_json: bool, progress: bool, scanning: Scanning) -> None:
    from ckpttools.api.verify import verify_files

    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _ACCEPTED_OPTIONS:
            raise UsageError(
                f"{option.opts[0]} does not apply when files are compared with their listed digests",
                hint=f"leave it out, or pass a reference with {flag('against', 'SRC')}",
            )
    with progress_events(progress) as observe:
        result = verify_files(
            path,
            observe=observe,
            memory=scanning["memory"],
            jobs=scanning["jobs"],
            requests=scanning["requests"],
        )
    print_report(result, _file_lines(result), as_json=as_json, is_summary=True)
    if not result.equal:
        exit_with_differences()


def _file_lines(result: FileVerification) -> Iterator[str]:
    yield styled(printable(result.path), bold=True)
    if result.equal:
        yield f"equal to {result.against}: {plural(result.files, 'file')}, {format_disk(result.nbytes)}"
        return
    yield f"differs from {result.against}: {result.different:,} of {plural(result.files, 'file')}"
    yield ""
    for difference in result.differences:
        yield printable(f"{difference.name}: {difference.got} instead of {difference.expected}")
        if difference.copy:
            yield printable(f"  in the cache; to fetch it again, remove {difference.copy}")


def _report_lines(result: Verification) -> Iterator[str]:
    yield styled(printable(result.path), bold=True)
    yield from map(printable, result.remarks)
    if result.equal:
        size_text = f"{plural(result.arrays, 'array')}, {format_disk(result.nbytes)}"
        yield f"equal to {printable(result.against)}: {size_text}"
        return
    kinds = Counter((item.reason, _noun(item)) for item in result.differences)
    counts = [
        f"{plural(kinds[reason, noun], noun)} {text}"
        for reason, text in _REASONS.items()
        for noun in ("array", "other node")
        if kinds[reason, noun]
    ]
    yield f"differs from {printable(result.against)}: {', '.join(counts)}"
    yield from map(printable, result.hints)
    yield ""
    lines = [line for reason in _REASONS for line in _lines_of_reason(result, reason)]
    yield from map(printable, lines[:_MAX_LINES])
    if len(lines) > _MAX_LINES:
        yield f"… and {len(lines) - _MAX_LINES:,} more lines; --json lists all"


def _lines_of_reason(result: Verification, reason: Reason) -> list[str]:
    """Return a line for each array with different values; other arrays are folded by name."""
    differences = [difference for difference in result.differences if difference.reason == reason]
    if reason == "values":
        return [f"{item.name}: {_location_text(item, result.path)}" for item in differences]
    return fold_lines(f"{item.name}: {_types_text(item)}" for item in differences)


def _noun(difference: Difference) -> str:
    """Return the noun for the differing leaves.

    Only leaves that are not arrays have a description on just one side, or are texts, empty nodes or files.
    """
    is_one_sided = difference.reason in ("missing", "extra") and (difference.got or difference.expected)
    texts = difference.got or "", difference.expected or ""
    is_other = difference.reason == "kind" and all(text.startswith(_OTHER_NODES) for text in texts)
    return "other node" if is_one_sided or is_other else "array"


def _types_text(difference: Difference) -> str:
    if difference.got and difference.expected:
        return f"{difference.got} instead of {difference.expected}"
    description = difference.got or difference.expected
    return f"{difference.reason}, {description}" if description else difference.reason


def _location_text(difference: Difference, root: str) -> str:
    """Return the known positions of the differing elements."""
    first, last = (f"[{', '.join(map(str, index or ()))}]" for index in (difference.first, difference.last))
    if difference.elements is None:
        return f"different values, the first between {first} and {last}"
    file = (
        f", in {difference.file.removeprefix(root + '/')}"
        if difference.file and difference.file.startswith(root)
        else ""
    )
    if difference.elements == 1:
        return f"1 element differs, at {first}{file}"
    return f"{difference.elements:,} elements differ, the first at {first}{file}"
