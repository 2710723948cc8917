"""Write the branch coverage of each room, as `coverage combine` left it, to the table in CONTRIBUTING.md."""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def table() -> str:
    """Return the table: statements and branches of each room, and how many of them ran."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "coverage.json")
        words = [sys.executable, "-m", "coverage", "json", "--quiet", "--ignore-errors", "-o", str(report)]
        subprocess.run(words, cwd=ROOT, check=True)
        files = json.loads(report.read_text())["files"]
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for name, content in files.items():
        parts = Path(name).parts
        for room in (parts[1] if len(parts) > 2 else "top level", "all"):
            counts = [content["summary"][key] for key in COUNTS]
            rooms[room] = [total + count for total, count in zip(rooms[room], counts, strict=True)]
    lines = ["| room | statements | run | branches | run |", "|---|--:|--:|--:|--:|"]
    for room, (statements, ran, branches, taken) in rooms.items():
        shares = f"{ran / max(statements, 1):.0%}", f"{taken / max(branches, 1):.0%}"
        lines.append(f"| {room} | {statements:,} | {shares[0]} | {branches:,} | {shares[1]} |")
    all_rooms = next(line for line in lines if line.startswith("| all |"))
    return "\n".join([*lines[:2], *sorted(line for line in lines[2:] if line != all_rooms), all_rooms])


if __name__ == "__main__":
    marked = re.compile(r"(<!-- coverage -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", PAGE.read_text()))
