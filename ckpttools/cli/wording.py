"""What a user says of the conversion that one checkpoint came of."""

from __future__ import annotations

import click

from ckpttools.cli.models import model_options
from ckpttools.cli.options import patterns_option, together

padding_rows_option = click.option(
    "--padding-rows",
    type=click.Choice(("keep", "drop")),
    help="Whether rows count that MaxText has beyond the vocabulary of Hugging Face's side. Without this, "
    "they do unless all are zeros.",
)


wording_options = together(
    model_options,
    patterns_option("--drop", "Hugging Face arrays that the conversion left out, such as '*.rotary_emb.*'."),
)
