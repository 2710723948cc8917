"""A second crash while the same command resumes after the first one."""

import pytest
from support.internals import PLAN_MARK

from crash.crashes import Crash, crashes, of_a_later_process
from crash.disk import Disk, lay_out
from crash.effort import ALL, sample_and_last
from crash.scenarios import LOCATION, MODEL, OTHER, SCENARIOS, SOURCES
from crash.verdict import WrongError

# Of each scenario: crashes from which the command goes on; of each of these, states that a second crash can
# leave, how many are looked at, and from how many the command is run once more.
_FIRST, _LOOKED_AT, _AGAIN = (20, 2000, 10) if ALL else (2, 30, 1)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda item: item.name)
def test_every_second_crash_state_is_recoverable(cases, scenario):
    case = cases(scenario)
    wrong = []
    for number, crash in enumerate(_firsts(case)):
        try:
            wrong += [f"{crash.text}: then {error}" for error in _wrong_after(case, crash, number)]
        except WrongError as error:
            wrong.append(f"{crash.text}: {error}")
    assert not wrong, f"{len(wrong)} of {scenario.name}\n\n" + "\n\n".join(wrong[:20])


def test_completion_reported_after_kill_is_durable(cases):
    """The run is killed at any moment after the checkpoint has its name."""
    case = cases(SCENARIOS[0])
    calls = case.recorded.notes.calls
    named = next(number for number, call in enumerate(calls) if call.other == str(case.destination))
    for count in range(named + 1, len(calls) + 1):
        disk = _disk_after(case, Crash("", frozenset(), calls=count))
        moments = disk.apply(of_a_later_process(case.again().notes.calls))
        case.whole_in(disk.state(moments[-1].durable), MODEL)


def test_discarded_output_is_marked_before_removal(cases):
    """Partial output is marked and never half removed, even while another command discards it."""
    case = cases(SCENARIOS[0])
    content = f"{LOCATION}/{case.scenario.destination}.partial/content/"
    # As after a power cut: what the first run had not synced yet may be lost without anybody's doing.
    half = case.moments[len(case.moments) // 2]
    disk = _disk_after(case, Crash("", frozenset(range(half.steps))))
    before = _below(content, disk.state(range(len(disk.steps))))
    ended = case.runner.run(*case.scenario.args(case.runner.root, OTHER), "--overwrite")
    assert ended.code == 0, ended
    moments = disk.apply(of_a_later_process(ended.notes.calls))
    lacking = set()
    for crash in crashes(disk, moments, "discarded", 2):
        result = _below(content, disk.state(crash.steps))
        mark = result.get(PLAN_MARK)
        if result and (mark is None or mark == before[PLAN_MARK]):
            lacking |= before.keys() - result.keys()
    assert lacking == set()


def _below(directory, state):
    """Return the part of a state below a directory."""
    return {name.removeprefix(directory): item for name, item in state.items() if name.startswith(directory)}


def test_replaced_output_is_moved_durably_before_rename(cases):
    """The disk model keeps the order of two renames between the same directories, but real disks need not."""
    case = cases(
        next(scenario for scenario in SCENARIOS if scenario.name == "hf-to-maxtext-overwrite-no-exchange")
    )
    calls = case.recorded.notes.calls
    renames = [number for number, call in enumerate(calls) if call.name == "rename"]
    aside = next(number for number in renames if calls[number].path == str(case.destination))
    named = next(number for number in renames if calls[number].other == str(case.destination))
    between = calls[aside + 1 : named]
    synced = {call.handle for call in between if call.name == "fsync"}
    partial = case.destination.with_name(f"{case.destination.name}.partial")
    opened = {call.path for call in between if call.name == "open" and call.handle in synced}
    assert opened >= {str(partial), str(partial.parent)}


def _firsts(case):
    """Return first crashes from all phases of the run, half of them kills and half power cuts."""
    result = crashes(case.disk, case.moments, case.scenario.name, 1)
    kinds = (
        [crash for crash in result if crash.calls is not None],
        [crash for crash in result if crash.least],
    )
    for kind in kinds:
        yield from sample_and_last(kind, max(1, _FIRST // 2), case.scenario.name)


def _wrong_after(case, crash, seed):
    """Return a description of the problem after a second crash."""
    disk = _disk_after(case, crash)
    ended = case.again()
    moments = disk.apply(of_a_later_process(ended.notes.calls))
    result = crashes(disk, moments, f"{case.scenario.name} {seed}", 1)
    for second in sample_and_last(result, _LOOKED_AT, case.scenario.name):
        try:
            case.whole_in(disk.state(second.steps))
        except WrongError as error:
            yield f"{second.text}: {error}"
    try:
        case.whole_in(disk.state(moments[-1].durable), MODEL)
    except WrongError as error:
        yield f"what was said to be done was not durable: {error}"
    for second in sample_and_last(result, _AGAIN, f"again {seed}"):
        lay_out(disk.state(second.steps), case.runner.root, LOCATION)
        try:
            case.again()
        except WrongError as error:
            yield f"{second.text}, and the command once more: {error}"


def _disk_after(case, crash):
    """Create the disk that the next command finds. Unsynced data is visible but not durable after a kill; all
    data is durable after a power cut.
    """
    if crash.calls is None:
        lay_out(case.disk.state(crash.steps), case.runner.root, LOCATION)
        return Disk(case.runner.root, (SOURCES,))
    case.begin()
    disk = Disk(case.runner.root, (SOURCES,))
    disk.apply(case.recorded.notes.calls[: crash.calls])
    lay_out(disk.state(range(len(disk.steps))), case.runner.root, LOCATION)
    return disk
