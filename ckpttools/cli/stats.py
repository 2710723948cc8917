"""`ckpt inspect stats`: statistics of the numbers in a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import ANY_PATH, filter_option, json_option, read_options, resource_options
from ckpttools.cli.output import end_as_different, print_json
from ckpttools.cli.progress import progress_option, watching
from ckpttools.stores.place import Place

_BY = ("size", "min", "max", "mean", "std", "norm", "max-abs", "zeros", "subnormals", "nan", "inf")


@click.command()
@click.argument("path", type=ANY_PATH)
@json_option
@filter_option("; no other is read")
@click.option("--sort", type=click.Choice(_BY), help="Largest first; by default in the checkpoint's order.")
@click.option("--per-layer", is_flag=True, help="Also a line for each layer of stacked arrays.")
@click.option("--histogram", is_flag=True, help="Also how each array is spread over powers of two.")
@click.option(
    "--nan",
    "find_nan",
    is_flag=True,
    help="Only report where NaN and infinity are; exit with 1 if there are any.",
)
@progress_option
@resource_options
@read_options
def stats(path: Place, as_json: bool, find_nan: bool, progress: bool, **options: Any) -> None:
    """Show statistics of the numbers in a checkpoint: extremes, mean, norm, zeros, NaN.

    Every element is read once, on several threads, within the memory allowed. Min, max, mean, std and norm
    are of finite elements; of complex numbers the magnitude counts.

    \b
    Example:
      ckpt inspect stats ~/maxtext/llama3.1-8b --per-layer --filter '*mlp*'
      ckpt inspect stats ~/maxtext/run/checkpoints --nan
    """
    from ckpttools.api.stats_report import stats as look
    from ckpttools.cli.stats_text import print_bad, print_stats

    if find_nan and not as_json and (options["histogram"] or options["per_layer"]):
        shown = "--histogram" if options["histogram"] else "--per-layer"
        raise click.UsageError(f"--nan only says where NaN and infinity are: leave it out, or {shown}")
    with watching(progress) as observe:
        report = look(path, observe=observe, **options)
    if as_json:
        print_json(report)
    else:
        (print_bad if find_nan else print_stats)(report)
    if find_nan and not report.finite:
        end_as_different()
