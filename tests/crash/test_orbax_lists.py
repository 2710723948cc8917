"""Orbax's CheckpointManager lists a step only if it is complete, after any crash."""

import pytest

from crash.crashes import crashes
from crash.disk import lay_out
from crash.effort import some
from crash.scenarios import LOCATION, MODEL, SCENARIOS

STEPS = [scenario for scenario in SCENARIOS if scenario.destination == "run/5"]


@pytest.mark.parametrize("scenario", STEPS, ids=lambda item: item.name)
def test_checkpoint_manager_lists_nothing_unfinished(cases, scenario):
    case = cases(scenario)
    listed = set()
    result = crashes(case.disk, case.moments, scenario.name, 2)
    complete = max(result, key=lambda crash: len(crash.steps))
    for crash in (*some(result, 40, scenario.name), complete):
        lay_out(case.disk.state(crash.steps), case.runner.root, LOCATION)
        # DST as a step of a run, and as the run of the step that is written into it.
        for run in (case.destination.parent, case.destination):
            steps = _all_steps(run) if run.is_dir() else ()
            listed.add(bool(steps))
            assert not steps or case.model(marked=True) == MODEL, f"{crash.text}: {run.name} lists {steps}"
    assert listed == {True, False}


def _all_steps(run):
    from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions

    with CheckpointManager(run, options=CheckpointManagerOptions(read_only=True)) as manager:
        assert (manager.latest_step() is None) == (not manager.all_steps())
        return manager.all_steps()
