"""One target in a process of its own: `python child.py TARGET SECONDS RUNS SEED CORPUS FOUND`.

With atheris, coverage-guided, where it is installed; else seeded mutations without coverage. The first input
that raises anything but a CheckpointError, takes longer than 20 s or more than 1 GiB is kept in FOUND.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

SECONDS, MEGABYTES, LARGEST = 20, 1024, 1 << 20


def main(name: str, seconds: float, runs: int, seed: int, corpus: Path, result: Path) -> None:
    try:
        import atheris
    except ImportError:
        _by_mutation(name, seconds, seed, result)
    else:
        _by_coverage(atheris, name, seconds, runs, seed, corpus, result)


def _by_coverage(
    atheris, name: str, seconds: float, runs: int, seed: int, corpus: Path, result: Path
) -> None:
    with atheris.instrument_imports(include=["ckpttools"]):
        import targets
    from mutate import mutated

    target = targets.TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for data in target.seeds():
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

    def plainly(data: bytes, limit: int) -> bytes:
        return atheris.Mutate(data, max(limit, len(data)))

    def mutator(data: bytes, limit: int, seed: int) -> bytes:
        return mutated(data, limit, seed, plainly)

    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-runs={runs}",
        f"-seed={seed}",
        f"-timeout={SECONDS}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-max_len={LARGEST}",
        f"-artifact_prefix={result}/{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup(
        [sys.argv[0], *options, str(corpus)],
        lambda data: targets.refused_or_done(target, data) and None,
        custom_mutator=mutator,
    )
    atheris.Fuzz()


def _by_mutation(name: str, seconds: float, seed: int, result: Path) -> None:
    import targets
    from mutate import mutated

    target, random_ = targets.TARGETS[name], random.Random(seed)
    corpus, end, runs = target.seeds(), time.monotonic() + seconds, 0
    limited()
    while time.monotonic() < end:
        data = random_.choice(corpus)
        for _ in range(random_.choice((1, 2, 4))):
            data = mutated(data, LARGEST, random_.getrandbits(32), _plainly(random_))
        try:
            with alarmed():
                targets.refused_or_done(target, data)
        except BaseException:
            (result / f"{name}-crash-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
            traceback.print_exc()
            sys.exit(77)
        runs += 1
    sys.stdout.write(f"{name}: {runs} inputs, without coverage\n")


def _plainly(random_: random.Random):
    def change(data: bytes, limit: int) -> bytes:
        built = bytearray(data)
        for _ in range(random_.choice((1, 1, 2, 8))):
            at = random_.randrange(len(built) + 1)
            match random_.randrange(4):
                case 0:
                    built[at : at + 1] = bytes(
                        [random_.choice((0, 1, 127, 128, 255, random_.randrange(256)))]
                    )
                case 1:
                    del built[at : at + random_.choice((1, 2, 8, 64))]
                case 2:
                    built[at:at] = random_.randbytes(random_.choice((1, 4, 16)))
                case _:
                    start = random_.randrange(len(built) + 1)
                    built[at:at] = built[start : start + random_.choice((1, 8, 64))]
        return bytes(built[:limit])

    return change


def limited() -> None:
    """Allows this process so much memory more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextlib.contextmanager
def alarmed():
    """Ends what takes too long with a TimeoutError."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    name, seconds, runs, seed, corpus, result = sys.argv[1:]
    Path(result).mkdir(parents=True, exist_ok=True)
    main(name, float(seconds), int(runs), int(seed), Path(corpus), Path(result))
