"""Arrays in memory that change between two attempts to save them: no state is mixed with another."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from support.command_line import ckpt
from support.hf_models import write_llama
from support.internals import TaskDone

import ckpttools
from ckpttools import CheckpointError, DestinationExistsError


class StopError(Exception):
    pass


def stopping(after):
    seen = []

    def observe(event):
        if isinstance(event, TaskDone):
            seen.append(event)
            if len(seen) == after:
                raise StopError

    return observe


@pytest.mark.parametrize("rows", [64, 4096])
def test_data_saved_from_another_state_is_discarded(tmp_path, monkeypatch, rows):
    monkeypatch.setattr("ckpttools.run.threads._SYNC_SECONDS", 0.001)
    state = {f"w{at:02d}": np.full((rows, 128), at, np.float32) for at in range(12)}
    prepared = ckpttools.save.plan(state, tmp_path / "out", "zarr3", jobs=1)
    with pytest.raises(StopError):
        prepared.run(observe=stopping(after=6))
    for array in state.values():
        array[:] = 1000
    try:
        prepared.run()
    except CheckpointError as error:
        assert "partial" in str(error)
        assert not (tmp_path / "out").exists()
        prepared = ckpttools.save.plan(state, tmp_path / "out", "zarr3", jobs=1, overwrite=True)
        prepared.run()
    result = ckpttools.open(tmp_path / "out")
    assert all((np.asarray(result[name]) == 1000).all() for name in state)


def test_save_of_same_state_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpttools.run.threads._SYNC_SECONDS", 0.001)
    state = {f"w{at:02d}": np.full((64, 128), at, np.float32) for at in range(12)}
    prepared = ckpttools.save.plan(state, tmp_path / "out", "zarr3", jobs=1)
    with pytest.raises(StopError):
        prepared.run(observe=stopping(after=6))
    assert prepared.run().tasks_resumed >= 5


class TestRunSteps:
    """A run is not replaced by a run of another step, which is meant to be added to it."""

    STATE: ClassVar = {"w": np.ones(3, np.float32)}

    def saved(self, location, **options):
        return ckpttools.save(self.STATE, location, **options)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_another_step_is_not_replaced(self, tmp_path, overwrite):
        self.saved(tmp_path / "run", as_step=1000)
        with pytest.raises(DestinationExistsError, match="step 1000, which would be lost") as error:
            self.saved(tmp_path / "run", as_step=2000, overwrite=overwrite)
        assert 'level="step"' in str(error.value)
        self.saved(tmp_path / "run" / "2000", level="step")
        assert sorted(item.name for item in (tmp_path / "run").iterdir()) == ["1000", "2000"]

    @pytest.mark.parametrize("name", ["step_1000", "checkpoints/1000", "ema_1000"])
    def test_existing_step_with_any_name_is_refused(self, tmp_path, name):
        self.saved(tmp_path / "run" / name, level="step")
        with pytest.raises(DestinationExistsError, match="1000, which would be lost") as error:
            self.saved(tmp_path / "run", as_step=2000, overwrite=True)
        assert str((tmp_path / "run" / name).with_name("2000")) in str(error.value)
        if "/" not in name:
            self.saved(tmp_path / "run", as_step=1000, overwrite=True)

    def test_step_without_items_is_loaded(self, tmp_path):
        self.saved(tmp_path / "run" / "1000", level="item")
        with pytest.raises(DestinationExistsError, match="step 1000, which would be lost"):
            self.saved(tmp_path / "run", as_step=2000, overwrite=True)

    def test_same_step_is_reused(self, tmp_path):
        self.saved(tmp_path / "run", as_step=7)
        self.saved(tmp_path / "run", as_step=7, overwrite=True)

    @pytest.mark.parametrize("source", ["a run", "a model with its configuration"])
    def test_command_line_refuses_another_step(self, tmp_path, source):
        if source == "a run":
            self.saved(tmp_path / "source", as_step=1)
        else:
            write_llama(tmp_path / "source")
        words = "convert", "to-orbax", tmp_path / "source", tmp_path / "other", "--as-step"
        assert ckpt(*words, 1).exit_code == 0
        done = ckpt(*words, 2, "--overwrite")
        assert done.exit_code == 2 and "--level step" in done.output
        assert [item.name for item in (tmp_path / "other").iterdir()] == ["1"]
