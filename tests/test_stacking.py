"""Layers are stacked as the model's family groups them: equal to what MaxText stacks, for every family."""

from __future__ import annotations

import shutil

import pytest
from click.testing import CliRunner
from golden_data import FAMILIES, convert, golden_leaves, leaves_by_package

from ckpttools.cli.main import main
from ckpttools.families.registry import family_named
from ckpttools.formats.registry import open_tree
from ckpttools.stacking import cycle_of
from ckpttools.transforms.cycles import Cycle


def stack(source, target, *options):
    arguments = ["stack", source, target, "--no-progress", *options]
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return open_tree(target)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_carried_along_tells_the_cycle(tmp_path, family):
    convert(tmp_path / "single", family, scan=False)
    made = stack(tmp_path / "single", tmp_path / "stacked")
    assert leaves_by_package(made) == golden_leaves(family, True)
    assert made.metadata.custom["scan_layers"] is True


@pytest.mark.parametrize(("golden", "family"), [("gemma3", "gemma3"), ("gpt-oss", "gpt-oss")])
def test_the_user_names_the_family(tmp_path, golden, family):
    shutil.rmtree(convert(tmp_path / "single", golden, scan=False) / "hf")
    made = stack(tmp_path / "single", tmp_path / "stacked", "--family", family)
    assert leaves_by_package(made) == golden_leaves(golden, True)


@pytest.mark.parametrize(
    ("family", "cycle"),
    [
        ("llama", None),
        ("gemma2", None),
        ("deepseek", None),
        ("gpt-oss", Cycle(2, "layers")),
        ("olmo3", Cycle(4, "layers")),
        ("qwen3-next", Cycle(4, "layer")),
        ("gemma3", Cycle(6, "layers")),
        ("gemma4", Cycle(6, "local-global")),
    ],
)
def test_cycles(family, cycle):
    assert cycle_of(family_named(family)) == cycle
