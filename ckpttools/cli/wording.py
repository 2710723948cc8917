"""What a user says of the conversion that one checkpoint came of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.models import model_options
from ckpttools.cli.options import bundled

if TYPE_CHECKING:
    from ckpttools.compare.counterpart import Wording

padding_rows_option = click.option(
    "--padding-rows",
    type=click.Choice(("keep", "drop")),
    help="Whether rows count that MaxText has beyond the vocabulary of Hugging Face's side. Without this, "
    "they do unless all are zeros.",
)


def _wording(**values: Any) -> Wording | None:
    """None where nothing is said, which spares `ckpt hash` the import of all conversions."""
    if not any(values.values()):
        return None
    from ckpttools.compare.counterpart import Wording
    from ckpttools.maxtext.model import ModelOptions

    return Wording(drop=values.pop("drop"), model=ModelOptions(**values))


wording_options = bundled(
    "wording",
    _wording,
    model_options,
    click.option(
        "--drop",
        metavar="PATTERN",
        multiple=True,
        help="Hugging Face arrays that the conversion left out, such as '*.rotary_emb.*'. May be repeated.",
    ),
)
