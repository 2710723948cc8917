"""Whichever call fails: DST is whole or as it was, the exit code tells why, the command goes on later."""

import errno

import pytest

from crash.effort import some
from crash.handlers import Fault
from crash.scenarios import MODEL, SCENARIOS
from crash.verdict import WrongError, spoken

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES)


def faults(counts):
    """Each call with each error; half of them for good, half for once."""
    return [
        Fault(name, number, code, lasting=(number + place) % 2 == 0)
        for name, count in sorted(counts.items())
        for number in range(1, count + 1)
        for place, code in enumerate(CODES)
    ]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_every_failing_call(cases, scenario):
    case = cases(scenario)
    wrong = []
    for fault in some(faults(case.recorded.notes.counts), 3, scenario.name):
        case.begin()
        try:
            ended = scenario.run(case.runner, fault=fault)
            spoken(ended, 0, 4, 5)
            case.foreign()
            if ended.code == 0:
                case.whole(MODEL)
            else:
                case.whole(*case.between, marked=True)
            case.again()
        except WrongError as error:
            wrong.append(f"{fault}: {error}")
    assert not wrong, f"{len(wrong)} of {scenario.name}\n\n" + "\n\n".join(wrong[:20])
