"""`ckpt inspect tree`: what it prints for people and for programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.hf_models import write_llama
from support.internals import keystr, printable
from support.locations import GOLDEN, ORBAX

import ckpttools
from ckpttools.cli.inspect_tree import COLUMNS, format_amounts, shorten
from ckpttools.cli.output import print_json
from ckpttools.cli.table import TreeRow, draw_tree


def lines_of(*arguments: object, **environment: str) -> list[str]:
    result = ckpt("inspect", "tree", *arguments, **environment)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def facts_of(*arguments: object, **environment: str) -> dict[str, str]:
    """Label -> text of the lines before the tree."""
    lines = lines_of(*arguments, **environment)
    end = lines.index("") if "" in lines else len(lines)
    return {line[2:14].strip(): line[14:] for line in lines[1:end]}


def tree_lines(*arguments: object, **environment: str) -> list[str]:
    """The lines of the tree without their head."""
    lines = lines_of(*arguments, **environment)
    return lines[lines.index("") + 2 :]


def json_of(*arguments: object) -> dict[str, object]:
    outcome = ckpt("inspect", "tree", *arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    result: dict[str, object] = json.loads(outcome.stdout)
    return result


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "llama"
    write_llama(directory, shards=2)
    return directory


@pytest.fixture(scope="module")
def scanned() -> Path:
    return GOLDEN / "llama3.1" / "maxtext_scanned"


class TestJson:
    def test_json_describes_a_converted_checkpoint(self, scanned: Path):
        result = json_of(scanned)
        arrays = {item["path"]: item for item in result.pop("arrays")}  # type: ignore[attr-defined]
        promised = {
            "path": f"{scanned}/0/items",
            "format": "orbax",
            "kind": "stacked-inference",
            "flavor": "linen",
            "scan_axis": 1,
            "step": 0,
            "num_arrays": 13,
            "num_parameters": 180_800,
            "nbytes": 361_608,
            "custom_metadata": {"scan_layers": True},
        }
        assert {name: result[name] for name in promised} == promised
        assert result["layers"] == [
            {"path": "decoder/layers", "length": 4, "layout": "stacked", "cycle": 1, "remainder": 0}
        ]
        assert result["roles"] == {
            "parameter": {"num_arrays": 12, "num_elements": 180_800, "nbytes": 361_600},
            "other": {"num_arrays": 1, "num_elements": 1, "nbytes": 8},
        }
        assert [item["name"] for item in result["families"]] == ["llama", "mistral"]  # type: ignore[attr-defined]
        assert (result["optimizer"], result["random_states"], result["warnings"]) == (None, 0, [])
        assert len(arrays) == 13
        assert arrays["params/params/decoder/layers/self_attention/query/kernel"] == {
            "path": "params/params/decoder/layers/self_attention/query/kernel",
            "shape": [64, 4, 4, 16],
            "dtype": "bfloat16",
            "nbytes": 32_768,
            "role": "parameter",
            "sharding": None,
            "quantized": None,
            "is_random": False,
        }

    def test_json_describes_safetensors(self, llama: Path):
        result = json_of(llama)
        assert result["format"] == "safetensors"
        assert [result[name] for name in ("kind", "flavor", "scan_axis", "step")] == [None] * 4
        assert (result["num_arrays"], result["num_parameters"], result["nbytes"]) == (39, 180_800, 361_600)
        arrays = result["arrays"]
        assert "model.layers.0.mlp.up_proj.weight" in [array["path"] for array in arrays]  # type: ignore[attr-defined]
        assert {array["role"] for array in arrays} == {"parameter"}  # type: ignore[attr-defined]

    def test_json_has_subtrees_with_totals(self, llama: Path):
        head, model = json_of(llama, "--depth", 1, "--sort", "name")["subtrees"]  # type: ignore[misc]
        assert (head["name"], head["array"]["shape"], head["num_arrays"]) == ("lm_head.weight", [256, 64], 1)
        assert (model["name"], model["array"], model["num_arrays"], model["children"]) == (
            "model",
            None,
            38,
            [],
        )
        assert head["fraction"] + model["fraction"] == pytest.approx(1)

    def test_json_contains_only_filtered_arrays(self, llama: Path):
        result = json_of(llama, "--filter", "*.mlp.*")
        assert result["num_arrays"] == 12
        assert all(".mlp." in item["path"] for item in result["arrays"])  # type: ignore[attr-defined]

    def test_json_arrays_are_sorted_by_size(self, scanned: Path):
        sizes = [item["nbytes"] for item in json_of(scanned, "--sort", "size")["arrays"]]  # type: ignore[attr-defined]
        assert sizes == sorted(sizes, reverse=True)

    def test_json_contains_sharding(self):
        result = json_of(ORBAX / "multihost_plain", "--sharding")
        arrays = {item["path"]: item for item in result["arrays"]}  # type: ignore[attr-defined]
        assert arrays["params/params/decoder/w_col"]["sharding"] == {
            "kind": "NamedSharding",
            "mesh": [["fsdp", 4]],
            "spec": [[], ["fsdp"]],
            "device": None,
            "devices": None,
            "write_shape": [16, 8],
        }


class TestFacts:
    def test_header_describes_a_converted_checkpoint(self, scanned: Path):
        assert lines_of(scanned)[0] == f"{scanned}/0/items"
        assert facts_of(scanned) == {
            "format": "orbax, step 0",
            "kind": "stacked-inference, linen, scan axis 1",
            "layers": "4 in decoder/layers",
            "family": "llama or mistral, all 11 names",
            "holds": "13 arrays, 362 kB",
            "parameters": "181 k (180,800) in bfloat16, 362 kB",
            "other": "1 array, 8 B",
            "metadata": '{"scan_layers": true}',
        }

    def test_header_describes_safetensors(self, llama: Path):
        facts = facts_of(llama)
        assert facts["format"] == "safetensors"
        assert facts["family"] == "llama (config.json), all 11 names"
        assert "kind" not in facts

    def test_header_describes_a_training_checkpoint(self):
        facts = facts_of(ORBAX / "maxtext_nnx")
        assert facts["kind"] == "stacked-training, linen, scan axis 1"
        assert facts["optimizer"] == "adamw, 11 arrays, 4.29 kB"
        assert facts["other"] == "3 arrays, 2 of them RNG state, 16 B"

    def test_tree_of_a_run_starts_with_parameters_and_folds_random_states(self):
        lines = ckpt("inspect", "tree", ORBAX / "maxtext_nnx", "--depth", 1).stdout.splitlines()
        names = [line.split()[0] for line in lines[lines.index("") + 2 :]]
        assert names == ["params/params", "opt_state/0", "step", "RNG"]
        assert "2 arrays (--flat lists them)" in lines[-1]
        flat = ckpt("inspect", "tree", ORBAX / "maxtext_nnx", "--flat").stdout
        assert flat.count("/rngs/") == 2
        result = json_of(ORBAX / "maxtext_nnx")
        random = [item["path"] for item in result["arrays"] if item["is_random"]]  # type: ignore[attr-defined]
        assert len(random) == result["random_states"] == 2
        assert len(result["arrays"]) == 19  # type: ignore[arg-type]
        assert sum(branch["num_arrays"] for branch in result["subtrees"]) == 19  # type: ignore[attr-defined]

    def test_header_warns_about_an_unfinished_step(self):
        for name, directory in (
            ("unfinished_atomic_rename", "2.orbax-checkpoint-tmp"),
            ("unfinished_commit_file", "2"),
        ):
            facts = facts_of(ORBAX / name)
            assert facts["format"] == "orbax, step 1"
            assert facts["warning"].startswith(f"{directory}, next to step 1, is an unfinished save:")

    def test_header_warns_about_mixed_dtypes(self):
        facts = facts_of(ORBAX / "multihost_plain")
        assert facts["parameters"] == "1.06 k (1,056), 2.18 kB: bfloat16 2.05 kB, float32 128 B"
        assert facts["warning"] == "parameters have mixed dtypes: 2 in bfloat16, 1 in float32"

    def test_mesh_is_shown_only_with_sharding(self):
        assert facts_of(ORBAX / "maxtext_nnx", "--sharding")["mesh"] == "data 1 × fsdp 4"
        assert "mesh" not in facts_of(ORBAX / "maxtext_nnx")

    def test_long_header_values_are_wrapped(self):
        lines = lines_of(ORBAX / "unfinished_commit_file", COLUMNS="60")
        at = next(k for k, line in enumerate(lines) if "warning" in line)
        assert max(map(len, lines[1:])) <= 60
        assert lines[at + 1].startswith(" " * 14)

    def test_long_metadata_is_cut(self, tmp_path: Path):
        write_llama(tmp_path / "hf")
        location = ckpt("convert", "to-orbax", tmp_path / "hf", tmp_path / "out")
        assert location.exit_code == 0, location.output
        path = tmp_path / "out" / "0" / "_CHECKPOINT_METADATA"
        document = json.loads(path.read_text()) | {"custom_metadata": {"note": "x" * 5000}}
        path.write_text(json.dumps(document))
        metadata = facts_of(tmp_path / "out", COLUMNS="9999")["metadata"]
        assert len(metadata) < 500
        assert "--json" in metadata


class TestTree:
    def test_tree_shows_safetensors(self, llama: Path):
        lines = lines_of(llama, COLUMNS="80")
        assert lines[lines.index("") + 1 :] == [
            "                                         dtype[shape]             bytes  share",
            "lm_head.weight                           bfloat16[256,64]       32.8 kB  9.1 %",
            "model                                                            329 kB   91 %",
            "├── embed_tokens.weight                  bfloat16[256,64]       32.8 kB  9.1 %",
            "├── layers.{0..3}                                                296 kB   82 %",
            "│   ├── input_layernorm.weight           bfloat16[64]      × 4    512 B  0.1 %",
            "│   ├── mlp                                                      197 kB   54 %",
            "│   │   ├── down_proj.weight             bfloat16[64,128]  × 4  65.5 kB   18 %",
            "│   │   ├── gate_proj.weight             bfloat16[128,64]  × 4  65.5 kB   18 %",
            "│   │   └── up_proj.weight               bfloat16[128,64]  × 4  65.5 kB   18 %",
            "│   ├── post_attention_layernorm.weight  bfloat16[64]      × 4    512 B  0.1 %",
            "│   └── self_attn                                               98.3 kB   27 %",
            "│       ├── k_proj.weight                bfloat16[32,64]   × 4  16.4 kB  4.5 %",
            "│       ├── o_proj.weight                bfloat16[64,64]   × 4  32.8 kB  9.1 %",
            "│       ├── q_proj.weight                bfloat16[64,64]   × 4  32.8 kB  9.1 %",
            "│       └── v_proj.weight                bfloat16[32,64]   × 4  16.4 kB  4.5 %",
            "└── norm.weight                          bfloat16[64]             128 B",
        ]

    def test_wide_terminal_shows_elements(self, llama: Path):
        lines = lines_of(llama, COLUMNS="90")
        assert lines[lines.index("") + 1 :][:4] == [
            "                                         dtype[shape]           elements    bytes  share",
            "lm_head.weight                           bfloat16[256,64]         16.4 k  32.8 kB  9.1 %",
            "model                                                              164 k   329 kB   91 %",
            "├── embed_tokens.weight                  bfloat16[256,64]         16.4 k  32.8 kB  9.1 %",
        ]

    def test_lines_fit_a_narrow_terminal_and_bytes_are_aligned(self, scanned: Path):
        lines = lines_of(scanned, COLUMNS="80")
        assert max(map(len, lines[1:])) <= 80
        tree = tree_lines(scanned, COLUMNS="80")
        assert len({line.rstrip("B").rindex(" ") for line in tree if line.endswith("kB")}) == 1

    def test_depth_limits_the_tree(self, scanned: Path):
        lines = tree_lines(scanned, "--depth", 2)
        assert [line.split("  ")[0] for line in lines] == [
            "params/params",
            "├── decoder",
            "└── token_embedder/embedding",
            "step",
        ]
        assert "11 arrays" in lines[1]

    def test_path_filter_matches_itself(self, tmp_path: Path):
        save_file(
            {name: np.ones(4, np.float32) for name in ("a[0]", "a0", "a[1]")}, tmp_path / "a.safetensors"
        )
        arguments = (tmp_path / "a.safetensors", "--filter", "a[0]", "--flat")
        assert [line.split()[0] for line in tree_lines(*arguments)] == ["a0", "a[0]"]

    def test_unmatched_filter_is_refused(self, llama: Path):
        result = ckpt("inspect", "tree", llama, "--filter", "nope")
        assert result.exit_code == 2
        assert "got      nope" in result.stderr

    def test_single_shard_is_inspected(self, llama: Path, tmp_path: Path):
        for shard in sorted(llama.glob("*.safetensors")):
            alone = shutil.copy(shard, tmp_path)
            assert "family" in facts_of(alone)
        shapes = {keystr(path): array.shape for path, array in ckpttools.open(llama).arrays.items()}
        del shapes["model.norm.weight"]
        arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        save_file(arrays, tmp_path / "n.safetensors")
        assert "missing model.norm.weight" in facts_of(tmp_path / "n.safetensors", COLUMNS="200")["family"]

    def test_array_with_nested_arrays_counts_itself(self, tmp_path: Path):
        names = [f"layers.{k}.w{rest}" for k in range(3) for rest in ("", ".absmax", ".map")]
        save_file({name: np.ones(4, np.float32) for name in names}, tmp_path / "q.safetensors")
        (line,) = (line for line in lines_of(tmp_path / "q.safetensors") if "layers.{0..2}.w " in line)
        assert "× 3 " in line

    def test_nan_in_metadata_is_null(self, capsys: pytest.CaptureFixture[str]):
        print_json({"loss": float("nan"), "tree": [float("inf"), 1.5]})
        assert json.loads(capsys.readouterr().out) == {"schema": 1, "loss": None, "tree": [None, 1.5]}

    def test_flat_prints_one_line_per_array(self, llama: Path):
        assert sum("model.layers.3." in line for line in lines_of(llama, "--flat")) == 9

    def test_flat_is_sorted_by_size(self, scanned: Path):
        names = [line.split()[0] for line in tree_lines(scanned, "--flat", "--sort", "size")]
        assert names[0].endswith("wi_0/kernel")
        assert names[-1] == "step"

    def test_flat_is_sorted_naturally_by_name(self, llama: Path):
        names = [line.split()[0] for line in tree_lines(llama, "--flat", "--sort", "name")]
        assert names.index("model.layers.3.mlp.up_proj.weight") < names.index("model.norm.weight")

    def test_flat_refuses_depth(self, llama: Path):
        result = ckpt("inspect", "tree", llama, "--flat", "--depth", 2)
        assert result.exit_code == 2
        assert "--flat has no levels" in result.stderr

    def test_piped_output_has_no_colors(self, llama: Path):
        command = [sys.executable, "-m", "ckpttools.cli.main", "inspect", "tree", str(llama)]
        code = "from ckpttools.cli.main import main; main()"
        process = subprocess.run(
            [sys.executable, "-c", code, *command[3:]], capture_output=True, text=True, timeout=60, check=True
        )
        assert "\x1b" not in process.stdout
        assert process.stdout.startswith(str(llama))

    def test_closed_pipe_exits_with_141(self, llama: Path):
        code = "from ckpttools.cli.main import main; main()"
        command = [sys.executable, "-c", code, "inspect", "tree", str(llama), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(30) == 141

    def test_missing_step_is_refused(self, scanned: Path):
        result = ckpt("inspect", "tree", scanned, "--step", 7)
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: step 7 does not exist\n")

    @pytest.mark.parametrize("below", ["", "items"])
    def test_conflicting_step_is_refused(self, below):
        step = ORBAX / "maxtext_run" / "checkpoints" / "4" / below
        assert ckpt("inspect", "tree", step, "--step", 4).exit_code == 0
        result = ckpt("inspect", "tree", step, "--step", 0)
        assert result.exit_code == 2
        assert "step 0 does not exist" in result.stderr and "got      step 4\n" in result.stderr
        assert "hint     give the directory of the run, or leave --step out" in result.stderr

    def test_names_cannot_control_the_terminal(self):
        assert printable("a\x1b[31m\n\ud800") == r"a\x1b[31m\n\ud800"
        assert printable("größe") == "größe"

    def test_name_with_many_ranges_is_shortened(self):
        numbers = ",".join(f"{k}..{k + 4}" for k in range(0, 60, 6))
        assert shorten(f"layers_{{{numbers}}}/a_{{0..3}}") == "layers_{0..4,6..10,12..16,…,54..58}/a_{0..3}"
        assert shorten("layers_{0..3,5}") == "layers_{0..3,5}"
        assert shorten("no{brace") == "no{brace"


def row(way, name, dtype, times, nbytes=2000):
    return TreeRow((name, dtype, times, *format_amounts(1000, nbytes, 0.5)), way)


ROWS = st.builds(
    row,
    way=st.lists(st.booleans(), max_size=5).map(tuple),
    name=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=40),
    dtype=st.sampled_from(("", "int8[4]", "bfloat16[4096,14336]")),
    times=st.sampled_from(("", "× 2", "× 10,000")),
    nbytes=st.integers(0, 10**14),
)


@given(st.lists(ROWS, min_size=1, max_size=12), st.none() | st.integers(20, 200))
def test_columns_are_aligned_or_dropped_in_order(rows: list[TreeRow], room: int | None):
    from click import unstyle

    head, *lines = map(unstyle, draw_tree(COLUMNS, rows, room))
    whole = [unstyle(line) for line in draw_tree(COLUMNS, rows, None)]
    fits = room is None or max(map(len, whole)) <= room
    if fits:
        assert [head, *lines] == whole
    rest = max(len(row.cells[2]) for row in rows) + 2 + max(len(row.cells[4]) for row in rows)
    for row in rows:
        name, dtype, times, _, nbytes, _ = row.cells
        line = lines.pop(0)
        assert name in line
        # All else follows on the same line or, where that would be too long, all of it on the next.
        if nbytes not in line:
            assert not fits
            assert line.endswith(f" {name}" if row.way else name)
            line = lines.pop(0)
        assert dtype in line and times in line and nbytes in line
        least = 2 * len(row.way) + 2 + len(dtype) + 2 + rest
        assert room is None or len(line) <= max(room, least)
    assert not lines


def test_long_row_continues_below_its_name():
    """Names are copied, so they stay whole; facts stay in their columns as long as they fit there."""
    sharded = "bfloat16[64@checkpoint_sharding_axis,4,128]"
    rows = [
        row((), "decoder", "", ""),
        row((False,), "wi_{0..1}/kernel", sharded, "× 2"),
        row((True,), "post_self_attention_layer_norm/layer_norm/scale", "int8[4]", ""),
        row((), "step", "int8[4]", ""),
    ]
    from click import unstyle

    assert [unstyle(line) for line in draw_tree(COLUMNS, rows, 60)] == [
        "                      dtype[shape]                     bytes",
        "decoder                                              2.00 kB",
        "├ wi_{0..1}/kernel",
        "│   bfloat16[64@checkpoint_sharding_axis,4,128]  × 2  2.00 kB",
        "└ post_self_attention_layer_norm/layer_norm/scale",
        "                      int8[4]                        2.00 kB",
        "step                  int8[4]                        2.00 kB",
    ]


@pytest.mark.parametrize("options", [(), ("--flat",), ("--sharding",), ("--flat", "--sharding")])
@pytest.mark.parametrize("location", ["gemma4-moe/hf", "llama4-scout/hf", "llama3.1/maxtext_scanned"])
def test_lines_fit_the_terminal(location: str, options: tuple[str, ...]):
    lines = lines_of(GOLDEN / location, *options, COLUMNS="80")
    assert max(map(len, lines[1:])) <= 80
    if "--flat" in options:
        names = {keystr(path) for path in ckpttools.open(GOLDEN / location).arrays}
        assert names <= {line.split(" ")[0] for line in lines}
