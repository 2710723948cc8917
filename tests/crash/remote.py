"""Kill conversions to gs:// at random moments, and check the destination and the next run.

    python tests/crash/remote.py [KILLS] [--seed N]

The server is a separate process that responds after 5 ms. After each kill, only complete destinations may be
marked as complete. In the end, the same command must write the same objects as an uninterrupted one, without
leftovers of `.partial`, uploads or other objects.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from support.command_line import ckpt  # noqa: E402
from support.locations import GOLDEN  # noqa: E402

from ckpttools.stores.objects import gs  # noqa: E402

LLAMA = GOLDEN / "llama3.1"
BUCKET = "crash"
LATENCY = 0.005
# Small parts, so that small checkpoints are uploaded in several, and kills leave some.
_MAIN = """
from ckpttools.__main__ import main
from ckpttools.stores.objects import writing
writing.PART_BYTES = 20_000
main()
"""
SCENARIOS: Mapping[str, Sequence[str]] = {
    "orbax": ("convert", "hf-to-maxtext", str(LLAMA / "hf")),
    "zstd": ("convert", "hf-to-maxtext", str(LLAMA / "hf"), "--compression", "zstd"),
    "hf": (
        *("convert", "maxtext-to-hf", str(LLAMA / "maxtext_scanned")),
        *("--like", str(LLAMA / "hf"), "--max-shard-size", "60KB"),
    ),
    "stack": ("stack", f"gs://{BUCKET}/source"),
    "reshard": (
        *("reshard", str(LLAMA / "maxtext_scanned")),
        *("--mesh", "fsdp=4,tensor=2", "--subchunks", "4KiB"),
    ),
}
# What each replaces with `--overwrite`: of the same kind, and other content.
REPLACED: Mapping[str, Sequence[str]] = {
    "orbax": (*SCENARIOS["orbax"], "--no-scan"),
    "zstd": SCENARIOS["orbax"],
    "hf": (*SCENARIOS["hf"][:-1], "90KB"),
    "stack": SCENARIOS["orbax"],
    "reshard": (*SCENARIOS["orbax"], "--no-scan"),
}


@dataclass(frozen=True)
class Expected:
    """The objects of an uninterrupted run, and its seconds after the first request."""

    digest: str
    names: frozenset[str]
    seconds: float


@dataclass
class Campaign:
    """A server and the kills so far.

    Attributes:
        url: URL of the server.
        rng: Chooses which runs to kill, and when.
        kills: Number of kills that hit a running process.
        uploads: Number of multipart uploads that kills left behind.
    """

    url: str
    rng: random.Random
    kills: int = 0
    uploads: int = 0

    def run(self, *words: str) -> tuple[int, str]:
        """Run a command in this process with empty caches, and return its exit code and output."""
        gs.STORE.__init__()  # type: ignore[misc]
        done = ckpt(*words)
        return done.exit_code, done.output

    def digest(self, location: str) -> tuple[int, str]:
        code, output = self.run("hash", location)
        return code, output.split()[0] if output else ""

    def state(self) -> dict[str, Any]:
        """Return the objects, the unfinished uploads, and the number of requests."""
        with urlopen(f"{self.url}/_state") as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def below(self, key: str) -> frozenset[str]:
        """Return the objects below a prefix, by the rest of their keys."""
        return frozenset(name[len(key) :] for name in self.state()["objects"] if name.startswith(key))

    def uploads_to(self, key: str) -> list[str]:
        return [item for item in self.state()["uploads"].values() if item.startswith(key)]

    def timed(self, words: Sequence[str], seconds: float | None) -> float:
        """Run a command in a separate process, and kill it this long after its first request, unless None.

        Returns:
            Seconds that the process ran after its first request.
        """
        before = self.state()["requests"]
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        while self.state()["requests"] == before and process.poll() is None:
            time.sleep(0.01)
        began = time.monotonic()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            self.kills += 1
        process.communicate()
        return time.monotonic() - began


def one(campaign: Campaign, number: int, name: str, is_replacing: bool, expected: Expected) -> str:
    """Kill runs to one destination, once or several times, and return the problem, or "" if there is none."""
    location = f"gs://{BUCKET}/{name}-{number}/out"
    key, right = location.removeprefix(f"gs://{BUCKET}/"), {expected.digest}
    if is_replacing:
        code, output = campaign.run(*REPLACED[name], location)
        assert code == 0, output
        right.add(campaign.digest(location)[1])
    words = [*SCENARIOS[name], location, "--jobs", "2", *(["--overwrite"] if is_replacing else [])]
    for _ in range(campaign.rng.choice((1, 2, 3))):
        campaign.timed(words, campaign.rng.uniform(0, expected.seconds))
        if wrong := _seen(campaign, location, key, right, expected):
            return wrong
    campaign.uploads += len(campaign.uploads_to(key))
    code, output = campaign.run(*words)
    if code and "exists" not in output:
        return f"the same command ends with {code}: {output}"
    if (result := campaign.digest(location)) != (0, expected.digest):
        return f"another digest: {result}"
    if (names := campaign.below(f"{key}/")) != expected.names:
        return f"other objects: {sorted(names ^ expected.names)}"
    if left := campaign.below(f"{key}.partial"):
        return f"left over: {sorted(left)}"
    uploads = campaign.uploads_to(key)
    return f"uploads left over: {uploads}" if uploads else ""


def _seen(campaign: Campaign, location: str, key: str, right: set[str], expected: Expected) -> str:
    """Return the problem that readers see after a kill, or ""."""
    code, digest = campaign.digest(location)
    if code == 0 and digest not in right:
        return f"a digest that is of neither: {digest}"
    names = campaign.below(f"{key}/")
    # Of a step this says to Orbax that it is complete.
    is_listed = "commit_success.txt" in names or "0/commit_success.txt" in names
    if is_listed and code and not names >= expected.names:
        return f"listed, and not complete: {sorted(expected.names - names)}"
    return ""


def prepared(campaign: Campaign, names: Sequence[str] = tuple(SCENARIOS)) -> dict[str, Expected]:
    """Return the results of uninterrupted commands."""
    code, output = campaign.run(*SCENARIOS["orbax"], "--no-scan", f"gs://{BUCKET}/source")
    assert code == 0, output
    built = {}
    for name in names:
        words = SCENARIOS[name]
        location = f"gs://{BUCKET}/whole-{name}/out"
        seconds = campaign.timed([*words, location, "--jobs", "2"], None)
        code, digest = campaign.digest(location)
        assert code == 0, digest
        built[name] = Expected(digest, campaign.below(f"whole-{name}/out/"), seconds)
    return built


@contextmanager
def serving() -> Iterator[str]:
    """Start the server in a separate process, and yield its address."""
    command = [sys.executable, "-m", "crash.remote_server", str(LATENCY)]
    process = subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    with serving() as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        campaign = Campaign(url, random.Random(asked.seed))
        expected = prepared(campaign)
        for number in count():
            if campaign.kills >= asked.kills:
                break
            name, is_replacing = campaign.rng.choice(list(SCENARIOS)), campaign.rng.random() < 0.5
            what = f"{name}{' --overwrite' if is_replacing else ''}"
            wrong = one(campaign, number, name, is_replacing, expected[name])
            counts[f"{what}: {'wrong' if wrong else 'right'}"] += 1
            if wrong:
                print(f"{number} {what}: {wrong}", flush=True)  # noqa: T201
    for result, times in sorted(counts.items()):
        print(f"{times:4} {result}")  # noqa: T201
    print(f"{campaign.kills} kills, which left {campaign.uploads} uploads")  # noqa: T201
    return int(any(item.endswith("wrong") for item in counts))


if __name__ == "__main__":
    sys.exit(main())
