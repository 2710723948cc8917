"""Changes by other programs between a crash and the next command are not lost, adopted or trusted."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.locations import TESTS

from crash.crashes import crashes
from crash.disk import lay_out
from crash.scenarios import LOCATION, MODEL, OTHER, SCENARIOS
from crash.verdict import WrongError, contents, spoken

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
_NEW = _BY_NAME["hf-to-maxtext"]
_OVER = _BY_NAME["hf-to-maxtext-overwrite"]
_OVER_TWO_RENAMES = _BY_NAME["hf-to-maxtext-overwrite-no-exchange"]
_MARK, _JOURNAL = ".ckpttools-plan", "journal.ckpttools"
_REFUSED, _MADE = "refused", "made"


class Left:
    """The files of a recorded run at some moment."""

    def __init__(self, case, moment):
        self.case, self.destination = case, case.destination
        self.partial = case.destination.with_name(f"{case.destination.name}.partial")
        calls = case.recorded.notes.calls
        names = [f"{call.name} {Path(call.path).name}" for call in calls]
        named = next(n for n, name in enumerate(names) if name in ("rename content", "exchange content"))
        count = {
            "halfway": named // 2,
            # What follows is two calls to note in the journal that it gets its name.
            "synced": named - 2,
            "complete": named,
            "named": named + 1,
        }[moment]
        states = crashes(case.disk, case.moments, "", 0)
        # States that no call changed are listed once, as the first of them.
        kills = [crash for crash in states if crash.calls is not None and crash.calls <= count]
        lay_out(case.disk.state(kills[-1].steps), case.runner.root, LOCATION)

    def run(self, model, *, overwrite=False):
        """Run the command again, or that of another model, and return whether it was refused, and how."""
        scenario = self.case.scenario
        args = scenario.args(self.case.runner.root, model)
        extra = ("--overwrite",) if overwrite and not scenario.replaces else ()
        ended = self.case.runner.run(*args, *extra, exchange=scenario.exchange)
        spoken(ended, 0, 2)
        self.case.foreign()
        if ended.code == 0:
            self.case.tidy(self.case.whole(model))
            return _MADE, ended.err
        if "  hint " not in ended.err:
            raise WrongError(f"{ended}\nwanted: a next step")
        return _REFUSED, ended.err


@pytest.fixture
def left(cases):
    def built(scenario, moment):
        return Left(cases(scenario), moment)

    return built


def unchanged(directory, run):
    """Call a function that must not change a directory, and return its result."""
    before = contents(directory)
    result = run()
    assert contents(directory) == before
    return result


@pytest.mark.parametrize("moment", ["halfway", "complete"])
def test_leftover_of_another_plan_is_refused(left, moment):
    """The error describes the leftover and how to continue. Following the hint works, and so does
    --overwrite.
    """
    what = left(_NEW, moment)
    how, words = unchanged(what.partial, lambda: what.run(OTHER))
    root = what.case.runner.root
    begun = " ".join(_NEW.args(root, MODEL)).replace(" --no-progress", "")
    assert how == _REFUSED and "contains the beginning of another conversion" in words
    assert f"the conversion of {root}/src/hf-a, by `ckpt {begun}`" in words
    assert f"to resume it, run in {TESTS}: ckpt {begun}; otherwise delete {what.partial}" in words
    assert what.run(MODEL)[0] == _MADE
    what = left(_NEW, moment)
    assert what.run(OTHER, overwrite=True)[0] == _MADE
    # With another option it is another plan of the same source.
    what = left(_NEW, moment)
    other = replace(_NEW, options="--compression zstd")
    ended = other.run(what.case.runner)
    assert ended.code == 2 and "another conversion" in ended.err and "--compression zstd" in ended.err


def test_same_command_with_changed_source_is_explained(left):
    what = left(_NEW, "halfway")
    source = what.case.runner.root / "src" / "hf-a" / "model.safetensors"
    time = source.stat().st_mtime_ns
    os.utime(source, ns=(time, time + 1))
    how, words = unchanged(what.partial, lambda: what.run(MODEL))
    os.utime(source, ns=(time, time))
    assert how == _REFUSED and "the same command, started before its source changed" in words
    assert what.run(MODEL)[0] == _MADE


@pytest.mark.parametrize("moment", ["halfway", "synced"])
def test_unmarked_content_is_not_adopted(left, moment):
    what = left(_NEW, moment)
    (what.partial / "content" / _MARK).unlink()
    for model in (MODEL, OTHER):
        for overwrite in (False, True):
            how, words = unchanged(what.partial, lambda m=model, o=overwrite: what.run(m, overwrite=o))
            assert how == _REFUSED and str(what.partial / "content") in words
    shutil.rmtree(what.partial / "content")
    assert what.run(MODEL)[0] == _MADE


@pytest.mark.parametrize("scenario", [_NEW, _OVER], ids=lambda item: item.name)
def test_content_without_a_journal_is_refused(left, scenario):
    what = left(scenario, "complete")
    (what.partial / _JOURNAL).unlink()
    for model in (MODEL, OTHER):
        how, words = unchanged(what.partial, lambda m=model: what.run(m, overwrite=True))
        assert how == _REFUSED and "has no journal of ckpttools" in words
    shutil.rmtree(what.partial)
    assert what.run(MODEL)[0] == _MADE


@pytest.mark.parametrize("moment", ["halfway", "complete"])
def test_journal_without_content_restarts(left, moment):
    for model in (MODEL, OTHER):
        what = left(_NEW, moment)
        shutil.rmtree(what.partial / "content")
        assert what.run(model)[0] == _MADE


@pytest.mark.parametrize("scenario", [_NEW, _OVER, _OVER_TWO_RENAMES], ids=lambda item: item.name)
def test_destination_marked_by_another_plan_is_kept(left, scenario):
    """The mark may be from a crash or from a copy."""
    for journal in (True, False):
        what = left(scenario, "named")
        if not journal:
            shutil.rmtree(what.partial)
        if not scenario.replaces:
            how, words = unchanged(what.destination, lambda w=what: w.run(OTHER))
            assert how == _REFUSED and "exists" in words
        assert what.run(OTHER, overwrite=True)[0] == _MADE


@pytest.mark.parametrize("scenario", [_NEW, _OVER, _OVER_TWO_RENAMES], ids=lambda item: item.name)
def test_removed_destination_is_rebuilt(left, scenario):
    for model in (MODEL, OTHER):
        what = left(scenario, "named")
        shutil.rmtree(what.destination)
        assert what.run(model)[0] == _MADE


def _replace(file):
    file.with_name("new").write_bytes(file.read_bytes())
    file.with_name("new").replace(file)


CHANGES = {
    "replaced": _replace,
    "written into": lambda file: file.write_text(file.read_text() + "\n"),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("scenario", [_NEW, _OVER, _OVER_TWO_RENAMES], ids=lambda item: item.name)
def test_unmarked_destination_is_checked(left, scenario):
    """A replaced checkpoint stays. Without one, the files show whether the journal belongs to them."""
    what = left(scenario, "named")
    (what.destination / _MARK).unlink()
    for model in (OTHER,) if scenario is _NEW else (MODEL, OTHER):
        how, words = unchanged(what.destination.parent, lambda m=model: what.run(m))
        assert how == _REFUSED
        assert (
            "exists" if scenario is _NEW else "is the checkpoint that a conversion wanted to replace"
        ) in words
    if scenario is _NEW:
        assert what.run(MODEL)[0] == _MADE


@pytest.mark.parametrize("change", [*CHANGES, "the journal"])
def test_changed_unmarked_destination_is_kept(left, change):
    what = left(_NEW, "named")
    (what.destination / _MARK).unlink()
    if change == "the journal":
        journal = what.partial / _JOURNAL
        journal.write_bytes(journal.read_bytes().replace(b'["file",', b'["fine",', 1))
    else:
        CHANGES[change](what.destination / "0" / "items" / "hf" / "config.json")
    how, words = unchanged(what.destination.parent, lambda: what.run(MODEL))
    assert how == _REFUSED and "exists" in words
    assert what.run(MODEL, overwrite=True)[0] == _MADE


@pytest.mark.parametrize("scenario", [_NEW, _OVER, _OVER_TWO_RENAMES], ids=lambda item: item.name)
@pytest.mark.parametrize("change", CHANGES)
def test_manually_edited_conversion_is_not_reported_as_done(left, scenario, change):
    """The run is killed after the checkpoint has its name, and then the checkpoint is edited."""
    what = left(scenario, "named")
    CHANGES[change](what.destination / "0" / "items" / "hf" / "config.json")
    if not scenario.replaces:
        how, words = unchanged(what.destination.parent, lambda: what.run(MODEL))
        assert how == _REFUSED and "has changed since an interrupted conversion published it" in words
        assert str(what.destination / "0" / "items" / "hf" / "config.json") in words
    assert what.run(MODEL, overwrite=True)[0] == _MADE


def test_journal_without_inventory_is_not_complete(left):
    what = left(_NEW, "named")
    journal = what.destination.with_name(f"{what.destination.name}.partial") / "journal.ckpttools"
    data = journal.read_bytes()
    assert data.count(b'["file",') > 1
    journal.write_bytes(data.replace(b'["file",', b'["fine",', 1))
    how, words = unchanged(what.destination.parent, lambda: what.run(MODEL))
    assert how == _REFUSED and "it is unknown whether" in words
    assert what.run(MODEL, overwrite=True)[0] == _MADE


def test_manually_added_file_is_kept(left):
    what = left(_NEW, "named")
    (what.destination / "README.md").write_text("mine")
    args = _NEW.args(what.case.runner.root, MODEL)
    ended = what.case.runner.run(*args)
    assert ended.code == 0 and (what.destination / "README.md").read_text() == "mine"
    assert not what.partial.exists()
