"""`ckpt demo`: run a conversion on a generated model and show every step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ckpttools.cli.command import BaseCommand
from ckpttools.cli.output import print_lines
from ckpttools.core.errors import DestinationExistsError, system_error


@click.command(short_help="Convert a small model to MaxText and back, and load it.", cls=BaseCommand)
@click.argument("directory", required=False, type=click.Path(path_type=Path))
def demo(directory: Path | None) -> None:
    """Create a small model, convert it, inspect it, load it, and convert it back.

    DIRECTORY keeps the results; without it, a temporary directory is used and deleted.

    \b
    Examples:
      $ ckpt demo ./demo
      $ ckpt demo
    """
    with _demo_directory(directory) as location:
        source, target, round_trip = location / "hf", location / "maxtext", location / "back"
        _make_model(source)
        _run_command("convert", "hf-to-maxtext", source, target)
        _run_command("inspect", "tree", target)
        _load(source, target)
        _run_command("convert", "maxtext-to-hf", target, round_trip)
        _run_command("diff", source, round_trip)


@contextmanager
def _demo_directory(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise DestinationExistsError(
                "the directory for the demo already exists",
                location=directory,
                hint="name a directory that does not exist",
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise system_error(
                "cannot create", directory, error, "name a directory that can be created"
            ) from error
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as name:
        yield Path(name)
    print_lines(
        ["", f"{name} is deleted now: `ckpt demo DIRECTORY` keeps its output, for the commands after `next`."]
    )


def _make_model(source: Path) -> None:
    """Write a random Llama of 48 million parameters in Hugging Face format."""
    from ckpttools.testing.models import LlamaSizes, write_llama

    sizes = LlamaSizes(layers=8, hidden=512, mlp=2048, heads=8, kv_heads=4, head_dim=64, vocab=32000)
    path = write_llama(source, sizes)
    print_lines([f"A small random Llama in Hugging Face format: {source}"])
    print_lines([f"  config.json and model.safetensors, {path.stat().st_size / 1e6:.0f} MB in bfloat16"])


def _run_command(*arguments: str | Path) -> None:
    """Run a `ckpt` command and print its command line before its output."""
    from ckpttools.cli.main import main

    words = [str(argument) for argument in arguments]
    print_lines(["", "$ ckpt " + " ".join(words)])
    if code := main(words, standalone_mode=False):
        click.get_current_context().exit(code)


def _load(source: Path, target: Path) -> None:
    """Restore the result with Orbax, and compare one layer with the source."""
    from importlib.util import find_spec

    if find_spec("orbax") is None:
        print_lines(["", "To load the result with Orbax as well: pip install 'ckpttools[jax]'"])
        return
    print_lines(["", "Orbax restores it (orbax.checkpoint.StandardCheckpointer):"])
    import numpy as np
    import orbax.checkpoint as ocp

    import ckpttools

    restored = ocp.StandardCheckpointer().restore((target / "0" / "items").absolute())
    stacked = restored["params"]["params"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    single = ckpttools.open(source)["model.layers.5.mlp.gate_proj.weight",]
    if not isinstance(single, ckpttools.LazyArray):
        raise TypeError(single)
    same = np.array_equal(np.asarray(stacked)[:, 5, :], single.read().T)
    print_lines([f"  decoder/layers/mlp/wi_0/kernel: {stacked.dtype}{list(stacked.shape)}"])
    print_lines([f"  its layer 5 is model.layers.5.mlp.gate_proj.weight, transposed, bit by bit: {same}"])
