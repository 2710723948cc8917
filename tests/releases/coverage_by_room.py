"""Write the coverage of the named rooms, as `coverage combine` left it, to the table in CONTRIBUTING.md."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
HEAD = "| room | statements | run | branches | run |\n|---|--:|--:|--:|--:|\n"


def line(room: str) -> str:
    """Return the line of a room: its statements and branches, and how many of them ran."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "coverage.json")
        words = ("json", "--quiet", "--include", f"*/ckpttools/{room}/*", "-o", str(report))
        subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT, check=True)
        total = json.loads(report.read_text())["totals"]
    statements, branches = total["num_statements"], total["num_branches"]
    lines, taken = total["covered_lines"] / statements, total["covered_branches"] / branches
    return f"| `{room}` | {statements:,} | {lines:.0%} | {branches:,} | {taken:.0%} |\n"


if __name__ == "__main__":
    marked = re.compile(r"(<!-- coverage -->\n).*?(<!-- end -->)", re.DOTALL)
    table = HEAD + "".join(map(line, sys.argv[1:]))
    PAGE.write_text(marked.sub(lambda found: f"{found[1]}{table}\n{found[2]}", PAGE.read_text()))
