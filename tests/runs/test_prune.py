"""`ckpt prune`: what Orbax's policies keep is kept, and whatever else is needed; nothing is half gone."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, doctor, succeed
from support.internals import LockedError, parse
from support.mounts import on_overlay
from support.object_stores import files_in
from support.pruned_runs import copied, write_run

import ckpttools
from ckpttools import CheckpointError, FormatError, UsageError
from ckpttools.api.prune import PruneReport
from ckpttools.runs import prune
from ckpttools.runs.journal import locked_run
from ckpttools.runs.listing import load_step_metrics
from ckpttools.runs.policy import Best, Keep
from ckpttools.stores.objects import store as objects

RULES = {"keep_last": 2, "keep_every": 3, "keep_best": "reward:1"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def whole(built: Path) -> dict[str, str | None]:
    """Digests of the parameters of some steps."""
    return {name: ckpttools.hash(built / name).parameters for name in ("2", "4", "6")}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("three") / "run", (1, 2, 3))


@pytest.fixture
def run(built: Path, tmp_path: Path) -> Path:
    return copied(built, tmp_path / "run")


def fates(report: PruneReport) -> dict[int, str]:
    return {step.step: step.outcome for step in report.steps}


def steps(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


@st.composite
def settings_of_rules(draw: st.DrawFn) -> tuple[dict[int, dict[str, float] | None], Keep]:
    numbers = draw(st.sets(st.integers(0, 40), min_size=1, max_size=10))
    values = st.one_of(st.none(), st.integers(-3, 3))
    result = {number: draw(values) for number in sorted(numbers)}
    metrics = {number: None if item is None else {"m": float(item)} for number, item in result.items()}
    last = draw(st.one_of(st.none(), st.integers(1, 12)))
    every = draw(st.one_of(st.none(), st.integers(1, 12)))
    best = draw(st.one_of(st.none(), st.builds(Best, st.just("m"), st.integers(1, 6), st.booleans())))
    return metrics, Keep(last, every, best if any(metrics.values()) else None)


@settings(max_examples=25, deadline=None)
@given(settings_of_rules())
def test_keep_rules_match_orbax(given_rules):
    from orbax.checkpoint.checkpoint_managers import (
        AnyPreservationPolicy,
        BestN,
        EveryNSteps,
        LatestN,
        PreservationContext,
    )

    metrics, keep = given_rules
    sign = -1 if keep.best and keep.best.lowest else 1
    policies = [
        *([LatestN(keep.last)] if keep.last else []),
        *([EveryNSteps(keep.every)] if keep.every else []),
        *([BestN(get_metric_fn=lambda m: sign * m["m"], n=keep.best.count)] if keep.best else []),
    ]
    if not policies:
        assert not any(keep.reasons(metrics).values())
        return
    infos = [
        SimpleNamespace(step=n, time=datetime.fromtimestamp(n, UTC), metrics=m) for n, m in metrics.items()
    ]
    expected = AnyPreservationPolicy(policies).should_preserve(infos, context=PreservationContext())
    assert [bool(reason) for reason in keep.reasons(metrics).values()] == expected


class TestBest:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("loss:3", Best("loss", 3, True)),
            ("eval/loss:1", Best("eval/loss", 1, True)),
            ("reward:2", Best("reward", 2, False)),
            ("x:1:min", Best("x", 1, True)),
            ("loss:1:max", Best("loss", 1, False)),
        ],
    )
    def test_best_rule_is_parsed(self, text, expected):
        assert Best.of(text) == expected

    @pytest.mark.parametrize("text", ["loss", "loss:0", ":3", "loss:-1", "loss:2:best", "x:3", "loss_acc:3"])
    def test_invalid_best_rule_is_refused(self, text):
        with pytest.raises(UsageError):
            Best.of(text)

    def test_nan_metric_is_never_best(self):
        metrics = {1: {"loss": 2.0}, 2: {"loss": float("nan")}, 3: {"loss": 1.0}}
        reasons = Keep(best=Best.of("loss:2")).reasons(metrics)
        assert [bool(reason) for reason in reasons.values()] == [True, False, True]

    def test_prune_refuses_metrics_with_only_nan(self):
        metrics = {1: {"loss": float("nan")}, 2: {"loss": float("nan")}}
        with pytest.raises(UsageError, match="no step is the best by 'loss'"):
            Keep(best=Best.of("loss:1")).reasons(metrics)

    def test_integer_metric_beyond_floats_is_infinite(self, tmp_path):
        (tmp_path / "metrics").mkdir()
        (tmp_path / "metrics" / "metrics").write_text(f'{{"loss": -1{"0" * 400}}}')
        assert load_step_metrics(parse(tmp_path)) == {"loss": -math.inf}

    def test_unknown_metric_is_refused(self, run):
        with pytest.raises(UsageError, match="no step has a metric 'los'") as caught:
            ckpttools.prune.plan(run, keep_best="los:1:min")
        assert "loss" in str(caught.value)


def test_prune_deletes_the_planned_steps(run, built):
    plan = ckpttools.prune.plan(run, **RULES)
    # The rewards of 2 and 5 are the same: of these the later one is kept.
    expected = {1: "deleted", 2: "deleted", 3: "kept", 4: "deleted", 5: "kept", 6: "kept"}
    assert fates(plan.report) == expected
    before = files_in(run)
    succeed("prune", run, "--keep-last", 2, "--keep-every", 3)
    assert files_in(run) == before
    report = plan.run()
    kept = {str(step) for step, fate in fates(report).items() if fate == "kept"}
    assert steps(run) == kept
    assert files_in(run) == {name: item for name, item in before.items() if name.partition("/")[0] in kept}
    assert report.is_done and report.freed_bytes == sum(item.freed_bytes for item in report.steps) > 0
    assert fates(ckpttools.prune(run, **RULES)) == dict.fromkeys(map(int, sorted(kept)), "kept")


def test_last_finished_step_is_always_kept(run):
    (run / "6" / "items" / "_METADATA").unlink()  # damaged: of 1 to 5 the last is 5
    report = ckpttools.prune(run, keep_every=100)
    assert {step for step, fate in fates(report).items() if fate != "deleted"} == {5, 6}
    assert steps(run) == {"5", "6"}


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_prune_deletes_only_planned_files(tmp_path_factory, built, data):
    """Whatever lies in a run, what is deleted is what was said, and never the last whole step."""
    run = copied(built, tmp_path_factory.mktemp("any") / "run")
    for step in range(1, 7):
        spoil(run, str(step), data.draw(st.sampled_from(["", "", "", *SPOILED])))
    before = files_in(run)
    rules = data.draw(
        st.fixed_dictionaries({}, optional={"keep_last": st.integers(1, 3), "keep_every": st.integers(2, 4)})
    )
    try:
        report = ckpttools.prune(run, **(rules or {"keep_last": 1}))
    except CheckpointError:
        assert files_in(run) == before
        return
    gone = {str(step) for step, fate in fates(report).items() if fate == "deleted"}
    assert files_in(run) == {
        name: item for name, item in before.items() if name.partition("/")[0] not in gone
    }
    whole = [step for step in range(1, 7) if str(step) not in gone]
    assert ckpttools.ls(run).finished and whole


SPOILED = ("uncommitted", "note", "directory", "record", "bad record", "tmp", "lost", "index")


def spoil(run: Path, name: str, how: str) -> None:
    step = run / name
    match how:
        case "uncommitted":
            (step / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}')
        case "note":
            (step / "note.txt").write_text("mine")
        case "directory":
            (step / "mine").mkdir()
            (step / "mine" / "x").write_text("x")
        case "record":
            record = {"operation_id": "0" * 32, "checkpointable_name": "metrics", "destination": None}
            (step / "_CHECKPOINT_DELETION").write_text(json.dumps(record))
        case "bad record":
            (step / "_CHECKPOINT_DELETION").write_text("{")
        case "tmp":
            step.rename(run / f"{name}.orbax-checkpoint-tmp")
        case "lost":
            (step / "items" / "_METADATA").unlink()
        case "index":
            (step / "items" / "manifest.ocdbt").write_bytes(b"x")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("note", "not part of a checkpoint: note.txt"),
        ("directory", "not part of a checkpoint: mine"),
        ("record", "Orbax is deleting its item metrics"),
        ("uncommitted", "commit timestamp null"),
        ("index", "cannot be read"),
    ],
)
def test_unreadable_steps_are_left_alone(run, how, why):
    spoil(run, "1", how)
    report = ckpttools.prune(run, keep_last=1)
    assert fates(report)[1] == "left alone"
    assert why in report.steps[0].reason
    assert steps(run) == {"1", "6"}


def test_link_targets_are_kept(run, tmp_path):
    (tmp_path / "latest").symlink_to(run / "2")
    (run / "3" / "items" / "self").symlink_to(run / "3" / "items" / "_METADATA")
    other = tmp_path / "other" / "checkpoints" / "9"
    other.mkdir(parents=True)
    (other / "items").symlink_to(run / "4" / "items")
    shutil.copytree(run / "5", tmp_path / "elsewhere")
    shutil.rmtree(run / "5")
    (run / "5").symlink_to(tmp_path / "elsewhere")
    report = ckpttools.prune(run, keep_last=1)
    assert steps(run) == {"2", "3", "4", "5", "6"}
    why = {step.step: step.reason for step in report.steps}
    assert "links lead into it" in why[2] and "links lead into it" in why[4]
    assert "self" in why[3] and "it is a link to" in why[5]


def test_deep_links_in_the_run_are_found(run, monkeypatch):
    monkeypatch.setattr(prune, "MAX_LINKS_NEARBY", 1)
    deep = run / "zzz" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "best").symlink_to(run / "2")
    report = ckpttools.prune(run, keep_last=1)
    assert fates(report)[2] == "left alone" and steps(run) == {"2", "6", "zzz"}


def test_hard_linked_files_survive(run, tmp_path):
    ckpttools.convert(run / "1", tmp_path / "shared", format="orbax", reference=True)
    before = ckpttools.hash(tmp_path / "shared").digest
    report = ckpttools.prune(run, keep_last=1)
    assert not (run / "1").exists()
    assert report.steps[0].freed_bytes <= report.steps[1].freed_bytes
    assert ckpttools.hash(tmp_path / "shared").digest == before


class TestConcurrentChanges:
    """Other prunes of the run, and a training that goes on."""

    @pytest.mark.parametrize("how", [{"keep_last": 1}, {"finish": True}])
    def test_concurrent_prune_is_refused(self, run, how):
        plan = ckpttools.prune.plan(run, keep_last=2)
        if "finish" in how:
            (run / ".ckpttools-prune").mkdir()
        with (
            locked_run(parse(run)),
            pytest.raises(LockedError, match="another process prunes this run") as raised,
        ):
            ckpttools.prune(run, **how)
        assert f"process {os.getpid()} on" in raised.value.got and f"kill {os.getpid()}" in raised.value.hint
        assert steps(run) >= {"1", "6"}
        if "finish" not in how:
            assert plan.run().is_done and steps(run) == {"5", "6"}

    def test_concurrent_prune_in_a_bucket_is_refused(self, gcs, built):
        location = gcs.filled({name: b for name, b in files_in(built).items() if name[0] in "56"})
        with (
            locked_run(parse(location)),
            pytest.raises(LockedError, match="another process prunes this run") as raised,
        ):
            ckpttools.prune(location, keep_last=1)
        assert re.search(r"last seen \d seconds? ago", raised.value.got)
        assert f"gcloud storage rm '{location}/.ckpttools-lock'" in raised.value.hint
        assert ckpttools.prune(location, keep_last=1).is_done
        assert [step.step for step in ckpttools.ls(location).steps] == [6]
        assert not ckpttools.ls(location).other_entries

    def test_outdated_plan_deletes_nothing(self, run):
        plan = ckpttools.prune.plan(run, keep_last=2)
        ckpttools.prune(run, keep_last=1)
        with pytest.raises(FormatError, match="no longer complete"):
            plan.run()
        assert steps(run) == {"6"}

    def test_steps_saved_after_planning_are_kept(self, run):
        plan = ckpttools.prune.plan(run, keep_last=2)
        shutil.copytree(run / "6", run / "7.orbax-checkpoint-tmp")
        shutil.rmtree(run / "1")
        shutil.copytree(run / "2", run / "1")
        (run / "1" / "metrics" / "metrics").write_text('{"loss": 0}')
        report = plan.run()
        assert report.unchanged_steps == ("1: it was saved again in the meantime",)
        assert steps(run) == {"1", "5", "6", "7.orbax-checkpoint-tmp"}
        (run / "7.orbax-checkpoint-tmp").rename(run / "7")
        assert fates(ckpttools.prune(run, keep_last=1)) == {
            1: "deleted", 5: "deleted", 6: "deleted", 7: "kept"
        }  # fmt: skip


class TestStripping:
    @pytest.mark.parametrize("copy", [False, True])
    def test_strip_older_removes_only_the_optimizer(self, run, copy):
        parameters = {step: ckpttools.hash(run / str(step)).parameters for step in range(1, 7)}
        report = ckpttools.prune(run, keep_last=1, keep_every=2, strip_older=True, copy=copy)
        assert fates(report) == {
            1: "deleted", 2: "stripped", 3: "deleted", 4: "stripped", 5: "deleted", 6: "kept"
        }  # fmt: skip
        assert steps(run) == {"2", "4", "6"}
        for step in (2, 4):
            tree = ckpttools.open(run, step=step)
            assert not [path for path in tree.arrays if path[0] == "opt_state"]
            assert ckpttools.hash(run / str(step)).parameters == parameters[step]
            assert json.loads((run / str(step) / "metrics" / "metrics").read_text())["loss"] == 1 / step
            assert doctor(run / str(step)).findings == ()
        listing = ckpttools.ls(run)
        assert [dict(item.metrics or {})["loss"] for item in listing.steps] == [1 / 2, 1 / 4, 1 / 6]
        again = ckpttools.prune(run, keep_last=1, keep_every=2, strip_older=True)
        assert set(fates(again).values()) == {"kept"}

    def test_unstrippable_step_is_kept_complete(self, run):
        shutil.copytree(run / "2" / "items", run / "2" / "ema")
        before = files_in(run / "2")
        report = ckpttools.prune(run, keep_last=1, keep_every=2, strip_older=True)
        assert files_in(run / "2") == before
        assert fates(report)[2] == "kept"


class TestInterrupted:
    def begin(self, run: Path, monkeypatch: pytest.MonkeyPatch, after: int, **more: object) -> None:
        """Prunes until so many names have changed."""
        from ckpttools.stores.local.store import LocalStore

        left = [after]
        real = {"rename": LocalStore.rename, "remove": LocalStore.remove}

        def counted(name: str):
            def call(store: LocalStore, *keys: str) -> None:
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                real[name](store, *keys)

            return call

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(LocalStore, name, counted(name))
            with pytest.raises(KeyboardInterrupt):
                ckpttools.prune(run, **({"keep_last": 2} | more))

    @pytest.mark.parametrize("after", range(1, 9))
    def test_interrupted_prune_is_finished(self, run, monkeypatch, after):
        self.begin(run, monkeypatch, after)
        with pytest.raises(UsageError, match="was interrupted"):
            ckpttools.prune(run, keep_last=1)
        report = ckpttools.prune(run, finish=True)
        assert report.is_done and not report.unchanged_steps
        assert steps(run) == {"5", "6"}

    @pytest.mark.parametrize("after", range(1, 9))
    def test_interrupted_prune_is_undone(self, run, built, monkeypatch, after):
        self.begin(run, monkeypatch, after)
        report = ckpttools.prune(run, undo=True)
        lost = {item.partition(":")[0] for item in report.unchanged_steps}
        assert {"5", "6"} <= steps(run) and not (run / ".ckpttools-prune").exists()
        for name in steps(run):
            assert files_in(run / name) == files_in(built / name)
        if after <= 5:  # names of the four steps, before anything was deleted
            assert steps(run) == {str(step) for step in range(1, 7)} and not lost

    @pytest.mark.parametrize("after", range(1, 13))
    @pytest.mark.parametrize("undo", [False, True])
    def test_interrupted_strip_is_finished_or_undone(self, run, built, whole, monkeypatch, after, undo):
        self.begin(run, monkeypatch, after, keep_last=1, keep_every=2, strip_older=True)
        report = ckpttools.prune(run, finish=not undo, undo=undo)
        assert {"2", "4", "6"} <= steps(run)
        if undo:
            changed = {name for name in ("2", "4") if files_in(run / name) != files_in(built / name)}
            assert {
                item.partition(":")[0] for item in report.unchanged_steps if "optimizer" in item
            } == changed
        for name, digest in whole.items():
            assert ckpttools.hash(run / name).parameters == digest
        assert files_in(run / "6") == files_in(built / "6")

    def test_step_saved_again_meanwhile_is_kept(self, run, monkeypatch):
        self.begin(run, monkeypatch, 3)
        again = next(step for step in ("4", "3", "2", "1") if (run / step).exists())
        (run / again / "metrics" / "metrics").write_text('{"loss": 0}')
        report = ckpttools.prune(run, finish=True)
        assert again in steps(run) and "saved again" in report.unchanged_steps[0]

    def test_prune_stops_when_kept_step_disappears(self, run, monkeypatch):
        self.begin(run, monkeypatch, 2)
        shutil.rmtree(run / "6")
        before = files_in(run)
        with pytest.raises(FormatError, match="no longer complete"):
            ckpttools.prune(run, finish=True)
        assert files_in(run) == before
        ckpttools.prune(run, undo=True)
        assert steps(run) == {"1", "2", "3", "4", "5"}

    def test_incomplete_journal_means_nothing_was_deleted(self, run):
        (run / ".ckpttools-prune").mkdir()
        (run / ".ckpttools-prune" / "plan.json").write_text('{"del')
        before = steps(run) - {".ckpttools-prune"}
        report = ckpttools.prune(run, finish=True)
        assert steps(run) == before and "it had changed nothing" in report.unchanged_steps[0]


class TestOverlayLowerLayers:
    """A directory of a lower layer cannot be renamed, so nothing there can leave its name in one step."""

    def test_prune_refuses_before_it_changes_anything(self, run):
        look = ("sh", f"cd {run} && find . | sort | md5sum")
        rules = [
            ("--keep-last", 1),
            ("--keep-last", 2),
            ("--keep-every", 3),
            ("--keep-last", 1, "--keep-best", "reward:1"),
            ("--keep-last", 3, "--strip-older"),
            ("--keep-last", 3, "--strip-older", "--copy"),
        ]
        commands = [("prune", run, *rule, "--yes") for rule in rules]
        (_, before), *ended, (_, after) = on_overlay(
            run, look, *commands, ("doctor", run), ("prune", run, "--keep-last", 1), look
        )
        for (code, output), words in zip(ended[:-2], commands, strict=True):
            assert code == 5, (words, output)
            assert "the file system cannot rename" in output and "lower layer of an overlay" in output
            assert "copy the run to a volume" in output
        assert [code for code, _ in ended[-2:]] == [0, 0]
        assert before == after

    def test_command_in_hint_works(self, run):
        prune = ("prune", run, "--keep-last", 1, "--yes")
        ((_, refused),) = on_overlay(run.parent, prune)
        command = "cp -a" + refused.partition("layer: cp -a")[2]
        shutil.rmtree(run.parent.with_name(run.parent.name + ".layers"))
        *ended, (_, left) = on_overlay(run.parent, prune, ("sh", command), prune, ("sh", f"ls -A {run}"))
        assert [code for code, _ in ended] == [5, 0, 0], ended
        assert left.split() == ["6"]

    def test_prune_deletes_steps_of_the_upper_layer(self, run):
        code, output = on_overlay(
            run,
            ("sh", f"cp -r {run}/1 {run}/90 && cp -r {run}/1 {run}/91 && rm -r {run}/[1-8]"),
            ("prune", run, "--keep-last", 1, "--yes"),
        )[1]
        assert code == 0, output

    @pytest.mark.parametrize("is_lower", [True, False])
    def test_overwrite_refuses_before_it_writes(self, built, tmp_path, is_lower):
        location = tmp_path / "place"
        location.mkdir()
        outputs = {"to-orbax": location / "orbax", "to-safetensors": location / "flat"}
        for kind, out in outputs.items():
            succeed("convert", kind, built / "6", out)
        look = ("sh", f"cd {location} && find . | sort | md5sum")
        upper = "cp -r orbax a && rm -r orbax && mv a orbax; cp -r flat b && rm -r flat && mv b flat"
        first = () if is_lower else (("sh", f"cd {location} && {upper}"),)
        commands = [("convert", kind, built / "5", out, "--overwrite") for kind, out in outputs.items()]
        *_, (_, before), to_orbax, to_flat, (_, after) = on_overlay(location, *first, look, *commands, look)
        for code, output in (to_orbax, to_flat):
            assert code == (5 if is_lower else 0), output
            assert ("delete the old checkpoint first: rm -r" in output) is is_lower, output
        assert (before == after) is is_lower


def test_doctor_reports_interrupted_prune(run, monkeypatch):
    TestInterrupted().begin(run, monkeypatch, 2)
    result = ckpt("doctor", run)
    assert "an interrupted prune" in result.output
    assert "--yes --undo" in " ".join(result.output.split())
    (command,) = [
        load["command"]
        for load in json.loads(ckpt("doctor", run, "--json").output)["findings"]
        if load["check"] == "leftovers"
    ]
    succeed(*command.split()[1:])
    assert "prune" not in ckpt("doctor", run).output


class TestBuckets:
    def test_steps_with_the_same_prefix_are_kept(self, cloud, built):
        files = files_in(built)
        extra = {name.replace("1/", "10/", 1): item for name, item in files.items() if name.startswith("1/")}
        location = cloud.filled(files | extra)
        report = ckpttools.prune(location, keep_every=10)
        assert fates(report) == {**dict.fromkeys(range(1, 7), "deleted"), 10: "kept"}
        assert [step.step for step in ckpttools.ls(location).steps] == [10]
        assert not (location / ".ckpttools-prune").exists()

    def test_stripping_is_refused_in_a_bucket(self, gcs, built):
        with pytest.raises(UsageError, match="objects cannot be renamed"):
            ckpttools.prune.plan(gcs.filled(files_in(built)), keep_last=1, strip_older=True)

    @pytest.mark.parametrize("undo", [False, True])
    def test_prune_in_a_bucket_resumes_after_a_kill_at_any_request(self, gcs, tmp_path, monkeypatch, undo):
        """Kept steps are whole after each, and what is listed is; then it is finished or undone."""
        whole = files_in(write_run(tmp_path / "run", range(1, 4)))
        after, ended, begun = 0, False, 0
        while not ended:
            location = gcs.filled(whole)
            ended = not killed(location, monkeypatch, after)
            present = objects_at(location)
            for step in range(1, 4):
                below = {name for name in present if name.startswith(f"{step}/")}
                every = {name for name in whole if name.startswith(f"{step}/")}
                if step == 3 or f"{step}/commit_success.txt" in below:
                    assert below == every, (after, step)
            if ".ckpttools-prune/plan.json" in present:
                begun += 1
                report = ckpttools.prune(location, finish=not undo, undo=undo)
                gone = {item.partition(":")[0] for item in report.unchanged_steps} if undo else set("12")
                left = {name for name in whole if name.partition("/")[0] not in gone}
                assert objects_at(location) == left, after
            after += 1 if after < 5 else 6
        assert begun > 5

    @pytest.mark.parametrize("undo", [False, True])
    def test_step_saved_again_during_deletion_is_kept(self, gcs, tmp_path, monkeypatch, undo):
        whole = files_in(write_run(tmp_path / "run", range(1, 4)))
        location = gcs.filled(whole)
        # The journal, two commit files, what says that the first step goes, and one object of it.
        assert killed(location, monkeypatch, 5)
        assert ".ckpttools-prune/deleting/1" in objects_at(location)
        again = {name: b"again" for name in whole if name.startswith("1/")}
        for name, content in again.items():
            (location / name).put(content)
        report = ckpttools.prune(location, finish=not undo, undo=undo)
        assert any(item.startswith("1: ") for item in report.unchanged_steps)
        assert {name for name in objects_at(location) if name.startswith("1/")} == again.keys()
        assert (location / "1/items/_METADATA").read_bytes() == b"again"

    @pytest.mark.parametrize("undo", [False, True])
    def test_prune_keeps_a_step_that_was_saved_again_with_the_same_bytes(
        self, cloud, tmp_path, monkeypatch, undo
    ):
        """S3 gives it the same ETags."""
        whole = files_in(write_run(tmp_path / "run", range(1, 4)))
        location = cloud.filled(whole)
        for name in whole:
            cloud.age(f"{location.key.partition('/')[2]}/{name}", 10)
        assert killed(location, monkeypatch, 2)
        assert ".ckpttools-prune/plan.json" in objects_at(location)
        first = [name for name in whole if name.startswith("1/")]
        for name in first:
            location.store.remove((location / name).key)
            (location / name).put(whole[name])
        report = ckpttools.prune(location, finish=not undo, undo=undo)
        assert {name for name in objects_at(location) if name.startswith("1/")} == {*first}
        assert undo or report.unchanged_steps == ("1: it was saved again in the meantime",)
        assert undo or not any(name.startswith("2/") for name in objects_at(location))

    @pytest.mark.parametrize("marker", [None, b""])
    @pytest.mark.parametrize("undo", [False, True])
    def test_step_saved_again_without_commit_files_is_kept(self, gcs, tmp_path, monkeypatch, undo, marker):
        """An empty marker is one of an earlier version: then the times of the files decide."""
        whole = files_in(write_run(tmp_path / "run", range(1, 4), commits=False))
        location = gcs.filled(whole)
        after = 0
        while ".ckpttools-prune/deleting/1" not in objects_at(location):
            after += 1
            location = gcs.filled(whole)
            assert killed(location, monkeypatch, after)
        # Also some objects of the step are gone.
        location = gcs.filled(whole)
        assert killed(location, monkeypatch, after + 2)
        if marker is not None:
            key = location / ".ckpttools-prune/deleting/1"
            location.store.remove(key.key)
            key.put(marker)
            time.sleep(1.01)  # times have seconds
        assert [item.name for item in ckpttools.ls(location).finished] == ["2", "3"]
        again = {name: content for name, content in whole.items() if name.startswith("1/")}
        for name, content in again.items():
            location.store.remove((location / name).key)
            (location / name).put(content)
        objects_at(location)
        assert [item.name for item in ckpttools.ls(location).finished] == ["1", "2", "3"]
        report = ckpttools.prune(location, finish=not undo, undo=undo)
        assert any(item.startswith("1: ") for item in report.unchanged_steps)
        assert {name for name in objects_at(location) if name.startswith("1/")} == again.keys()
        assert "1" in [item.name for item in ckpttools.ls(location).finished]


@pytest.mark.parametrize(
    ("moment", "is_whole"),
    [
        ("DELETE /.*/1/commit_success.txt", True),
        ("PUT /.*/deleting/1", True),
        ("DELETE /.*/2/items/d/", False),
    ],
)
def test_step_saved_again_while_others_are_deleted_is_kept(gcs, tmp_path, monkeypatch, moment, is_whole):
    """A trainer goes back to step 1 and saves step 2 again, while a prune deletes both."""
    whole = files_in(write_run(tmp_path / "run", range(1, 4)))
    location, take, left = gcs.filled(whole), gcs.server.fault, [moment]

    def save_again(request):
        if left and re.match(left[0], request):
            left.clear()
            objects, key = gcs.server.buckets[gcs.bucket], location.key.partition("/")[2]
            for name in [name for name in objects if name.startswith(f"{key}/2/")]:
                del objects[name]
            for name in (name for name in whole if name.startswith("2/")):
                gcs.server.put(gcs.bucket, f"{key}/{name}", whole[name])
        return take(request)

    monkeypatch.setattr(gcs.server, "fault", save_again)
    (report,) = ckpttools.prune(location, keep_last=1).unchanged_steps
    assert not left
    assert ("may lack files" in report) != is_whole and report.startswith("2: it was ")
    there = objects_at(location)
    expected = {name for name in whole if name.startswith(("2/", "3/"))}
    assert there == expected if is_whole else there < expected


class TestReportsAfterKill:
    """`ls`, `doctor` and `inspect` agree on what is complete, whenever a prune was killed.

    One real prune shows all states: what the store holds before each change is what a kill there leaves.
    """

    @pytest.mark.parametrize(("scheme", "every"), [("gs", 1), ("s3", 25)])
    def test_killed_prune_in_a_bucket_is_reported_correctly(self, gcs, three, monkeypatch, scheme, every):
        monkeypatch.setenv("AWS_ENDPOINT_URL", gcs.server.url)
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        run = gcs.filled(files_in(three))
        states, take = [], gcs.server.fault

        def kept(request):
            if request.partition(" ")[0] in ("PUT", "POST", "DELETE"):
                states.append(dict(gcs.server.buckets[gcs.bucket]))
            return take(request)

        with monkeypatch.context() as patch:
            patch.setattr(gcs.server, "fault", kept)
            # Each object is a state of its own, also where several are deleted at once.
            patch.setattr(objects, "write_concurrency", lambda: 1)
            ckpttools.prune(run, keep_last=1)
        assert len(states) > 40
        location = parse(str(run).replace("gs://", f"{scheme}://"))
        for state in unlike(states)[::every]:
            gcs.server.buckets[gcs.bucket] = state
            location.store.forget(location.key)
            check_reports(location, files_in(three), {name for name, _ in location.walk()})

    def test_killed_prune_on_disk_is_reported_correctly(self, three, tmp_path, monkeypatch):
        run, states = copied(three, tmp_path / "run"), []

        def kept(real):
            def call(*paths, **options):
                states.append({**files_in(run)})
                return real(*paths, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "unlink", "rmdir"):
                patch.setattr(os, name, kept(getattr(os, name)))
            ckpttools.prune(run, keep_last=1)
        assert len(states) > 30
        for number, state in enumerate(unlike(states)[::3]):
            location = tmp_path / f"state-{number}"
            for name, content in state.items():
                (location / name).parent.mkdir(parents=True, exist_ok=True)
                (location / name).write_bytes(content)
            check_reports(parse(location), files_in(three), set(state))


def unlike(states: list[dict]) -> list[dict]:
    """States without those in which one more of many files of a directory is gone, of which every fifth."""
    result: dict[frozenset, list[dict]] = {}
    for state in states:
        directories = frozenset(name.rpartition("/")[0] for name in state)
        commits = frozenset(name for name in state if name.endswith(("commit_success.txt", "_METADATA")))
        result.setdefault(directories | commits, []).append(state)
    return [item for alike in result.values() for item in alike[::5]]


def check_reports(location, before: dict[str, bytes], there: set[str]) -> None:
    """Check what is reported of a run in which a prune was killed.

    Args:
        location: The run.
        before: Its files before the prune.
        there: Names of its files now.
    """
    marked = {name.rpartition("/")[2] for name in there if name.startswith(".ckpttools-prune/deleting/")}
    left = {name.partition("/")[0] for name in there} & {"1", "2", "3"}
    complete = {
        step
        for step in left - marked
        if all(name in there for name in before if name.startswith(f"{step}/") and name.count("/") > 1)
    }
    listing = ckpttools.ls(location)
    assert {item.name for item in listing.steps} == left
    assert {item.name for item in listing.finished} == complete
    assert listing.latest == 3 and listing.resume_step == 3
    for step in left:
        if step in complete:
            assert ckpttools.inspect(location / step).arrays
        else:
            with pytest.raises(FormatError, match="interrupted"):
                ckpttools.inspect(location / step)
            if len(there) % 4 == 0:
                declared = doctor(location / step).findings
                result = next(item for item in declared if "no longer complete" in item.what)
                assert result.level == "error" and "--finish" in result.command
    report = doctor(location)
    assert not [finding for finding in report.findings if finding.level == "error"], report.findings
    interrupted = [finding.what for finding in report.findings if "interrupted prune" in finding.what]
    assert bool(interrupted) == any(name.startswith(".ckpttools-prune/") for name in there)
    assert all(step in interrupted[0].partition("partly deleted")[2] for step in left - complete)


class Killed(BaseException):
    """The process is gone."""


def killed(location, monkeypatch, after: int) -> bool:
    """Prunes until so many objects have changed; whether that was before the end."""
    left = [after]

    def counted(real):
        def call(*args, **options):
            if left[0] <= 0:
                raise Killed
            left[0] -= 1
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(objects, "write_concurrency", lambda: 1)
        for name in ("put", "delete"):
            patch.setattr(objects, name, counted(getattr(objects, name)))
        try:
            ckpttools.prune(location, keep_last=1)
        except Killed:
            return True
    return False


def objects_at(location) -> set[str]:
    location.store.forget(location.key)
    return {name for name, _ in location.walk()} if location.exists() else set()


def test_prune_refuses_a_path_inside_a_run(run):
    for location in (run / "1", run / "1" / "items"):
        with pytest.raises(UsageError, match="is a part of a run"):
            ckpttools.prune(location, keep_last=1)
    assert steps(run) == {str(step) for step in range(1, 7)}


def test_prune_command_deletes_only_with_yes(run):
    dry = succeed("prune", run, "--keep-last", 2).output
    assert succeed("prune", run, "--keep-last", 2, "--dry-run").output == dry
    for both in (("--yes", "--dry-run"), ("--dry-run", "--yes")):
        refused = ckpt("prune", run, "--keep-last", 2, *both)
        assert refused.exit_code == 2 and "exclude each other" in refused.output
    assert "Dry run: nothing was deleted" in dry and steps(run) == {str(n) for n in range(1, 7)}
    declared = json.loads(succeed("prune", run, "--keep-last", 2, "--json").output)
    assert [item["outcome"] for item in declared["steps"]] == ["deleted"] * 4 + ["kept"] * 2
    assert "4 steps deleted" in succeed("prune", run, "--keep-last", 2, "--yes").output
    assert "There is nothing to do" in succeed("prune", run, "--keep-last", 2).output
    assert steps(run) == {"5", "6"}
    assert ckpt("prune", run).exit_code == 2
    assert "--keep-last" in ckpt("prune", run).output
    assert ckpt("prune", run, "--finish", "--yes").exit_code == 2
    assert ckpt("prune", run / "nothing", "--keep-last", 1).exit_code == 2
    assert ckpt("prune", "hf://org/name", "--keep-last", 1).exit_code != 0
