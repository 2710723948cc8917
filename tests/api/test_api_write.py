"""One call for each command that writes: the same files as its command, text for arguments, plain errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.command_line import ckpt, run
from support.golden_data import golden_checkpoint
from support.internals import Started, TaskDone, parse
from support.locations import HF, ROOT
from support.stored_trees import contents

import ckpttools
from ckpttools import DTYPES, CheckpointError, DestinationExistsError, MemoryBudgetError, UsageError
from ckpttools.cli.message_terms import flag

STACKED, SINGLE = golden_checkpoint(True), golden_checkpoint(False)
TRAINING = ROOT / "fixtures" / "train" / "llama_scanned"
RULES = {"model.{...}": "base.{...}"}
CALLS = [
    "cast",
    "convert",
    "hf_to_maxtext",
    "maxtext_to_hf",
    "remap",
    "select",
    "stack",
    "strip_optimizer",
    "unstack",
]

# Words of the command line, the call, and its arguments; SRC comes first in both.
SAME = [
    (
        f"convert hf-to-maxtext {HF} OUT --no-scan --dtype float32 --pad-vocab 300 --compression zstd",
        ("hf_to_maxtext", HF),
        {"scan": False, "dtype": "float32", "pad_vocab": 300, "compression": "zstd"},
    ),
    (
        f"convert maxtext-to-hf {STACKED} OUT --like {HF} --max-shard-size 200kB --dtype float16",
        ("maxtext_to_hf", STACKED),
        {"like": str(HF), "max_shard_size": "200kB", "dtype": DTYPES["float16"]},
    ),
    (
        f"convert to-orbax {HF} OUT --item params --as-step 7 --keep *norm* --dtype-map *=float32",
        ("convert", HF),
        {"format": "orbax", "item": "params", "as_step": 7, "keep": "*norm*", "dtype_map": {"*": "float32"}},
    ),
    (
        f"convert to-zarr3 {STACKED} OUT --drop opt_state",
        ("convert", STACKED),
        {"format": "zarr3", "drop": "opt_state"},
    ),
    (
        f"convert to-safetensors {STACKED} OUT --separator / --max-shard-size 100kB",
        ("convert", STACKED),
        {"format": "safetensors", "separator": "/", "max_shard_size": 100_000},
    ),
    (f"strip-optimizer {TRAINING} OUT --keep-step", ("strip_optimizer", TRAINING), {"keep_step": True}),
    (f"stack {SINGLE} OUT --family llama", ("stack", SINGLE), {"family": "llama"}),
    (f"unstack {STACKED} OUT --copy", ("unstack", STACKED), {"reference": False}),
    (
        f"select {HF} OUT --keep *mlp* --drop *up_proj*",
        ("select", HF),
        {"keep": ["*mlp*"], "drop": "*up_proj*"},
    ),
    (f"cast {STACKED} OUT --dtype float16", ("cast", STACKED), {"dtype": "float16"}),
    (f"cast {STACKED} OUT --dtype bf16 --to zarr3", ("cast", STACKED), {"dtype": "bf16", "format": "zarr3"}),
]


def files(directory: Path) -> dict[str, bytes]:
    """What was written, without what says when, and under which name."""
    kept = contents(directory)
    return {name: data for name, data in kept.items() if not name.endswith("_CHECKPOINT_METADATA")}


def test_calls_write_the_same_files_as_commands(tmp_path):
    for number, (words, (name, source), options) in enumerate(SAME):
        theirs, ours = tmp_path / f"theirs{number}", tmp_path / f"ours{number}"
        # One worker: compressed chunks lie in the order in which they are done.
        run(*(str(theirs) if word == "OUT" else word for word in words.split()), "--jobs", 1)
        receipt = getattr(ckpttools, name)(source, str(ours), jobs=1, **options)
        assert receipt.destination == parse(ours)
        assert files(ours) == files(theirs), words
        assert files(ours), words
    assert {name for _, (name, _), _ in SAME} == {*CALLS} - {"remap"}


def test_remap_accepts_file_dictionary_and_function(tmp_path):
    rules = [{"from": source, "to": target} for source, target in RULES.items()]
    (tmp_path / "rules.json").write_text(json.dumps({"rules": rules}))
    run("remap", HF, tmp_path / "theirs", "--map", tmp_path / "rules.json")

    def rename(path, array):
        return path.replace("model.", "base.")

    for name, by in {"file": tmp_path / "rules.json", "dictionary": RULES, "function": rename}.items():
        ckpttools.remap(HF, tmp_path / name, map=by)
        assert files(tmp_path / name) == files(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        ckpttools.remap(HF, tmp_path / "strict", map=RULES, strict=True)
    with pytest.raises(UsageError, match="every array itself"):
        ckpttools.remap(HF, tmp_path / "strict", map=rename, strict=True)


def test_tree_source_equals_path_source(tmp_path):
    ckpttools.hf_to_maxtext(ckpttools.open(HF), tmp_path / "tree")
    ckpttools.hf_to_maxtext(HF, tmp_path / "path")
    assert files(tmp_path / "tree") == files(tmp_path / "path")
    tree = ckpttools.open(tmp_path / "tree")
    ckpttools.maxtext_to_hf(tree, tmp_path / "back")
    back, model = (load_file(item / "model.safetensors") for item in (tmp_path / "back", HF))
    assert {name: item.tobytes() for name, item in back.items()} == {
        name: item.tobytes() for name, item in model.items()
    }
    for inside in (tmp_path / "tree" / "0" / "items", tmp_path / "tree" / "0" / "items" / "x"):
        for call in (ckpttools.select, ckpttools.cast, ckpttools.convert):
            with pytest.raises(UsageError, match=r"`destination` (is|is in) `source`"):
                call(tree, inside, **({"dtype": "float32"} if call is ckpttools.cast else {"keep": "params"}))
        with pytest.raises(UsageError, match=r"`destination` (is|is in) `source`"):
            ckpttools.save(tree, inside)
    with pytest.raises(UsageError, match="already open"):
        ckpttools.select(tree, tmp_path / "step", keep="params", step=3)
    assert {item.name for item in tmp_path.iterdir()} == {"tree", "path", "back"}


def test_plan_writes_nothing_until_it_runs(tmp_path):
    seen = []
    prepared = ckpttools.select.plan(
        HF, tmp_path / "out", keep="*norm*", memory="200MiB", observe=seen.append
    )
    assert isinstance(prepared, ckpttools.Prepared)
    assert not (tmp_path / "out").exists()
    assert prepared.plan.memory == 200 << 20
    arrays = len(prepared.plan.tree.arrays)
    assert repr(prepared).startswith(f"Prepared('{tmp_path}/out': {arrays} arrays, ")
    receipt = prepared.run()
    assert re.fullmatch(
        rf"Receipt\('{tmp_path}/out': {arrays} arrays, [\d,]+ bytes in \d+\.\d\d s\)", repr(receipt)
    )
    assert isinstance(seen[0], Started)
    assert any(isinstance(event, TaskDone) for event in seen)
    assert seen[-1] == receipt
    with pytest.raises(DestinationExistsError) as raised:
        prepared.check()
    assert "overwrite=True" in str(raised.value)
    assert ckpttools.select(HF, tmp_path / "out", keep="*norm*", overwrite=True).arrays == arrays


def test_manifest_is_written_but_not_replaced(tmp_path):
    ckpttools.cast(STACKED, tmp_path / "out", dtype="float16", manifest=str(tmp_path / "m.json"))
    assert ckpt("verify", tmp_path / "out", "--manifest", tmp_path / "m.json").exit_code == 0
    with pytest.raises(DestinationExistsError, match=r"m\.json exists"):
        ckpttools.cast(STACKED, tmp_path / "two", dtype="float16", manifest=tmp_path / "m.json")
    assert not (tmp_path / "two").exists()


def test_invalid_arguments_are_refused_before_writing(tmp_path):
    out = tmp_path / "out"
    cases = {
        "no option selects arrays": lambda: ckpttools.select(HF, out),
        "no dtype is given": lambda: ckpttools.cast(HF, out),
        "unknown dtype": lambda: ckpttools.hf_to_maxtext(HF, out, dtype="bfloat17"),
        "`memory` cannot be this": lambda: ckpttools.hf_to_maxtext(HF, out, memory="lots"),
        "at least 1 byte": lambda: ckpttools.hf_to_maxtext(HF, out, memory=0),
        "unknown compression": lambda: ckpttools.convert(HF, out, format="orbax", compression="zip"),
        "is not stored with these options": lambda: ckpttools.convert(HF, out, format="zarr3", item="x"),
        "npz cannot be written": lambda: ckpttools.convert(HF, out, format="npz"),
        "apply only with `force_unroll`": lambda: ckpttools.unstack(STACKED, out, keep_step=True),
        "`strict` applies only to the rules of `map`": lambda: ckpttools.convert(HF, out, strict=True),
        "`force` applies only to casts": lambda: ckpttools.convert(HF, out, force=True),
        "is in `source`": lambda: ckpttools.unstack(STACKED, STACKED / "out"),
        "is in `like`": lambda: ckpttools.maxtext_to_hf(STACKED, HF / "out", like=HF),
        "is `source` itself": lambda: ckpttools.hf_to_maxtext(HF, HF),
        "nothing to resume": lambda: ckpttools.hf_to_maxtext(HF, out, resume=True),
    }
    for message, call in cases.items():
        with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
            call()
        assert raised.value.exit_code == 2
        assert not re.search(r"(?<!\S)--\w|\bSRC\b|\bDST\b", str(raised.value)), message
    with pytest.raises(MemoryBudgetError) as too_little:
        ckpttools.hf_to_maxtext(HF, out, memory="64MiB")
    assert 'memory="' in str(too_little.value)
    with pytest.raises(
        TypeError, match=r"cast\(\) got an unexpected keyword argument 'dtyp': did you mean 'dtype'"
    ):
        ckpttools.cast(HF, out, dtyp="float32")
    with pytest.raises(TypeError, match="'over_write': did you mean 'overwrite'"):
        ckpttools.hf_to_maxtext(HF, out, over_write=True)
    assert list(tmp_path.iterdir()) == []


def test_call_arguments_match_command_options():
    """Keyword-only beyond source and destination; the command line has each of them."""
    text = (ROOT / "docs" / "cli.md").read_text()
    for name in CALLS:
        call = getattr(ckpttools, name)
        parameters = list(signature(call).parameters.values())
        assert [parameter.name for parameter in parameters[:2]] == ["source", "destination"]
        for parameter in parameters[2:-1]:
            assert parameter.kind is parameter.KEYWORD_ONLY
            spelled = flag(parameter.name)
            assert spelled in text, (name, parameter.name)
        assert signature(call).return_annotation == "Receipt"
        assert call.__name__ == call.plan.__name__ == name
        assert "Raises:" in call.__doc__


@pytest.mark.parametrize("call", ["convert", "transform"])
def test_forwarded_options_are_checked(tmp_path, call):
    changes = {"transforms": []} if call == "transform" else {}
    hand_on = partial(getattr(ckpttools, call).plan, HF, tmp_path / "out", **changes)
    assert hand_on(max_header_bytes=np.int64(10**7), jobs=np.int64(1)).jobs == 1
    # Whole numbers of numpy's are such, though no file here is of a process.
    with pytest.raises(UsageError, match="needs a checkpoint with files of each process"):
        hand_on(prefer_rank=np.array([1, 0]))
    for declared in ({"prefer_rank": [0.5]}, {"overwrite": "no"}, {"with_optimizer": "yes"}, {"jobs": "4"}):
        with pytest.raises(UsageError, match=f"^`{next(iter(declared))}` cannot be this"):
            hand_on(**declared)


def test_package_import_loads_no_other_modules():
    code = (
        "import sys, ckpttools; print(sorted(name for name in sys.modules if name.startswith('ckpttools')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ckpttools']"
