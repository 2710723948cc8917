"""What the `ckpt` of an earlier commit does otherwise than that of today: no test, but a table for people.

    git worktree add ../before 4be124f
    python tests/releases/compare.py ../before fixtures

Each command that both have runs on every checkpoint below the given directories, in one process for each of
the trees. Compared are how it ends, what `--json` says, and the bytes of what is written; where these are not
the same, the arrays, by `ckpttools.hash` of today. What is measured (seconds, memory) is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from releases.cases import Case, cases  # noqa: E402

# Links are those that earlier calls have made of the same source.
_MEASURED = {"seconds", "peak_bytes", "bytes_per_second", "modified", "date", "made", "created", "links"}
_RULES = """[[rules]]
from = "params/{...}"
to = "model/{...}"
optional = true
[[rules]]
from = "{...}.weight"
to = "{...}.w"
optional = true
"""
_ANYTHING = re.compile(r"'[^']*'|\S*/\S*|\b[0-9a-f]{16,}\b|\d[\d,.]*")
# However deep what differs is in a tree, it is one difference.
_DEPTH = re.compile(r"(?:\.children\[\])+")


_COLUMNS = (
    *("command", "calls", "end well now", "end the same", "same JSON", "same bytes", "same arrays", "other"),
    "CPU s before, now",
)


@dataclass
class Row:
    """What was seen of one command: calls, those that end with 0 now, those that ended alike, and so on."""

    calls: int = 0
    well: int = 0
    ended: int = 0
    declared: int = 0
    written: int = 0
    arrays: int = 0
    other: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def cells(self) -> tuple[object, ...]:
        before, now = self.seconds
        numbers = self.calls, self.well, self.ended, self.declared, self.written, self.arrays, self.other
        return (*numbers, f"{before:.1f}, {now:.1f}")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="releases", dir=options.work) as top:
        rules = Path(top) / "rules.toml"
        rules.write_text(_RULES)
        locations = [location.resolve() for location in options.locations]
        chosen = [case for case in cases(locations, rules) if re.search(options.only, case.name)]
        trees = {"old": options.old.absolute(), "new": TESTS.parent}
        result = {name: _results(Path(top), name, tree, chosen) for name, tree in trees.items()}
        print(report(chosen, result["old"], result["new"], Path(top), options.limit))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path, help="root of the earlier tree")
    parser.add_argument("locations", type=Path, nargs="+", help="directories with checkpoints")
    parser.add_argument("--only", default="", metavar="PATTERN", help="commands whose names have this")
    parser.add_argument("--limit", type=int, default=3, help="examples of each difference (3)")
    parser.add_argument("--work", type=Path, help="where checkpoints are written; a temporary directory")
    return parser.parse_args()


def _results(top: Path, name: str, tree: Path, chosen: Sequence[Case]) -> list[dict[str, Any]]:
    work = top / name
    work.mkdir()
    told, results = top / f"{name}.json", top / f"{name}.jsonl"
    knows_versions = (tree / "ckpttools" / "maxtext" / "versions.py").is_file()
    told.write_text(json.dumps([[*case.words, *(case.since if knows_versions else ())] for case in chosen]))
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(told), str(work), str(results)]
    subprocess.run(command, cwd=top, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
    return [json.loads(line.replace(str(work), "OUT")) for line in results.read_text().splitlines()]


# ---- what differs


def report(
    chosen: Sequence[Case],
    old: Sequence[dict[str, Any]],
    new: Sequence[dict[str, Any]],
    top: Path,
    limit: int,
) -> str:
    """The table, then each kind of difference with how often it was seen and a few of the calls."""
    rows: dict[str, Row] = defaultdict(Row)
    seen: dict[tuple[str, str], list[str]] = defaultdict(list)
    new_keys: dict[str, set[str]] = defaultdict(set)
    for number, (case, was, now) in enumerate(zip(chosen, old, new, strict=True)):
        row = rows[case.name]
        row.calls += 1
        row.well += now["code"] == 0
        row.seconds = [row.seconds[0] + was["seconds"], row.seconds[1] + now["seconds"]]
        for difference in _differences(row, was, now, top, number):
            added, isn, _ = difference.partition(" is new")
            if isn and added.startswith("JSON: "):
                new_keys[added.removeprefix("JSON: ")].add(case.name)
            else:
                seen[case.name, difference].append(case.source)
    lines = [" | ".join(_COLUMNS), *(" | ".join(map(str, (name, *row.cells))) for name, row in rows.items())]
    for key, names in sorted(new_keys.items()):
        lines.append(f"JSON has a new key {key}: {', '.join(sorted(names))}")
    for (name, difference), sources in sorted(seen.items()):
        lines.append(f"\n{name}: {difference}  [{len(sources)}]")
        lines += [f"    {source}" for source in sources[:limit]]
    return "\n".join(lines)


def _differences(
    row: Row, was: Mapping[str, Any], now: Mapping[str, Any], top: Path, number: int
) -> Iterator[str]:
    if now["crash"]:
        yield f"a traceback now: {now['crash']}"
    if was["code"] != now["code"]:
        yield f"exit {was['code']} -> {now['code']}: {_error(was)} -> {_error(now)}"
        return
    row.ended += 1
    declared = sorted(set(_unlike("", _read(was), _read(now))))
    row.declared += all(item.endswith(" is new") for item in declared)
    yield from declared
    if was["files"] == now["files"]:
        row.written += 1
    elif _digests(top / "old" / str(number)) == _digests(top / "new" / str(number)):
        row.arrays += 1
        yield f"files: {_files(was['files'], now['files'])}; the arrays are the same"
    else:
        row.other += 1
        yield f"ARRAYS differ: {_files(was['files'], now['files'])}"


def _error(result: Mapping[str, Any]) -> str:
    if result["crash"]:
        return str(result["crash"])[:100]
    errors = [line for line in result["stderr"].splitlines() if line.startswith("Error")]
    return _ANYTHING.sub("~", errors[0])[:140] if errors else "well"


def _read(result: Mapping[str, Any]) -> Any:
    try:
        return json.loads(result["stdout"])
    except ValueError:
        return result["stdout"]


def _unlike(where: str, was: Any, now: Any) -> Iterator[str]:
    """Each path at which two documents differ, with `[]` for the places of lists."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            inner = f"{where}.{key}" if _is_name(key) else f"{where}.~"
            if key in _MEASURED:
                continue
            if key not in now:
                yield f"JSON: {inner} is gone"
            elif key not in was:
                yield f"JSON: {inner} is new"
            else:
                yield from _unlike(inner, was[key], now[key])
    elif isinstance(was, list) and isinstance(now, list):
        one, two = _by_name(was), _by_name(now)
        if one is not None and two is not None:
            inner = _DEPTH.sub(".children[]", f"{where}[]")
            if one.keys() != two.keys():
                gone, new = (", ".join(sorted(a.keys() - b.keys())) for a, b in ((one, two), (two, one)))
                yield f"JSON: {inner} has other names: {_short(gone)} -> {_short(new)}"
            for name in one.keys() & two.keys():
                yield from _unlike(inner, one[name], two[name])
            return
        if len(was) != len(now):
            yield f"JSON: {where} has other entries"
            return
        for one, two in zip(was, now, strict=True):
            yield from _unlike(f"{where}[]", one, two)
    elif was != now:
        yield f"JSON: {where}: {_short(was)} -> {_short(now)}"


def _by_name(entries: Sequence[Any]) -> dict[str, Any] | None:
    """What has names of its own, by these; None where some entries have none."""
    named = {entry["name"]: entry for entry in entries if isinstance(entry, dict) and "name" in entry}
    return named if len(named) == len(entries) else None


def _is_name(key: str) -> bool:
    return key.isidentifier()


def _short(value: Any) -> str:
    return _ANYTHING.sub("~", str(value).replace("\n", " "))[:100]


def _files(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    same = Counter(_kind(name) for name in was if was[name] == now.get(name))
    other = Counter(_kind(name) for name in was if name in now and was[name] != now[name])
    gone = Counter(_kind(name) for name in was if name not in now)
    new = Counter(_kind(name) for name in now if name not in was)
    parts = {"the same": same, "other": other, "gone": gone, "new": new}
    return "; ".join(f"{word} {', '.join(sorted(kinds))}" for word, kinds in parts.items() if kinds)


def _kind(name: str) -> str:
    return re.sub(r"[0-9a-f]{32}|\d+", "N", name.rpartition("/")[2] if "/c/" not in name else "chunk")


def _digests(location: Path) -> Any:
    """What today's `hash` says of it; the error where it cannot be read."""
    from ckpttools import CheckpointError, hash

    try:
        return {array.name: (array.digest, array.dtype, array.shape) for array in hash(location).arrays}
    except CheckpointError as error:
        return str(error).replace(str(location.parent), "")


if __name__ == "__main__":
    main()
