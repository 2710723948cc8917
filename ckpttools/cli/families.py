"""`ckpt families` and `ckpt formats`: list supported families and formats, and check custom families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ckpttools.api.options import FAMILY
from ckpttools.api.options.inspect import CHECK_FAMILY
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.lazy import LazyGroup
from ckpttools.cli.options import completion_of, flags, json_option
from ckpttools.cli.output import format_labeled, print_json, print_lines, print_report, styled, width, wrap
from ckpttools.core.errors import CheckpointError
from ckpttools.core.options import switch
from ckpttools.core.text import plural, printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.family_check.definition import FamilyCheck, FamilyFinding
    from ckpttools.mapping.row import Row
    from ckpttools.model_families.family import Family
    from ckpttools.model_families.summary import FamilySummary


# Width of the label column.
_COLUMN = 14
# Text width in columns: the minimum on a terminal, and that of a pipe, which has no width.
_NARROWEST, _PIPE = 40, 110


@click.group(cls=LazyGroup, invoke_without_command=True, short_help="List, show and check model families.")
@json_option
@click.pass_context
def families(ctx: click.Context, as_json: bool) -> None:
    """List the supported model families, show one, or check your own.

    `model_type` is the field of a model's config.json. Every family converts both ways, with layers stacked
    or not. Packages add families under the entry point ckpttools.families. You can also pass your own file:
    `ckpt convert … --family FILE`.

    \b
    Examples:
      $ ckpt families
      $ ckpt families show llama
      $ ckpt families check my_family.toml
    """
    if ctx.invoked_subcommand is not None:
        return
    from ckpttools.api.families import families as known

    result = known()
    print_report(result, _table_lines(result), as_json=as_json)


def _table_lines(result: Sequence[FamilySummary]) -> Iterator[str]:
    for item in result:
        yield from _detail_lines(item)
        yield ""
    yield from wrap(
        "Each converts both ways (hf-to-maxtext, maxtext-to-hf), with layers scanned under the names "
        "above, on axis 0 or 1, or unscanned. --exact stores inexact values in float32, so that they "
        "round-trip bit for bit.",
        _remaining_width(),
    )


def _detail_lines(family: FamilySummary) -> Iterator[str]:
    yield styled(printable(family.name), bold=True)
    yield from _entry_lines("models", ", ".join(family.models))
    yield from _entry_lines("model_type", ", ".join(family.model_types))
    never = f"never: {family.no_scan_reason}" if family.no_scan_reason else ""
    yield from _entry_lines(
        "scanned", never or ", ".join(group.scanned for group in family.layers if group.scanned)
    )
    for value in family.values:
        rows = value.rows[0] if len(value.rows) == 1 else plural(len(value.rows), "row")
        yield from _entry_lines("exact" if value.is_exact else "inexact", f"{rows}: {value.reason}")
    if not family.values:
        yield from _entry_lines("exact", "all values")


def _entry_lines(label: str, text: str, column: int = _COLUMN) -> Iterator[str]:
    """Format a label and a text that wraps below itself at the terminal width."""
    yield from format_labeled(f"  {label}", printable(text or "-"), column, _remaining_width())


def _remaining_width() -> int:
    return max(_NARROWEST, width() or _PIPE)


@families.command("show", short_help="Show everything that a family defines.")
@click.argument("family", metavar="NAME|FILE", shell_complete=completion_of(FAMILY))
@flags(switch("as_toml", "Print the family as a TOML file, to start your own.", flag="--toml"))
@json_option
def show_family(family: str, as_toml: bool, as_json: bool) -> None:
    """Show a family: its models, its sizes, and every mapping row.

    Each row shows MaxText's name and axes, Hugging Face's, when the row applies, and how it changes values.

    \b
    Examples:
      $ ckpt families show llama
      $ ckpt families show llama --toml > my_family.toml
    """
    import tomllib

    from ckpttools.model_families.registry import family_called
    from ckpttools.model_families.summary import summary
    from ckpttools.model_families.toml_write import family_to_toml

    result = family_called(family)
    if as_toml:
        click.echo(family_to_toml(result), nl=False)
    elif as_json:
        print_json(tomllib.loads(family_to_toml(result)))
    else:
        print_lines([*_detail_lines(summary(result)), *_size_lines(result), *_row_groups(result)])


def _size_lines(family: Family) -> Iterator[str]:
    yield ""
    names = [*family.sizes, *family.derived, *family.constants]
    column = max(_COLUMN, *(len(name) + 4 for name in names))
    for axis, alternatives in family.sizes.items():
        yield from _entry_lines(axis, " or ".join(map(str, alternatives)), column)
    for axis, item in {**family.derived, **family.constants}.items():
        yield from _entry_lines(axis, f"= {item}", column)


def _row_groups(family: Family) -> Iterator[str]:
    yield ""
    yield from (line for row in family.rows for line in _row_line(row))
    for group in family.layers:
        yield ""
        if not family.no_scan_reason:
            scanned = f"{group.scanned} [{' '.join(group.stacked)}]"
            yield from _entry_lines("scanned", scanned if group.scanned else "never: an incomplete cycle")
        yield from _entry_lines("unscanned", group.left)
        yield from _entry_lines("hub", group.right)
        for word, conditions in (("when", group.when), ("unless", group.unless)):
            yield from _entry_lines(word, conditions) if conditions else ()
        yield from (line for row in group.rows for line in _row_line(row))


def _row_line(row: Row) -> Iterator[str]:
    from ckpttools.mapping.row_text import op_text

    conditions = [f"when {flag}" for flag in row.when.split()]
    conditions += [f"unless {flag}" for flag in row.unless.split()]
    conditions += [op_text(row.op)] if row.op else []
    yield printable(str(row.left))
    yield printable(f"  {row.right}")
    if conditions:
        yield printable(f"    {', '.join(conditions)}")


@families.command("check", short_help="Validate a family file, optionally against a model.")
@click.argument("family", metavar="NAME|FILE", shell_complete=completion_of(FAMILY))
@flags(*CHECK_FAMILY)
@json_option
@click.pass_context
def check(
    ctx: click.Context, family: str, against: Location | None, config: Location | None, as_json: bool
) -> None:
    """Check that a family is consistent, converts both ways, and fits a model.

    Every array must be produced exactly once on either side; every size must follow from the configuration, a
    formula or shapes; and arrays converted to MaxText must convert back to the same name, shape and dtype,
    whether layers are stacked or not. Without a model, small synthetic ones with every combination of flags
    are checked.

    Lists all errors and exits with 3 if there are any.

    \b
    Examples:
      $ ckpt families check my_family.toml --against ~/models/tiny-7b
      $ ckpt families check my_family.toml --config ~/models/tiny-7b/config.json
    """
    from ckpttools.api.families import check_family

    result = check_family(family, against=against, config=config)
    print_report(result, _verdict_lines(result), as_json=as_json)
    ctx.exit(0 if result.sound else CheckpointError.exit_code)


def _verdict_lines(result: FamilyCheck) -> Iterator[str]:
    name = styled(printable(result.family), bold=True)
    yield f"{name}: {'sound' if result.sound else plural(len(result.findings), 'finding')}"
    names = {"huggingface": ", with Hugging Face's names", "maxtext": ", with MaxText's names"}
    if result.against:
        yield from _entry_lines("tested on", result.against + names.get(result.side or "", ""))
    if result.config:
        yield from _entry_lines("sizes from", result.config)
    if result.models:
        yield from _entry_lines("tested on", plural(len(result.models), "synthetic model"))
    for layout in result.layouts:
        arrays = f"{plural(result.num_arrays, 'array')}, {layout.num_arrays:,} in MaxText, and back"
        yield from _entry_lines("converts", f"{layout.name}: {arrays}")
    for kind in dict.fromkeys(finding.kind for finding in result.findings):
        yield from _section_lines(kind, [item for item in result.findings if item.kind == kind])
    if result.hints:
        yield ""
    for hint in result.hints:
        yield from _entry_lines("note", hint)


def _section_lines(kind: str, findings: list[FamilyFinding]) -> Iterator[str]:
    """Format all findings of one kind, joining those that differ only in numbers."""
    from ckpttools.core.text import fold_lines

    yield ""
    yield styled(f"{kind} ({len(findings)})", fg="red")
    for line in fold_lines(f"{finding.location}: {finding.text}" for finding in findings):
        first, *more = wrap(printable(line), _remaining_width() - 6)
        yield from (f"  {first}", *(f"      {part}" for part in more))


@click.command(cls=BaseCommand)
@json_option
def formats(as_json: bool) -> None:
    """List the supported checkpoint formats.

    Packages add formats under the entry point ckpttools.formats.

    \b
    Examples:
      $ ckpt formats
      $ ckpt formats --json
    """
    from ckpttools.formats.known_formats import formats, writable

    is_writable = {name: name in writable() for name in sorted(formats())}
    if as_json:
        print_json([{"name": name, "written": is_written} for name, is_written in is_writable.items()])
    else:
        width = max(map(len, is_writable))
        lines = [
            f"{name:<{width}}  {'yes' if is_written else 'no'}" for name, is_written in is_writable.items()
        ]
        print_lines([f"{'format':<{width}}  written", *lines])
