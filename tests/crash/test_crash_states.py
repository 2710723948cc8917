"""After any crash, DST is complete or absent, the same command succeeds, and other commands adopt nothing."""

import pytest

from crash.crashes import crashes
from crash.disk import lay_out
from crash.effort import ALL, some_and_last
from crash.scenarios import LOCATION, MODEL, OTHER, SCENARIOS
from crash.verdict import WrongError, contents

_SAMPLES = 20 if ALL else 2


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda item: item.name)
def test_every_crash_state_is_recoverable(cases, scenario):
    case = cases(scenario)
    _nothing_escaped(case)
    result = crashes(case.disk, case.moments, scenario.name, _SAMPLES)
    wrong = [f"{crash.text}: {error}" for crash in result for error in _not_whole(case, crash)]
    # In the middle of the run most tasks are entered in the journal, which must not say more than is there.
    least = [crash for crash in result if crash.least]
    # At the end, the journal is in the place of the mark.
    names = (f"{scenario.destination}.partial/journal.ckpttools", f"{scenario.destination}/.ckpttools-plan")
    last = [
        next(crash for crash in reversed(result) if f"{LOCATION}/{name}" in case.disk.state(crash.steps))
        for name in names
    ]
    chosen = (*last, least[len(least) // 2], *some_and_last(result, 4, scenario.name))
    for number, crash in enumerate(chosen):
        state = case.disk.state(crash.steps)
        for model in (MODEL, OTHER) if ALL or number % 2 else (MODEL,):
            lay_out(state, case.runner.root, LOCATION)
            try:
                case.whole(*case.between, marked=True)
                case.again(model)
            except WrongError as error:
                wrong.append(f"{crash.text}: then the command for {model}: {error}")
    assert not wrong, f"{len(wrong)} of {scenario.name}\n\n" + "\n\n".join(wrong[:20])


def _not_whole(case, crash):
    """Return the problem with DST after a crash. All crashes are checked, because this needs no process."""
    try:
        case.whole_in(case.disk.state(crash.steps))
    except WrongError as error:
        yield error


def _nothing_escaped(case):
    """Assert that the recorded calls lead the model to the actual state of the disk."""
    lay_out(case.disk.state(range(len(case.disk.steps))), case.runner.root, LOCATION)
    assert contents(case.runner.root / LOCATION) == case.lasting
