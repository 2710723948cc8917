"""What is a run, a step, an item, and finished: everyone who is asked about a directory says the same."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, examine
from support.internals import ReadOptions, open_tree
from support.orbax_items import LITTLE, change_json, write_item, zarr3

from ckpttools import CheckpointError, LaterStepWarning
from ckpttools.formats.orbax.runs import DamagedStepError, steps_around

HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
CHECKPOINT, TREE, MANIFEST, COMMIT = (
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "manifest.ocdbt",
    "commit_success.txt",
)
TMP = ".orbax-checkpoint-tmp"


@cache
def whole_item() -> Path:
    item = Path(mkdtemp()) / "items"
    return write_item(item, {("w",): (zarr3([LITTLE], [2]), np.arange(2.0))})


def saved(step: Path, item: str | None = "items", *, is_old: bool = False) -> Path:
    """A finished step; bare without an item, and of versions that wrote no metadata of steps if it is old."""
    directory = step / item if item else step
    shutil.copytree(whole_item(), directory)
    if not is_old:
        declared = {"item_handlers": {item: HANDLER} if item else HANDLER, "commit_timestamp_nsecs": 1}
        (step / CHECKPOINT).write_text(json.dumps(declared))
    for location in {step, directory} if item or not is_old else ():
        (location / COMMIT).touch()
    return directory


def uncommitted(step: Path, item: Path) -> None:
    """As a save to an object store leaves what it had begun."""
    (step / CHECKPOINT).write_text(json.dumps({"item_handlers": None, "commit_timestamp_nsecs": None}))
    for name in (step / COMMIT, item / COMMIT, item / TREE, item / MANIFEST):
        name.unlink(missing_ok=True)


def in_progress(step: Path, item: Path) -> None:
    """As a save to a local disk leaves it: it is renamed when it ends."""
    if item != step:
        item.rename(item.with_name(item.name + TMP))
    uncommitted(step, step / "none")
    step.rename(step.with_name(step.name + TMP))


def without_item(step: Path, item: Path) -> None:
    for path in sorted(item.rglob("*"), reverse=True):
        if path.name not in (CHECKPOINT, COMMIT) or item != step:
            path.rmdir() if path.is_dir() else path.unlink()
    if item != step:
        item.rmdir()


def unnamed(step: Path, item: Path) -> None:
    """Metadata that names no item, and no item."""
    without_item(step, item)
    (step / CHECKPOINT).write_text(json.dumps({"commit_timestamp_nsecs": 1}))


def metrics_alone(step: Path, item: Path) -> None:
    without_item(step, item)
    (step / "metrics").mkdir()
    change_json(step / CHECKPOINT, item_handlers={"metrics": "JsonCheckpointHandler"})


ENDS = {
    "finished": lambda step, item: None,
    "without a marker": lambda step, item: [p.unlink() for p in step.rglob(COMMIT)],
    "with a copy of the metadata": lambda step, item: (
        shutil.copy(step / CHECKPOINT, item) if item != step else None
    ),
    "uncommitted": uncommitted,
    "uncommitted, whole": lambda step, item: (step / CHECKPOINT).write_text(
        '{"commit_timestamp_nsecs": null}'
    ),
    "in progress": in_progress,
    "not renamed": lambda step, item: step.rename(step.with_name(step.name + TMP)),
    "item not renamed": lambda step, item: (
        item.rename(item.with_name(item.name + TMP)) if item != step else None
    ),
    "metadata begun": lambda step, item: (step / CHECKPOINT).write_text(""),
    "metadata that is none": lambda step, item: (step / CHECKPOINT).write_text("[1"),
    "no tree": lambda step, item: (item / TREE).unlink(),
    "no index": lambda step, item: (item / MANIFEST).unlink(),
    "no item": without_item,
    "unnamed": unnamed,
    "metrics alone": metrics_alone,
    "another item gone": lambda step, item: (
        change_json(step / CHECKPOINT, item_handlers={item.name: HANDLER, "opt": HANDLER})
        if item != step
        else None
    ),
}
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ENDS)), st.sampled_from(["items", None]), st.booleans()),
    min_size=1,
    max_size=3,
)


def laid_out(run: Path, prefix: str, steps: list[tuple[str, str | None, bool]]) -> None:
    for number, (end, item, may_be_old) in enumerate(steps):
        step = run / f"{prefix}{number * 7}"
        # Where nothing says that it is a step, only a plain number does.
        is_old = may_be_old and bool(item or not prefix) and end in ("finished", "no tree", "no index")
        ENDS[end](step, saved(step, item, is_old=is_old))


def opened(path: Path, step: int | None = None) -> Path | CheckpointError:
    """The item that is opened, or why none is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaterStepWarning)
        try:
            return Path(open_tree(path, ReadOptions(step=step)).metadata.location)
        except CheckpointError as error:
            return error


def is_sound(path: Path) -> bool:
    try:
        return examine(path).healthy
    except CheckpointError:
        return False  # nothing that was, or was going to be, a checkpoint


def inspected(path: Path) -> dict[str, object] | int:
    shown = ckpt("inspect", "tree", "--json", path)
    return json.loads(shown.stdout) if shown.exit_code == 0 else shown.exit_code


@settings(max_examples=15, deadline=None)
@given(steps=STEPS, prefix=st.sampled_from(["", "step_"]))
@example(steps=[("finished", "items", True), ("no tree", "items", True)], prefix="")
def test_all_readers_agree_on_a_run(steps, prefix):
    with TemporaryDirectory() as top:
        run = Path(top) / "run"
        laid_out(run, prefix, steps)
        whole_run(run, {step: one_step(step) for step in sorted(run.iterdir(), key=number_of)})


def number_of(step: Path) -> int:
    return int(step.name.partition(".")[0].rpartition("_")[2])


def one_step(step: Path) -> Path | None:
    """The item that is opened; a step is sound where one is, or it has other things than trees."""
    result = opened(step)
    has_other = isinstance(result, CheckpointError) and "has no tree, but" in result.message
    assert is_sound(step) == (isinstance(result, Path) or has_other), (step, result, examine(step).findings)
    if isinstance(result, CheckpointError):
        assert isinstance(opened(step.parent, number_of(step)), CheckpointError)
        return None
    assert opened(result) == result == opened(step.parent, number_of(step))
    return result


def whole_run(run: Path, items: Mapping[Path, Path | None]) -> None:
    """Without a number the last step is opened of which an item is, or none where a later one is damaged."""
    result, diagnosis, shown = opened(run), examine(run), inspected(run)
    if isinstance(result, CheckpointError):
        assert shown == 3
        if isinstance(result, DamagedStepError):
            assert not diagnosis.healthy and "latest" in {finding.check for finding in diagnosis.findings}, (
                diagnosis
            )
        else:
            assert not any(items.values())
        return
    steps = list(items)
    last = max(position for position, item in enumerate(items.values()) if item)
    assert items[steps[last]] == result and shown["path"] == str(result)
    later = {step.name for step in steps[last + 1 :] if not is_sound(step)}
    beside = steps_around(open_tree(result))
    assert later == {*beside.unfinished, *beside.damaged} - {step.name for step in steps[:last]}
    assert later <= {entry["text"].partition(",")[0] for entry in shown["warnings"]}


def test_damaged_unnamed_step_keeps_its_number(tmp_path):
    step = saved(tmp_path / "7", None)
    (step / TREE).unlink()
    diagnosis = examine(tmp_path)
    assert "1 step" in diagnosis.examined
    assert [(finding.check, finding.location) for finding in diagnosis.findings] == [
        ("unfinished", str(step))
    ]
