"""Options about the conversion that produced a checkpoint."""

from __future__ import annotations

import click

from ckpttools.cli.models import model_options
from ckpttools.cli.options import patterns_option, together

padding_rows_option = click.option(
    "--padding-rows",
    type=click.Choice(("keep", "drop")),
    help="Whether to compare the rows that MaxText has beyond Hugging Face's vocabulary. By default they "
    "are compared unless all are zeros.",
)


wording_options = together(
    model_options,
    patterns_option("--drop", "Hugging Face arrays that the conversion left out, such as '*.rotary_emb.*'."),
)
