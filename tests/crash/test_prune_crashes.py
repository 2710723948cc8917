"""After any crash of `ckpt prune`, kept steps are complete, no step is partial, and it can be finished or
undone.
"""

import shutil

import pytest
from support.pruned_runs import write_run

from crash.crashes import crashes
from crash.disk import Disk, lay_out
from crash.effort import ALL, sample_and_last
from crash.runner import runner
from crash.scenarios import LOCATION
from crash.verdict import contents, contents_in, digest

RULES = {
    "delete": ("--keep-last", "2"),
    "strip": ("--keep-last", "1", "--keep-every", "2", "--strip-older"),
    "strip-copy": ("--keep-last", "1", "--keep-every", "2", "--strip-older", "--copy"),
}
# Of 1 to 4: those that stay as they are, and those that stay without their optimizer.
KEPT = {"delete": {"3", "4"}, "strip": {"4"}, "strip-copy": {"4"}}
STRIPPED = {"delete": set(), "strip": {"2"}, "strip-copy": {"2"}}
STEPS = {"1", "2", "3", "4"}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prune")
    (directory / "root").mkdir()
    with runner(directory / "root", directory / "notes") as built:
        yield built


@pytest.fixture(params=RULES if ALL else ("delete", "strip"))
def case(request, commands):
    """Return the run before and after, and the disk in between."""
    run = commands.root / LOCATION / "run"
    shutil.rmtree(commands.root / LOCATION, ignore_errors=True)
    write_run(run, range(1, 5))
    before = contents(run)
    digests = {step: parameters(commands, run / step) for step in STEPS}
    disk = Disk(commands.root, ())
    words = ("prune", str(run), *RULES[request.param], "--yes")
    ended = commands.run(*words)
    assert ended.code == 0, str(ended)
    moments = disk.apply(ended.notes.calls)
    assert contents_in(disk.state(range(len(disk.steps))), f"{LOCATION}/run") == contents(run)
    return request.param, run, before, contents(run), digests, disk, moments


def parameters(commands, step):
    """Return the digest of the parameters only."""
    out = commands.run("hash", str(step)).out
    return next(line.split()[0] for line in out.splitlines() if line.endswith("(parameters)"))


def of_step(result, step):
    return {name: data for name, data in result.items() if name.startswith(f"{step}/")}


def test_every_crash_state_of_prune_is_recoverable(case, commands):
    name, run, before, after, digests, disk, moments = case
    result = crashes(disk, moments, name, 20 if ALL else 2)
    for crash in result:
        here = contents_in(disk.state(crash.steps), f"{LOCATION}/run")
        for step in STEPS:
            now = of_step(here, step)
            allowed = [of_step(before, step)]
            if step not in KEPT[name]:
                # Never half: it is whole, without its optimizer, or has another name.
                allowed += [of_step(after, step), {}]
            assert now in allowed, f"{crash.text}: step {step} holds {sorted(now)}"
            if step in STRIPPED[name] and not now:
                elsewhere = [key for key in here if f"removed/{step}/items/_METADATA" in key]
                assert elsewhere, f"{crash.text}: step {step} is nowhere"
    # Of all that a crash leaves each is looked at; commands are run from some: a command takes 0.2 s.
    for number, crash in enumerate(sample_and_last(result, 80 if ALL else 8, name)):
        undo = number % 2 == 1
        lay_out(disk.state(crash.steps), commands.root, LOCATION)
        if not (run / ".ckpttools-prune" / "plan.json").exists():
            ended = commands.run("prune", str(run), *RULES[name], "--yes")
            assert ended.code == 0, f"{crash.text}: {ended}"
            undo = False
        else:
            ended = commands.run("prune", str(run), "--undo" if undo else "--finish", "--yes")
            assert ended.code == 0, f"{crash.text}: {ended}"
        left = {path.name for path in run.iterdir()}
        # The journal was torn, and so before all else.
        is_all = undo or "it had changed nothing" in ended.out
        assert KEPT[name] | STRIPPED[name] <= left, crash.text
        assert left <= (STEPS if is_all else KEPT[name] | STRIPPED[name]), f"{crash.text}: {ended}"
        for step in KEPT[name]:
            assert of_step(contents(run), step) == of_step(before, step), crash.text
        for step in left:
            assert parameters(commands, run / step) == digests[step], crash.text
            assert "Error" not in digest(commands, run / step)
