"""If any call fails, DST is complete or unchanged, the exit code is right, and the command resumes later."""

import errno

import pytest
from support.internals import PLAN_MARK

from crash.crashes import crashes, of_a_later_process
from crash.disk import Disk, lay_out
from crash.effort import ALL, sample_and_last, some
from crash.handlers import SYNCS, Fault
from crash.scenarios import LOCATION, MODEL, SCENARIOS, SOURCES
from crash.verdict import WrongError, spoken

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES)


def faults(counts):
    """Yield a fault for each call and error, half of them permanent."""
    return [
        Fault(name, number, code, lasting=(number + location) % 2 == 0)
        for name, count in sorted(counts.items())
        for number in range(1, count + 1)
        for location, code in enumerate(CODES)
    ]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda item: item.name)
def test_every_failing_call_is_survived(cases, scenario):
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


@pytest.mark.parametrize("number", [1, 2])
def test_unremovable_probe_stops_the_command_before_writing(cases, number):
    """The probe tests whether a rename can move the old checkpoint. A later run would not remove it."""
    case = cases(next(item for item in SCENARIOS if item.name == "hf-to-maxtext-overwrite"))
    for is_lasting in (True, False):
        case.begin()
        ended = case.scenario.run(case.runner, fault=Fault("rmdir", number, errno.EIO, is_lasting))
        spoken(ended, 5)
        case.whole(case.before)
        assert case.again().code == 0


_LOOKED_AT = 1000 if ALL else 20


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda item: item.name)
def test_power_cut_after_failed_sync_is_survived(cases, scenario):
    """A later sync does not make the data durable, in this process or the next."""
    case = cases(scenario)
    wrong = []
    syncs = [fault for fault in faults(case.recorded.notes.counts) if fault.name in SYNCS]
    for fault in some([fault for fault in syncs if fault.code == errno.EIO], 1, scenario.name):
        case.begin()
        disk = Disk(case.runner.root, (SOURCES,))
        try:
            left = _after_failing(case, disk, fault)
            calls = of_a_later_process(case.again().notes.calls)
            end = disk.state(_looked_at(case, disk, calls)[-1].durable)
            case.whole_in(end, MODEL)
            lay_out(left, case.runner.root, LOCATION)
            case.again()
        except WrongError as error:
            wrong.append(f"{fault}: {error}")
    assert not wrong, f"{len(wrong)} of {scenario.name}\n\n" + "\n\n".join(wrong[:20])


def test_mark_survives_a_failed_sync(cases):
    """If the sync of the mark fails, the next command does not rely on the mark that it reads."""
    case = cases(SCENARIOS[0])
    calls = case.recorded.notes.calls
    handle = next(call.handle for call in calls if call.name == "open" and call.path.endswith(PLAN_MARK))
    syncs = [call.handle for call in calls if call.name == "fsync"]
    case.begin()
    disk = Disk(case.runner.root, (SOURCES,))
    _after_failing(case, disk, Fault("fsync", 1 + syncs.index(handle), errno.EIO))
    ended = case.again()
    named = next(n for n, call in enumerate(ended.notes.calls) if call.other == str(case.destination))
    moments = disk.apply(of_a_later_process(ended.notes.calls))
    # A power cut when the name is durable and nothing after it.
    moment = next(item for item in moments[named + 1 :] if item.steps - 1 in item.durable)
    lay_out(disk.state(moment.durable), case.runner.root, LOCATION)
    assert case.destination.is_dir()
    assert case.again().code == 0


def _after_failing(case, disk, fault):
    """Return the minimal state after a power cut during a run with the fault."""
    ended = case.scenario.run(case.runner, fault=fault)
    return disk.state(_looked_at(case, disk, ended.notes.calls)[-1].durable)


def _looked_at(case, disk, calls):
    """Return the moments of a run after which some crash states were complete."""
    moments = disk.apply(calls)
    result = crashes(disk, moments, case.scenario.name, 1)
    for crash in sample_and_last(result, _LOOKED_AT, case.scenario.name):
        try:
            case.whole_in(disk.state(crash.steps))
        except WrongError as error:
            raise WrongError(f"{crash.text}: {error}") from None
    return moments
