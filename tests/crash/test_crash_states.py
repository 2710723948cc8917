"""Whatever a crash leaves: DST is whole or absent, the same command ends well, another one adopts nothing."""

import pytest

from crash.crashes import crashes
from crash.disk import Disk, lay_out
from crash.effort import ALL, some_and_last
from crash.scenarios import MODEL, OTHER, PLACE, SCENARIOS, SOURCES
from crash.verdict import WrongError, contents

_SAMPLES = 20 if ALL else 2


@pytest.fixture(params=SCENARIOS, ids=lambda each: each.name)
def case(request, cases):
    return cases(request.param)


def test_every_state_after_a_crash(case):
    root, disk = case.runner.root, case.disk
    found = crashes(disk, case.moments, case.scenario.name, _SAMPLES)
    wrong = []
    for crash in some_and_last(found, 4, case.scenario.name):
        state = disk.state(crash.steps)
        for model in (MODEL, OTHER):
            lay_out(state, root, PLACE)
            try:
                case.whole(*case.between, marked=True)
                case.again(model)
            except WrongError as error:
                wrong.append(f"{crash.text}: then the command for {model}: {error}")
    assert not wrong, f"{len(wrong)} of {case.scenario.name}\n\n" + "\n\n".join(wrong[:20])


def test_no_call_escapes_the_model(case):
    """What the recorded calls make of the model is what lies on the disk after them."""
    case.begin()
    disk = Disk(case.runner.root, (SOURCES,))
    disk.apply(case.scenario.run(case.runner).notes.calls)
    lasting = contents(case.runner.root / PLACE)
    lay_out(disk.state(range(len(disk.steps))), case.runner.root, PLACE)
    assert contents(case.runner.root / PLACE) == lasting
