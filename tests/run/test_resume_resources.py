"""An interrupted command resumes with other resources: workers, memory, requests, progress."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run
from support.internals import Started, TaskDone

import ckpttools
from ckpttools import Receipt
from ckpttools.plan import plan as planning
from ckpttools.plan.plan import Division
from ckpttools.testing.models import LlamaSizes, write_llama

pytest.importorskip("safetensors")
LLAMA = LlamaSizes(layers=2, hidden=128, mlp=512, heads=4, kv_heads=2, head_dim=32, vocab=8192)


class StopError(Exception):
    """Stops a run at a chosen moment."""


@pytest.fixture(scope="module", autouse=True)
def small_shares():
    """Let the number of workers decide how small models are cut, as it does for models of 64 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_SMALLEST_SHARE", 16 << 10)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    location = tmp_path_factory.mktemp("source") / "model"
    write_llama(location, LLAMA)
    return location


@pytest.fixture(scope="module")
def maxtext(model, tmp_path_factory):
    location = tmp_path_factory.mktemp("source") / "maxtext"
    ckpttools.hf_to_maxtext(model, location)
    return location


COMMANDS: dict[str, Callable[..., Receipt]] = {
    "hf_to_maxtext": ckpttools.hf_to_maxtext,
    "convert_to_orbax": partial(ckpttools.convert, format="orbax"),
    "convert_to_zstd": partial(ckpttools.convert, format="orbax", compression="zstd"),
    "convert_to_zarr3": partial(ckpttools.convert, format="zarr3"),
    "convert_to_safetensors": partial(ckpttools.convert, format="safetensors", max_shard_size="1MB"),
    "cast": partial(ckpttools.cast, dtype="bfloat16"),
    "quantize": partial(ckpttools.quantize, scheme="fp8-block128"),
    "select": partial(ckpttools.select, keep=("*proj*",), reference=False),
}


def interrupt(count: int, command: Callable[..., Receipt], *arguments: object, **options: Any) -> None:
    """Run a command, and stop it after some tasks."""
    done = []

    def observe(event: object) -> None:
        done.extend([event] * isinstance(event, TaskDone))
        if len(done) >= count:
            raise StopError

    with suppress(StopError):
        command(*arguments, observe=observe, **options)


def resume(command: Callable[..., Receipt], *arguments: object, **options: Any) -> tuple[Receipt, int]:
    """Run a command. Returns its receipt and the number of tasks that it kept."""
    started = []
    receipt = command(*arguments, observe=lambda event: started.append(event), **options)
    return receipt, next(event.tasks_done for event in started if isinstance(event, Started))


RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "jobs": st.sampled_from((1, 2, 3, 7, 16)),
        "memory": st.sampled_from(("160MiB", "200MiB", "300MiB", "1GiB", "3GiB")),
        "requests": st.sampled_from((1, 5)),
    },
)


def test_resources_change_the_task_division(model, tmp_path):
    """Otherwise the other tests would show nothing."""
    plans = [ckpttools.cast.plan(model, tmp_path / "out", dtype="bfloat16", jobs=jobs) for jobs in (1, 2, 8)]
    assert len({len(plan.plan.tasks) for plan in plans}) == 3


@pytest.mark.parametrize("name", COMMANDS)
@settings(max_examples=6, deadline=None)
@given(first=RESOURCES, second=RESOURCES, count=st.integers(1, 6))
def test_commands_resume_with_other_resources(model, name, first, second, count):
    command = COMMANDS[name]
    with tempfile.TemporaryDirectory() as directory:
        out, expected = Path(directory, "out"), Path(directory, "expected")
        interrupt(count, command, model, out, **first)
        is_begun = (out.parent / "out.partial").exists()
        receipt, kept = resume(command, model, out, **second)
        assert is_begun and receipt.tasks_resumed == kept
        command(model, expected, **first)
        assert ckpttools.hash(out).digest == ckpttools.hash(expected).digest
        assert not (out.parent / "out.partial").exists()


@pytest.mark.parametrize("second", [{"jobs": 1}, {"jobs": 1, "memory": "200MiB"}, {"jobs": 16}])
def test_bucket_resumes_with_other_resources(model, gcs, second):
    """The journal in a bucket records the division, too."""
    out = f"gs://{gcs.bucket}/out"
    interrupt(2, COMMANDS["convert_to_zarr3"], model, out, jobs=4)
    receipt, kept = resume(COMMANDS["convert_to_zarr3"], model, out, **second)
    assert receipt.tasks_resumed == kept > 0
    assert ckpttools.hash(out).digest == ckpttools.hash(model).digest


def test_maxtext_to_hf_resumes_with_other_resources(maxtext, model, tmp_path):
    command = partial(ckpttools.maxtext_to_hf, like=model)
    interrupt(5, command, maxtext, tmp_path / "out", jobs=8)
    receipt, kept = resume(command, maxtext, tmp_path / "out", jobs=1, memory="256MiB")
    assert receipt.tasks_resumed == kept > 0


def test_command_line_resumes_after_a_kill_with_less_memory(model, tmp_path, monkeypatch):
    words = ("convert", "to-orbax", model, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("ckpttools.formats.orbax.write.OrbaxWriter.finish", _stop)
        assert ckpt(*words, "--jobs", "8").exit_code != 0
    output = run(*words, "--jobs", "1", "--memory", "200MiB", "--resume")
    assert "resumed" in output or "done before" in output, output
    assert ckpttools.hash(tmp_path / "out").digest == ckpttools.hash(model).digest


def test_changed_option_is_named_with_both_values(model, tmp_path, monkeypatch):
    words = ("cast", model, tmp_path / "out", "--dtype")
    with monkeypatch.context() as patch:
        patch.setattr("ckpttools.formats.safetensors.write.SafetensorsWriter.finish", _stop)
        assert ckpt(*words, "bfloat16", "--jobs", "8").exit_code != 0
    output = " ".join(run(*words, "float16", "--jobs", "1", "--memory", "300MiB", code=2).split())
    assert "(with --dtype bfloat16, now --dtype float16)" in output


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model with one array of 96 MiB, which does not fit into small tasks."""
    location = tmp_path_factory.mktemp("large") / "model.safetensors"
    ckpttools.save({"w": np.zeros((96, 1 << 18), np.float32)}, location, format="safetensors")
    return location


@pytest.mark.parametrize("first", [None, "1GiB", "3GiB", "800MB"])
@pytest.mark.parametrize("second", ["104MiB", "108MiB", "112MiB"])
def test_insufficient_memory_for_recorded_tasks_is_refused(large, tmp_path, monkeypatch, first, second):
    words = ("cast", large, tmp_path / "out", "--dtype", "bfloat16", "--jobs", "1")
    memory = () if first is None else ("--memory", first)
    with monkeypatch.context() as patch:
        patch.setattr("ckpttools.formats.safetensors.write.SafetensorsWriter.finish", _stop)
        assert ckpt(*words, *memory).exit_code != 0
    output = " ".join(run(*words, "--memory", second, code=2).split())
    before = {None: "1024MiB", "1GiB": "1024MiB", "3GiB": "3072MiB", "800MB": "800MB"}[first]
    assert f"(with --memory {before}, now --memory {second}, into which its tasks do not fit)" in output
    assert "with --overwrite" in output and "to resume it, run in" in output
    run(*words, *memory)


def _stop(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("text", ["", "1", "1 2 3", "0 0", "1 2", "-4 1", "a b", "4 ", "9" * 30 + " 1"])
def test_unknown_divisions_are_ignored(text):
    assert Division.from_text(text) is None


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_division_round_trips(first, second):
    division = Division(max(first, second), min(first, second))
    assert Division.from_text(division.to_text()) == division
