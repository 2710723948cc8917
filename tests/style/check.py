"""Hold foreign-sounding constructions at the counts in `counts.json`, so that new text is free of them.

    python tests/style/check.py            fail if a construction occurs more often than recorded
    python tests/style/check.py --record   record the present counts, which may only fall
    python tests/style/check.py --show X   list the occurrences of one construction

The rules are those of CONTRIBUTING.md. Text is every string, comment and docstring of the package, the names
of tests, and the prose of the Markdown pages.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("counts.json")

# Name -> (pattern, what to write instead).
CONSTRUCTIONS: dict[str, tuple[str, str]] = {
    "is no": (
        r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer|more than|less than|later)",
        "is not a",
    ),
    "is not there": (r"\b(?:is|are) not there\b", "does not exist"),
    "of which": (r"\b[Oo]f (?:which|what|whom)\b", "whose, or a new sentence"),
    "so many": (r"\bso many\b", "N, or the number itself"),
    "persons": (r"\b(?:[Ww]hoever|[Nn]obody|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b", "the thing that acts"),
    "headless what": (
        r"(?:^|[.;] |\"\"\")What (?![^?.]*\?)[a-z]",
        "a noun: unmatched arrays, not what matches none",
    ),
    "fronted of": (
        r"(?:^|[.;] |\"\"\")Of (?:the |a |an |each |all |its |these |those |[a-z]+s )",
        "subject first",
    ),
    "said": (r"\b(?:said|told)\b", "declared, reported, stated"),
    "beside": (r"\bbeside\b", "next to, or along with"),
    "lies": (r"\b(?:lies|lie) (?:in|at|there|below|beside|under)\b", "is in"),
    "goes on": (r"\b(?:goes|went) on\b", "continues, resumes"),
    "left away": (r"\bleft away\b", "left out"),
    "way back": (r"\b[Tt]he way back\b", "the reverse conversion"),
    "prediction layers": (r"\bprediction layers?\b", "MTP layers"),
    "whole numbers": (r"\bwhole numbers?\b", "integers"),
    "defect of": (r"\ba defect of ckpttools\b", "internal error"),
    "British": (
        r"\b\w*(?:antis(?:e|ed|es|ing|ation)|ormalis|olour|ehaviour|eighbour|labelled|cancelled|favour)\w*",
        "American spelling",
    ),
    "test names": (r"\bdef test_(?:what|that|of|who|whatever|whoever|nothing|where)_\w+", "a statement"),
}


def texts() -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, text) for all text that readers see."""
    for path in sorted((ROOT / "ckpttools").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for offset, line in enumerate(node.value.splitlines()):
                    yield name, node.lineno + offset, line.strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield name, token.start[0], token.string.lstrip("# ")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield name, node.lineno, f"def {node.name}"
    for path in [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]:
        is_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.startswith("```"):
                is_code = not is_code
            elif not is_code and path.name != "CONTRIBUTING.md":
                yield path.relative_to(ROOT).as_posix(), number, re.sub(r"`[^`]*`", "`", line).lstrip("*|> -")


def occurrences() -> Iterator[tuple[str, str, int, str]]:
    """Yield (construction, file, line, text) for every occurrence."""
    patterns = {name: re.compile(pattern) for name, (pattern, _) in CONSTRUCTIONS.items()}
    for file, line, text in texts():
        for name, pattern in patterns.items():
            for _ in pattern.finditer(text):
                yield name, file, line, text


def main(arguments: list[str]) -> int:
    found = list(occurrences())
    if arguments[:1] == ["--show"]:
        for name, file, line, text in found:
            if name in arguments[1:]:
                print(f"{file}:{line}: {text[:120]}")
        return 0
    counts = {name: sum(entry[0] == name for entry in found) for name in CONSTRUCTIONS}
    if arguments == ["--record"]:
        RECORD.write_text(json.dumps(counts, indent=2) + "\n")
    allowed = json.loads(RECORD.read_text())
    more = [name for name, count in counts.items() if count > allowed.get(name, 0)]
    for name in more:
        print(f"'{name}' occurs {counts[name]} times, recorded: {allowed.get(name, 0)}")
        print(f"  write: {CONSTRUCTIONS[name][1]}")
        print(f"  python tests/style/check.py --show '{name}'")
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
