"""Every command that `ckpt doctor` suggests: run as it is printed, it repairs the damage and loses nothing.

Paths contain a space and a quote, so that a command that does not quote them fails.
`tests/formats/test_safetensors.py` runs those for indexes, `tests/formats/test_tied_head.py` those for
output heads.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, examine
from support.hf_models import write_llama
from support.locations import ORBAX
from support.orbax_items import LITTLE, change_index, change_json, values_of, write_item, zarr2, zarr3

import ckpttools
from ckpttools.diagnosis.base import Finding
from ckpttools.runs.removal import Removal
from ckpttools.stores.local.directory import StagingDirectory

F32 = np.dtype("float32")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A directory whose name a shell must not split or interpret."""
    path = tmp_path / "it's $HOME"
    path.mkdir()
    return path


def the_finding(path: Path, check: str) -> Finding:
    """The one finding of a check that has a command."""
    (result,) = (finding for finding in examine(path).findings if finding.check == check and finding.command)
    assert result.command in result.hint
    return result


def run_command(command: str, directory: Path, **replaced: Path | str) -> None:
    """Run a suggested command, with names such as DST replaced as its reader would do."""
    for name, value in replaced.items():
        assert re.search(rf"\b{name}\b", command), command
        command = re.sub(rf"\b{name}\b", shlex.quote(str(value)).replace("\\", r"\\"), command)
    words = shlex.split(command)
    if words[0] == "ckpt" and not {"&&", ";"} & {*words}:
        result = ckpt(*words[1:])
        assert result.exit_code == 0, result.output
        return
    script = directory / "ckpt"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckpttools "$@"\n')
    script.chmod(0o755)
    path = {"PATH": f"{directory}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-ec", command], env=os.environ | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def values(path: Path) -> dict[str, Any]:
    """The bytes of all arrays of a checkpoint, by name."""
    return {".".join(name): array.read().tobytes() for name, array in ckpttools.open(path).arrays.items()}


def assert_sound(path: Path, check: str, expected: dict[str, Any]) -> None:
    """The check finds nothing any more, nothing is an error, and the arrays are those that were there."""
    diagnosis = examine(path)
    assert diagnosis.healthy and check not in {finding.check for finding in diagnosis.findings}, diagnosis
    assert values(path) == expected


def model(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    changes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 32} | changes
    return write_llama(path, **({"head_dim": 4} | changes))


class TestModelFixes:
    @pytest.mark.parametrize("name", ["weights.safetensors", "llama.safetensors", "consolidated.safetensors"])
    def test_advice_fixes_weight_names(self, top: Path, name: str) -> None:
        model(top / "m")
        (top / "m/model.safetensors").rename(top / "m" / name)
        config = json.loads((top / "m/config.json").read_bytes())
        (top / "m/config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
        expected = values(top / "m")
        run_command(the_finding(top / "m", "weight-names").command or "", top)
        assert_sound(top / "m", "weight-names", expected)
        assert load_file(top / "m/model.safetensors").keys() == expected.keys()

    @pytest.mark.parametrize("has_weights", [True, False])
    def test_advice_fixes_adapter_files(self, top: Path, has_weights: bool) -> None:
        model(top / "m")
        expected = values(top / "m")
        settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
        files = {"adapter_config.json": json.dumps(settings).encode()}
        (top / "m/adapter_config.json").write_bytes(files["adapter_config.json"])
        if has_weights:
            name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
            factors = {f"{name}A.weight": np.ones((1, 16), F32), f"{name}B.weight": np.ones((16, 1), F32)}
            save_file(factors, top / "m/adapter_model.safetensors")
            files["adapter_model.safetensors"] = (top / "m/adapter_model.safetensors").read_bytes()
        run_command(the_finding(top / "m", "adapter-files").command or "", top)
        moved = {path.name: path.read_bytes() for path in (top / "m/adapter").iterdir()}
        assert moved == files
        (top / "m/adapter").rename(top / "adapter")
        assert_sound(top / "m", "adapter-files", expected)

    @pytest.mark.parametrize("name", ["freqs_cis", "model.rotary_emb.inv_freq", "model.causal_mask"])
    def test_advice_fixes_buffers(self, top: Path, name: str) -> None:
        arrays = model(top / "m")
        buffer = np.tril(np.ones((8, 8), np.bool_)) if "mask" in name else np.ones(2, F32)
        save_file(arrays | {name: buffer}, top / "m/model.safetensors")
        run_command(the_finding(top / "m", "buffers").command or "", top, DST=top / "out")
        assert_sound(top / "out", "buffers", {item: array.tobytes() for item, array in arrays.items()})

    @pytest.mark.parametrize("stated", ["bfloat16", "float16", "float64"])
    def test_advice_fixes_dtype(self, top: Path, stated: str) -> None:
        model(top / "m", dtype="float32")
        config = json.loads((top / "m/config.json").read_bytes()) | {"torch_dtype": stated}
        (top / "m/config.json").write_text(json.dumps(config))
        run_command(the_finding(top / "m", "dtype").command or "", top, DST=top / "out")
        assert_sound(top / "out", "dtype", values(top / "m"))

    @pytest.mark.parametrize("kept", [1, 2])
    def test_advice_fixes_cut_layers(self, top: Path, kept: int) -> None:
        model(top / "m", num_hidden_layers=kept)
        config = json.loads((top / "m/config.json").read_bytes()) | {"num_hidden_layers": 3}
        (top / "m/config.json").write_text(json.dumps(config))
        run_command(the_finding(top / "m", "layers").command or "", top, DST=top / "out")
        assert_sound(top / "out", "layers", values(top / "m"))

    @pytest.mark.parametrize("method", ["fp8", "gptq", "compressed-tensors"])
    def test_advice_fixes_absent_quantization(self, top: Path, method: str) -> None:
        model(top / "m", quantization_config={"quant_method": method, "weight_block_size": [128, 128]})
        (result,) = (finding for finding in examine(top / "m").findings if finding.check == "quantization")
        assert "`ckpt convert to-safetensors` does" in result.hint
        assert ckpt("convert", "to-safetensors", top / "m", top / "out").exit_code == 0
        assert_sound(top / "out", "quantization", values(top / "m"))

    @pytest.mark.parametrize("mode", [0o000, 0o200])
    def test_advice_fixes_file_permissions(self, top: Path, mode: int) -> None:
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        model(top / "m")
        expected = values(top / "m")
        (top / "m/model.safetensors").chmod(mode)
        run_command(the_finding(top / "m", "access").command or "", top)
        assert_sound(top / "m", "access", expected)

    @pytest.mark.parametrize("more", [1, 8])
    def test_advice_fixes_vocabulary_rows(self, top: Path, more: int) -> None:
        arrays = model(top / "m", vocab_size=32 + more)
        config = json.loads((top / "m/config.json").read_bytes()) | {"vocab_size": 32}
        (top / "m/config.json").write_text(json.dumps(config))
        result = the_finding(top / "m", "vocabulary-rows")
        expected = values(top / "m")
        run_command(result.command or "", top)
        assert_sound(top / "m", "vocabulary-rows", expected)
        (trim,) = re.findall("`(ckpt shrink .*?)`", result.hint)
        run_command(trim, top, DST=top / "out")
        trimmed = {
            name: (array[:32] if array.shape[0] == 32 + more else array).tobytes()
            for name, array in arrays.items()
        }
        assert_sound(top / "out", "vocabulary-rows", trimmed)

    def test_advice_fixes_adapter_without_model(self, top: Path) -> None:
        base = model(top / "base", dtype="float32")
        (top / "adapter").mkdir()
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        factors = {f"{name}A.weight": np.ones((1, 16), F32), f"{name}B.weight": np.ones((16, 1), F32)}
        save_file(factors, top / "adapter/adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
        (top / "adapter/adapter_config.json").write_text(json.dumps(settings))
        command = the_finding(top / "adapter", "config").command or ""
        run_command(command, top, BASE=top / "base", MODEL=top / "out")
        base["model.layers.0.self_attn.q_proj.weight"] = base["model.layers.0.self_attn.q_proj.weight"] + 1
        assert_sound(top / "out", "config", {item: array.tobytes() for item, array in base.items()})

    @pytest.mark.parametrize("prefix", ["transformer.", "backbone.", "module.model."])
    def test_advice_fixes_name_prefixes(self, top: Path, prefix: str) -> None:
        arrays = model(top / "m")
        other = {prefix + name.removeprefix("model."): item for name, item in arrays.items()}
        save_file(other, top / "m/model.safetensors")
        run_command(the_finding(top / "m", "name-prefixes").command or "", top, DST=top / "mt")
        ckpttools.maxtext_to_hf(top / "mt", top / "out")
        assert_sound(top / "out", "name-prefixes", {key: item.tobytes() for key, item in arrays.items()})


def item_at(path: Path, **options: Any) -> Path:
    version = options.pop("version", zarr3([LITTLE], [300, 2]))
    return write_item(path, {("w",): (version, values_of(F32, (600, 2)))}, **options)


class TestOrbax:
    @pytest.mark.parametrize("use_ocdbt", [True, False])
    def test_advice_fixes_item_without_a_step(self, top: Path, use_ocdbt: bool) -> None:
        item = item_at(top / "item", use_ocdbt=use_ocdbt)
        expected = values(item)
        run_command(the_finding(item, "commit").command or "", top, DST=top / "out")
        assert_sound(top / "out", "commit", expected)

    @pytest.mark.parametrize("name", ["stray", "0123456789abcdef"])
    def test_advice_fixes_unreferenced_data_file(self, top: Path, name: str) -> None:
        item = item_at(top / "item")
        expected = values(item)
        (item / "d" / name).write_bytes(bytes(500))
        run_command(the_finding(item, "index").command or "", top, DST=top / "out")
        assert_sound(top / "out", "index", expected)

    @pytest.mark.parametrize("field", ["use_zarr3", "use_ocdbt"])
    @pytest.mark.parametrize("stored", [True, False])
    def test_advice_fixes_contradicting_metadata(self, top: Path, field: str, stored: bool) -> None:
        version = {} if field != "use_zarr3" or stored else {"version": zarr2(None, [300, 2])}
        item = item_at(top / "item", use_ocdbt=field == "use_zarr3" or stored, **version)
        expected = values(item)
        change_json(item / "_METADATA", **{field: not stored})
        run_command(the_finding(item, "chunks").command or "", top)
        assert_sound(item, "chunks", expected)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_advice_fixes_data_file_permissions(self, top: Path) -> None:
        item = item_at(top / "item")
        expected = values(item)
        (file,) = (entry for entry in (item / "d").iterdir())
        file.chmod(0)
        run_command(the_finding(item, "chunks").command or "", top)
        assert values(item) == expected

    def test_advice_merges_processes(self, top: Path) -> None:
        item = Path(shutil.copytree(ORBAX / "lazy_2proc", top / "run")) / "7" / "items"
        expected = values(item)
        (item / "manifest.ocdbt").unlink()
        run_command(the_finding(item, "unmerged").command or "", top)
        assert_sound(item, "unmerged", expected)

    def test_advice_repairs_partial_merge(self, top: Path) -> None:
        item = Path(shutil.copytree(ORBAX / "lazy_2proc", top / "run")) / "7" / "items"
        expected = values(item)
        change_index(item, lambda entries: entries.pop(b"params.params.w/c/1/0"))
        (command,) = {e.command for e in examine(item).findings if e.check == "unmerged" and e.command}
        run_command(command or "", top)
        assert_sound(item, "unmerged", expected)

    def test_advice_fixes_commit_markers(self, top: Path) -> None:
        run = Path(shutil.copytree(ORBAX / "cm_default", top / "run"))
        expected = values(run)
        for path in run.rglob("commit_success.txt"):
            path.unlink()
        (command,) = {finding.command for finding in examine(run).findings}
        run_command(command or "", top)
        assert_sound(run, "commit", expected)

    @pytest.mark.parametrize("where", ["run", "step"])
    def test_advice_moves_unfinished_step_aside(self, top: Path, where: str) -> None:
        run = Path(shutil.copytree(ORBAX / "unfinished_commit_file", top / "run"))
        expected = values(run / "1")
        for path in (run / "2", *(run / "2").rglob("*")):
            os.utime(path, (0, 0))
        run_command(the_finding(run if where == "run" else run / "2", "unfinished").command or "", top)
        assert examine(run).healthy and (run / "2.unfinished").is_dir()
        assert values(run) == expected

    @pytest.mark.parametrize("name", ["state", "model"])
    def test_advice_opens_items_with_another_name(self, top: Path, name: str) -> None:
        run = top / "run"
        for step in (1, 2, 3):
            arrays = {"w": np.full(3, step, F32)}
            item = name if step == 2 else "items"
            ckpttools.save(arrays, run / str(step), format="orbax", item=item, level="step")
        expected = values(run / "2")
        run_command(the_finding(run, "items").command or "", top)
        assert values(top / "run.renamed/2") == expected
        (run / "2").rename(top / "2.old")
        (top / "run.renamed/2").rename(run / "2")
        assert_sound(run, "items", values(run / "3"))
        assert values(run / "2") == expected

    def test_advice_selects_one_of_several_items(self, top: Path) -> None:
        copy = Path(shutil.copytree(ORBAX / "v1_checkpointables", top / "step"))
        run_command(the_finding(copy, "items").command or "", top)


class TestLeftovers:
    """What is removed is what was left over, and nothing else."""

    def left(self, path: Path) -> list[str]:
        return sorted(str(item.relative_to(path)) for item in path.rglob("*") if item.is_file())

    @pytest.mark.parametrize("name", ["3.orbax-checkpoint-tmp-17", "3.unfinished"])
    def test_advice_removes_unfinished_saves(self, top: Path, name: str) -> None:
        run = Path(shutil.copytree(ORBAX / "cm_default", top / "run"))
        before, expected = self.left(run), values(run)
        (run / name).mkdir()
        (run / name / "x").write_bytes(bytes(9))
        run_command(the_finding(run, "leftovers").command or "", top)
        assert self.left(run) == before
        assert_sound(run, "leftovers", expected)

    @pytest.mark.parametrize("way", ["resume", "discard"])
    def test_advice_handles_interrupted_conversions(
        self, top: Path, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model(top / "m")
        expected = values(top / "m")
        monkeypatch.chdir(top)
        interrupt(
            lambda: ckpt("convert", "to-orbax", "m", "out", "--no-progress"), StagingDirectory, "rename"
        )
        assert (top / "out.partial").is_dir()
        result = the_finding(top, "leftovers")
        if way == "discard":
            run_command(result.command or "", top)
            assert not (top / "out.partial").exists()
        else:
            (resume,) = re.findall("`(ckpt convert .*?)`", result.hint)
            run_command(resume, top)
            assert_sound(top / "out", "leftovers", expected)
        assert values(top / "m") == expected

    @pytest.mark.parametrize("way", ["finish", "undo"])
    def test_advice_handles_interrupted_prunes(self, top: Path, way: str) -> None:
        run = top / "run"
        for step in (1, 2, 3):
            ckpttools.save({"w": np.full(3, step, F32)}, run / str(step), format="orbax", level="step")
        expected = {step: values(run / str(step)) for step in (1, 2, 3)}
        interrupt(lambda: ckpt("prune", run, "--keep-last", "1", "--yes"), Removal, "_delete")
        result = the_finding(run, "leftovers")
        finish, undo = result.hint.partition("; or put back")[0], result.hint.rpartition(": ")[2]
        assert (result.command or "") in finish
        run_command(result.command or "" if way == "finish" else undo, top)
        kept = [step for step in expected if (run / str(step)).is_dir()]
        assert 3 in kept and (way == "finish") == (kept == [3])
        assert all(values(run / str(step)) == expected[step] for step in kept)
        assert examine(run).findings == ()


class StopError(BaseException):
    """Ends a command at a chosen moment."""


def stop(*_: object, **__: object) -> None:
    raise StopError


def interrupt(act: Callable[[], Result], owner: type, method: str) -> None:
    """Run a command that ends where it first calls a method."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, method, stop)
        assert act().exit_code == 70
