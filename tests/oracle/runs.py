"""MaxText goes on with runs that `ckpt` has worked on: `python tests/oracle/runs.py [FAMILY ...]`.

MaxText trains a tiny model. What `ckpt prune` leaves of that run, and what `ckpt assemble` makes of parts
of its states, which Orbax's managers of four processes have saved, is trained on: with the losses of the run
left alone, and to the same bits of weights, moments and counters. Exits with 1 where it is not, and where the
same check does not notice a single moment that is another.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.locations import TESTS

import ckpttools
from ckpttools import Tree
from ckpttools.array.tree import keystr
from ckpttools.testing.strategies import stored
from oracle import environments, settings, steps
from oracle.commands import ckpt
from oracle.each_form import checked
from oracle.worker import StepError

FAMILIES = ("llama3.1", "qwen3-moe")
LAST = steps.STEPS - 1
CHECKPOINTS = Path("run") / "checkpoints"
MESH = "data=2,fsdp=4"
# By manager: hosts that have all of a step between them, and neither of them alone. Emergency managers of the
# first replica's hosts keep nothing there.
HOSTS = {"emergency": (2, 3), "replicator": (0, 3), "p2p": (0, 3)}


def trained(bench: steps.Bench) -> None:
    """A run with a checkpoint of each step."""
    steps.convert(bench)
    item = bench.converted / "0" / "items"
    asked = {**settings.TRAINED, "steps": steps.STEPS, "checkpoint_period": 1}
    bench.maxtext("training", settings=bench.settings(load_parameters_path=item, **asked))


def pruned(bench: steps.Bench, name: str, *rules: str) -> None:
    """A copy of the run, with what the rules leave of it."""
    run = bench.directory / name / CHECKPOINTS
    shutil.copytree(bench.run / "checkpoints", run)
    ckpt("prune", run, *rules, "--yes")


def with_last(bench: steps.Bench, name: str) -> str:
    pruned(bench, name, "--keep-last", "2")
    left = {each.name for each in (bench.directory / name / CHECKPOINTS).iterdir() if each.name.isdigit()}
    if left != {str(LAST - 1), str(LAST)}:
        raise StepError(f"steps that are left: {sorted(left)}")
    return "steps that are gone"


def with_stripped(bench: steps.Bench, name: str) -> str:
    """Steps before the last are of parameters alone, and MaxText begins with them as with the whole ones."""
    pruned(bench, name, "--keep-last", "1", "--keep-every", "1", "--strip-older")
    older = str(LAST - 1)
    stripped, whole = (
        each / older / "items" for each in (bench.directory / name / CHECKPOINTS, bench.run / "checkpoints")
    )
    if bench.maxtext("stored", item=stripped) == bench.maxtext("stored", item=whole):
        raise StepError("nothing was stripped")
    found = [
        bench.maxtext("loads", settings=bench.settings(load_parameters_path=each))
        for each in (stripped, whole)
    ]
    if found[0] != found[1] or "refused" in str(found):
        raise StepError(f"step {older} loads as {found[0]}, before as {found[1]}")
    return f"stripped steps, loaded by {', '.join(found[0])}"


def assembled(kind: str, bench: steps.Bench, name: str) -> str:
    """The last step of two hosts' parts."""
    out = bench.directory / "hosts"
    command = [
        environments.found().maxtext,
        "-m",
        "support.host_saves",
        out,
        kind,
        MESH,
        bench.run / "checkpoints",
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(TESTS)}
    )
    if ended.returncode:
        raise StepError(f"hosts cannot save: {ended.stderr[-2000:]}")
    parts = [out / f"{kind}-{MESH}" / f"host{number}" for number in HOSTS[kind]]
    for number, part in zip(HOSTS[kind], parts, strict=True):
        try:
            ckpt("assemble", part, bench.directory / f"{kind}-{number}")
        except StepError:
            continue
        raise StepError(f"host {number} of {kind} had all of it alone")
    ckpt("assemble", *parts, bench.directory / name / CHECKPOINTS)
    return f"of hosts {HOSTS[kind]} of 4, each refused alone"


def altered(bench: steps.Bench, name: str) -> str:
    """The last step, where one number of one array of moments is twice what it was and 1 more."""
    tree = ckpttools.open(bench.run / "checkpoints", step=LAST)
    path = next(path for path in tree.arrays if "mu" in path and tree.arrays[path].ndim > 1)
    values = tree.arrays[path].read().copy()
    values.flat[0] = 2 * values.flat[0] + 1
    made = Tree({**tree.leaves, path: stored(values, tree.arrays[path].dtype)}, tree.metadata)
    ckpttools.convert(made, bench.directory / name / CHECKPOINTS, format="orbax", as_step=LAST)
    return keystr(path)


def went_on(bench: steps.Bench, name: str) -> tuple[str, dict[int, float]]:
    """The digest after more steps, and the loss of each of these."""
    file = bench.directory / f"{name}.metrics"
    digest = steps.gone_on(bench, name, metrics_file=file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    losses = {int(line["step"]): line["learning/loss"] for line in lines if "learning/loss" in line}
    if sorted(losses) != list(range(steps.STEPS, steps.MORE_STEPS)):
        raise StepError(f"MaxText took steps {sorted(losses)}")
    return digest, losses


WAYS: dict[str, Callable[[steps.Bench, str], str]] = {
    "pruned": with_last,
    "stripped": with_stripped,
    **{f"assembled-{kind}": partial(assembled, kind) for kind in HOSTS},
}


def findings(bench: steps.Bench) -> Iterator[str]:
    """A line for each way.

    Raises:
        StepError: MaxText does not go on, or does it otherwise than with the run itself.
    """
    trained(bench)
    shutil.copytree(bench.run / "checkpoints", bench.directory / "itself" / CHECKPOINTS)
    itself = went_on(bench, "itself")
    yield f"losses {itself[1]}"
    where = altered(bench, "altered")
    if went_on(bench, "altered")[0] == itself[0]:
        raise StepError(f"the check is blind: a number of {where} is another, and the bits are the same")
    yield f"one number of {where} altered: noticed"
    for name, make in WAYS.items():
        said = make(bench, name)
        if (other := went_on(bench, name)) != itself:
            raise StepError(f"{name}: {other}, the run itself: {itself}")
        yield f"{name} ({said}): same losses, same bits"


if __name__ == "__main__":
    sys.exit(checked(sys.argv[1:] or FAMILIES, findings))
