"""Golden models round-trip from each layout, as docs/tested-families.md states."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.golden_data import SCAN_NAMES, leaves_by_package
from support.internals import ModelFiles, dotted, family_of, to_huggingface, to_maxtext
from support.locations import GOLDEN, GOLDEN_0_2_5

import ckpttools
from ckpttools import ToHuggingFace, ToMaxText, Tree
from ckpttools.quantized.config import declared_quantization

MADE = [
    (version, file)
    for version, location in (("e591f30", GOLDEN), ("0.2.5", GOLDEN_0_2_5))
    for scan in SCAN_NAMES.values()
    for file in sorted(location.glob(f"*/leaves_{scan}.json"))
]


@pytest.mark.parametrize(("version", "leaves"), MADE, ids=[f"{v}-{f.parent.name}-{f.stem}" for v, f in MADE])
def test_every_tensor_round_trips(version: str, leaves: Path):
    source = ckpttools.open(leaves.parent / "hf")
    names = [dotted(path) for path in source.arrays]
    spelling = family_of(source.metadata.config or {}, "config.json").spelling_of(names)
    options = ToMaxText(
        scan=leaves.stem == "leaves_scanned",
        maxtext=version,
        text_only="vision_encoder" not in leaves.read_text(),
        exact=True,
        leaves_out=True,
        quantized="keep" if declared_quantization(source.metadata.config) else "dequantize",
    )
    built = to_maxtext(source, options)
    files = ModelFiles(source.metadata.config, spelling=spelling.name)
    back = to_huggingface(built.state, ToHuggingFace(), files).tree
    kept = {path: item for path, item in source.arrays.items() if dotted(path) not in built.notes.dropped}
    assert len(kept) > len(source.arrays) / 4
    assert leaves_by_package(back) == leaves_by_package(Tree(kept))
