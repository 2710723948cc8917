"""`ckpt families`: the model families that can be converted, and your own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ckpttools.cli.lazy import LazyGroup
from ckpttools.cli.options import ANY_PATH, complete_family, json_option
from ckpttools.cli.output import labelled, print_json, print_report, show, styled, width, wrapped
from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import plural, printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.family_check.findings import FamilyCheck, FamilyFinding
    from ckpttools.mapping.row import Row
    from ckpttools.model_families.family import Family
    from ckpttools.model_families.summary import FamilySummary

# Where texts begin behind their labels.
_COLUMN = 14
# Columns that text is made to fit: what a narrow terminal has at least, and a pipe, which has none.
_NARROWEST, _PIPE = 40, 110


@click.group(cls=LazyGroup, invoke_without_command=True, short_help="List, show and check model families.")
@json_option
@click.pass_context
def families(ctx: click.Context, as_json: bool) -> None:
    """List the model families that can be converted, look into one, or check your own.

    `model_type` is the field of a model's config.json. Every family can be converted both ways, with layers
    stacked or not. Packages add families under the entry point ckpttools.families; a file of your own works,
    too: `ckpt convert … --family FILE`.

    \b
    Example:
      ckpt families
    """
    if ctx.invoked_subcommand is not None:
        return
    from ckpttools.api.family_list import families as known

    result = known()
    print_report(result, _listing(result), as_json=as_json)


def _listing(result: Sequence[FamilySummary]) -> Iterator[str]:
    for item in result:
        yield from _family_lines(item)
        yield ""
    yield from wrapped(
        "Each converts both ways (hf-to-maxtext, maxtext-to-hf), with layers scanned under the names above, "
        "on axis 0 or 1, or unscanned. --exact stores what is inexact in float32, so that it comes back bit "
        "for bit.",
        _room(),
    )


def _family_lines(family: FamilySummary) -> Iterator[str]:
    yield styled(printable(family.name), bold=True)
    yield from _entry("models", ", ".join(family.models))
    yield from _entry("model_type", ", ".join(family.model_types))
    never = f"never: {family.never_scanned}" if family.never_scanned else ""
    yield from _entry(
        "scanned", never or ", ".join(group.scanned for group in family.layers if group.scanned)
    )
    for value in family.values:
        rows = value.rows[0] if len(value.rows) == 1 else plural(len(value.rows), "row")
        yield from _entry("exact" if value.exact else "inexact", f"{rows}: {value.reason}")
    if not family.values:
        yield from _entry("exact", "all values")


def _entry(label: str, text: str, column: int = _COLUMN) -> Iterator[str]:
    """A label and a text, which goes on below itself where the terminal ends."""
    yield from labelled(f"  {label}", printable(text or "-"), column, _room())


def _room() -> int:
    return max(_NARROWEST, width() or _PIPE)


@families.command("show", short_help="Everything that a family defines.")
@click.argument("family", metavar="NAME|FILE", shell_complete=complete_family)
@click.option("--toml", "as_toml", is_flag=True, help="Print it as a TOML file, as a start for your own.")
@json_option
def show_family(family: str, as_toml: bool, as_json: bool) -> None:
    """Show a family: its models, its sizes, and every row.

    Each row shows MaxText's name and axes, then Hugging Face's, then when the row applies and what it does to
    values.

    \b
    Example:
      ckpt families show llama
      ckpt families show llama --toml > my_family.toml
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
        show([*_family_lines(summary(result)), *_sizes(result), *_groups(result)])


def _sizes(family: Family) -> Iterator[str]:
    yield ""
    names = [*family.sizes, *family.derived, *family.constants]
    column = max(_COLUMN, *(len(name) + 4 for name in names))
    for axis, alternatives in family.sizes.items():
        yield from _entry(axis, " or ".join(map(str, alternatives)), column)
    for axis, item in {**family.derived, **family.constants}.items():
        yield from _entry(axis, f"= {item}", column)


def _groups(family: Family) -> Iterator[str]:
    yield ""
    yield from (line for row in family.rows for line in _row(row))
    for group in family.layers:
        yield ""
        if not family.never_scanned:
            scanned = f"{group.scanned} [{' '.join(group.stacked)}]"
            yield from _entry("scanned", scanned if group.scanned else "never: an incomplete cycle")
        yield from _entry("unscanned", group.left)
        yield from _entry("hub", group.right)
        for word, flags in (("when", group.when), ("unless", group.unless)):
            yield from _entry(word, flags) if flags else ()
        yield from (line for row in group.rows for line in _row(row))


def _row(row: Row) -> Iterator[str]:
    from ckpttools.mapping.row_text import op_text

    conditions = [f"when {flag}" for flag in row.when.split()]
    conditions += [f"unless {flag}" for flag in row.unless.split()]
    conditions += [op_text(row.op)] if row.op else []
    yield printable(str(row.left))
    yield printable(f"  {row.right}")
    if conditions:
        yield printable(f"    {', '.join(conditions)}")


@families.command("check", short_help="Prove that rows convert both ways and fit a model.")
@click.argument("family", metavar="NAME|FILE", shell_complete=complete_family)
@click.option(
    "--against",
    type=ANY_PATH,
    metavar="PATH",
    help="A Hugging Face or MaxText checkpoint of such a model; no array is read.",
)
@click.option(
    "--config",
    type=ANY_PATH,
    metavar="CONFIG",
    help="The model's config.json, or its directory; by default the one that comes with --against.",
)
@json_option
@click.pass_context
def check(
    ctx: click.Context, family: str, against: Location | None, config: Location | None, as_json: bool
) -> None:
    """Check that a family's rows are consistent, convert both ways, and fit a model.

    Every array must be produced exactly once on either side, every size must follow from the configuration, a
    formula or shapes, and what is converted to MaxText must come back with the same name, shape and dtype,
    whether layers are stacked or not. Without a model, this is tried on small made-up ones with every
    combination of flags.

    Exits with 3 and lists everything that is wrong, if anything is.

    \b
    Example:
      ckpt families check my_family.toml --against ~/models/tiny-7b
    """
    from ckpttools.api.family_list import check_family

    result = check_family(family, against=against, config=config)
    print_report(result, _verdict(result), as_json=as_json)
    ctx.exit(0 if result.sound else CheckpointError.exit_code)


def _verdict(result: FamilyCheck) -> Iterator[str]:
    name = styled(printable(result.family), bold=True)
    yield f"{name}: {'sound' if result.sound else plural(len(result.findings), 'finding')}"
    names = {"huggingface": ", with Hugging Face's names", "maxtext": ", with MaxText's names"}
    if result.against:
        yield from _entry("tried on", result.against + names.get(result.side or "", ""))
    if result.config:
        yield from _entry("sizes from", result.config)
    if result.models:
        yield from _entry("tried on", plural(len(result.models), "model") + " made up")
    for layout in result.layouts:
        arrays = f"{plural(result.num_arrays, 'array')}, {layout.num_arrays:,} in MaxText, and back"
        yield from _entry("there", f"{layout.name}: {arrays}")
    for kind in dict.fromkeys(finding.kind for finding in result.findings):
        yield from _section(kind, [item for item in result.findings if item.kind == kind])
    if result.hints:
        yield ""
    for hint in result.hints:
        yield from _entry("note", hint)


def _section(kind: str, findings: list[FamilyFinding]) -> Iterator[str]:
    """All findings of one kind; those that differ in numbers only are one line."""
    from ckpttools.core.text import folded

    yield ""
    yield styled(f"{kind} ({len(findings)})", fg="red")
    for line in folded(f"{finding.location}: {finding.text}" for finding in findings):
        first, *more = wrapped(printable(line), _room() - 6)
        yield from (f"  {first}", *(f"      {part}" for part in more))
