"""Arrays in memory that change between two attempts to save them: no state is mixed with another."""

from __future__ import annotations

import numpy as np
import pytest

import ckpttools
from ckpttools.core.errors import CheckpointError
from ckpttools.run.events import TaskDone


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
def test_what_was_saved_of_another_state_does_not_count(tmp_path, monkeypatch, rows):
    monkeypatch.setattr("ckpttools.run.executor._SYNC_SECONDS", 0.001)
    state = {f"w{at:02d}": np.full((rows, 128), at, np.float32) for at in range(12)}
    prepared = ckpttools.save.plan(state, tmp_path / "out", "zarr3", jobs=1)
    with pytest.raises(StopError):
        prepared.run(stopping(after=6))
    for array in state.values():
        array[:] = 1000
    try:
        prepared.run()
    except CheckpointError as error:
        assert "partial" in str(error)
        assert not (tmp_path / "out").exists()
        prepared = ckpttools.save.plan(state, tmp_path / "out", "zarr3", jobs=1, overwrite=True)
        prepared.run()
    found = ckpttools.open(tmp_path / "out")
    assert all((np.asarray(found[name]) == 1000).all() for name in state)


def test_what_is_the_same_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpttools.run.executor._SYNC_SECONDS", 0.001)
    state = {f"w{at:02d}": np.full((64, 128), at, np.float32) for at in range(12)}
    prepared = ckpttools.save.plan(state, tmp_path / "out", "zarr3", jobs=1)
    with pytest.raises(StopError):
        prepared.run(stopping(after=6))
    assert prepared.run().tasks_resumed >= 5
