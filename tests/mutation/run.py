"""Changes the package in one place after another, and lists what no test notices.

    python tests/mutation/run.py --rooms plan,run,formats,maxtext,compare --sample 200 --jobs 2

What was done is in `.mutation/`: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS))

from mutation.mutants import Mutant, mutants_of  # noqa: E402
from mutation.waiting import ended  # noqa: E402

ROOMS = "plan,run,formats,maxtext,compare"
# What the processes that tests start do is not seen when functions are noted: asked only of survivors.
BESIDE = {"run": ("tests/crash", "tests/run/test_stopping.py"), "plan": ("tests/memory/test_memory.py",)}
_BESIDE_SECONDS = 200
# A change may make a test allocate without end.
_MAX_BYTES = 6 << 30
_TIMES = count(1_000_000_000)
CAUGHT, SURVIVED, UNTESTED, UNSURE = "caught", "survived", "untested", "unsure"


@dataclass(frozen=True)
class Outcome:
    """What became of a change.

    Attributes:
        mutant: which.
        source: a digest of the file that was changed.
        state: "caught", "survived", "untested" where no test enters the function, "unsure" where what
            noticed it fails without the change, too.
        how: the test that noticed, or why it is thought that the tests would not have ended.
        tests: how many were run at most.
    """

    mutant: Mutant
    source: str
    state: str
    how: str
    tests: int


@dataclass(frozen=True)
class Timed:
    """A test and the seconds that it takes; fewer where the examples of properties were few."""

    name: str
    seconds: float


def main() -> None:
    options = _options()
    options.work.mkdir(exist_ok=True)
    print(f"which functions do tests enter: {options.work / 'cover'}", flush=True)
    entered = cover(options.work / "cover", options.tests, options.jobs)
    chosen = sample(options.rooms.split(","), options.sample, options.seed)
    outcomes = list(_outcomes(chosen, entered, options))
    print(report(confirmed(outcomes)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rooms", default=ROOMS, help=f"below ckpttools, packages or files ({ROOMS})")
    parser.add_argument("--sample", type=int, default=200, help="how many changes are tried (200)")
    parser.add_argument("--seed", type=int, default=1, help="which (1)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, in a copy each (1)")
    parser.add_argument("--quick", action="store_true", help="survivors are not shown to tests/crash")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each change, at most (60)")
    modules = (path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py")))
    every = [path.as_posix() for path in modules if path.parts[0] != "crash"]
    parser.add_argument("--tests", nargs="+", default=every, help="files that may notice, by default all")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutation", help="where results are kept")
    return parser.parse_args()


def sample(rooms: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """So many changes of these rooms, each as likely as any other; a smaller sample begins a larger one."""
    files = [path for room in rooms for path in _files(ROOT / "ckpttools" / room)]
    every = [item for path in files for item in mutants_of(ROOT, path.relative_to(ROOT).as_posix())]
    random.Random(seed).shuffle(every)
    return every[:number]


def _files(location: Path) -> list[Path]:
    return [location] if location.is_file() else sorted(location.rglob("*.py"))


# ---- which tests enter which functions


def cover(location: Path, files: Sequence[str], jobs: int) -> dict[str, list[Timed]]:
    """Function -> the tests that enter it, the quickest first; files of tests that changed are run again."""
    location.mkdir(exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda name: _covered(location, name), files):
            pass
    entered: dict[str, list[Timed]] = defaultdict(list)
    for name in files:
        for test, noted in json.loads((location / f"{name}.json").read_bytes()).items():
            for function in noted["functions"]:
                entered[function].append(Timed(test, noted["seconds"]))
    return {function: sorted(tests, key=lambda item: item.seconds) for function, tests in entered.items()}


def _covered(location: Path, name: str) -> None:
    built, digest = location / f"{name}.json", location / f"{name}.digest"
    now = _digest((TESTS / name).read_bytes())
    if built.exists() and digest.exists() and digest.read_text() == now:
        return
    arguments = ["-p", "mutation.cover", "--cover-to", str(built), f"tests/{name}"]
    with tempfile.TemporaryDirectory() as temporary:
        command = [*_pytest(Path(temporary)), *arguments]
        subprocess.run(command, cwd=ROOT, env=_environment(ROOT), capture_output=True, check=False)
    assert built.exists(), f"{' '.join(command)} made no {built}"
    digest.write_text(now)


# ---- trying changes


def _outcomes(
    chosen: Iterable[Mutant], entered: Mapping[str, list[Timed]], options: argparse.Namespace
) -> Iterator[Outcome]:
    """Those that were found before, then the others as they are found."""
    results = options.work / "results.jsonl"
    known = dict(_known(results))
    left = []
    for mutant in chosen:
        source = _digest((ROOT / mutant.file).read_bytes())
        if (mutant.key, source) in known:
            yield known[mutant.key, source]
        else:
            left.append((mutant, source))
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutation") as top, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.jobs):
            trees.put(_copy(Path(top) / str(number)))

        def tried(mutant: Mutant, source: str) -> Outcome:
            tree = trees.get()
            try:
                beside = () if options.quick else BESIDE.get(mutant.room, ())
                return _try(tree, mutant, source, asked(mutant, entered, options.seconds), beside)
            finally:
                trees.put(tree)

        for future in as_completed([pool.submit(tried, *item) for item in left]):
            outcome = future.result()
            with results.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(_line(outcome), flush=True)
            yield outcome


def _known(results: Path) -> Iterator[tuple[tuple[str, str], Outcome]]:
    for line in results.read_text().splitlines() if results.exists() else ():
        read = json.loads(line)
        outcome = Outcome(**read | {"mutant": Mutant(**read["mutant"])})
        yield (outcome.mutant.key, outcome.source), outcome


def _try(tree: Path, mutant: Mutant, source: str, tests: Sequence[Timed], beside: Sequence[str]) -> Outcome:
    file = tree / mutant.file
    before = file.read_bytes()
    _replace(file, mutant.applied(before))
    try:
        how = _noticed(tree, [test.name for test in tests], sum(test.seconds for test in tests))
        how = how or _noticed(tree, beside, _BESIDE_SECONDS)
    finally:
        _replace(file, before)
    state = CAUGHT if how else SURVIVED if tests else UNTESTED
    return Outcome(mutant, source, state, how, len(tests))


def _replace(file: Path, source: bytes) -> None:
    """With a time of its own: bytecode is known by length and second, which two changes may share."""
    file.write_bytes(source)
    os.utime(file, times=(next(_TIMES),) * 2)


def asked(mutant: Mutant, entered: Mapping[str, list[Timed]], seconds: float) -> list[Timed]:
    """The quickest that enter its function; where none does, or where it is in none, that enter its file."""
    tests = entered.get(f"{mutant.file}:{mutant.function}", [])
    if not tests:
        beside = [item for name, item in entered.items() if name.startswith(f"{mutant.file}:")]
        tests = sorted({item for some in beside for item in some}, key=lambda item: item.seconds)
    chosen = []
    for test in tests:
        seconds -= test.seconds
        if seconds < 0 and chosen:
            break
        chosen.append(test)
    return chosen


def _noticed(tree: Path, tests: Sequence[str], seconds: float) -> str:
    """The test that fails, why it is thought that they never end, nothing if all pass."""
    if not tests:
        return ""
    code, declared = _tested(tree, ["-x", *tests], 120 + 10 * seconds)
    if code == 0:
        return ""
    if not isinstance(code, int):
        return code
    return next(iter(_failed(declared)), f"exit {code}: {declared[-300:]}")


def _tested(tree: Path, arguments: Sequence[str], cpu_seconds: float) -> tuple[int | str, str]:
    """The exit code of tests, or why it is thought that they never end; and what they print."""
    told, declared = tree.parent / "tests.txt", tree.parent / "said.txt"
    told.write_text("\n".join(arguments))
    with declared.open("w") as output:
        process = subprocess.Popen(
            [*_pytest(tree.parent / "temporary"), f"@{told}"],
            cwd=tree,
            env=_environment(tree),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_limited,
        )
        try:
            why = ended(process, cpu_seconds)
        finally:
            _end(process)
    return why or process.returncode, declared.read_text(errors="replace")


def _failed(declared: str) -> list[str]:
    return [line for line in declared.splitlines() if line.startswith(("FAILED", "ERROR"))]


def confirmed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same, "unsure" where what noticed a change fails without it, too: these are run once more."""
    noticed = {_test_in(line) for outcome in outcomes for line in _failed(outcome.how)}
    if not noticed:
        return list(outcomes)
    with tempfile.TemporaryDirectory(prefix="mutation") as top:
        _, declared = _tested(_copy(Path(top)), sorted(noticed), 36_000)
    failed = {_test_in(line) for line in _failed(declared)}
    return [
        replace(outcome, state=UNSURE) if _test_in(outcome.how) in failed else outcome for outcome in outcomes
    ]


def _test_in(line: str) -> str:
    """The test that such a line is about: `FAILED tests/test_x.py::test_f[1] - assert 1 == 2`."""
    return line.partition(" ")[2].partition(" - ")[0]


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))


def _pytest(temporary: Path) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={temporary}"]


def _environment(tree: Path) -> dict[str, str]:
    paths = f"{tree}{os.pathsep}{tree / 'tests'}"
    return {**os.environ, "PYTHONPATH": paths, "CI": "1"}


def _copy(location: Path) -> Path:
    """The tree as it is, without what git ignores."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tree = location / "tree"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- what is told


def _line(outcome: Outcome) -> str:
    mutant = outcome.mutant
    what = f"{mutant.before or '(nothing)'} -> {mutant.after or '(nothing)'}".replace("\n", " ")
    return f"{outcome.state:8} {mutant.file}:{mutant.line}: {what}    in: {mutant.statement}"


def report(outcomes: Sequence[Outcome]) -> str:
    """How many of each room were caught, and each that was not."""
    by_room: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        by_room[outcome.mutant.room][outcome.state] += 1
    lines = [f"{room}: {counts[CAUGHT]} of {counts.total()}" for room, counts in sorted(by_room.items())]
    total = sum(by_room.values(), Counter())
    lines.append(f"caught: {total[CAUGHT]} of {total.total()}")
    missed = sorted((item for item in outcomes if item.state != CAUGHT), key=lambda item: item.mutant.key)
    return "\n".join([*lines, *map(_line, missed)])


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")
