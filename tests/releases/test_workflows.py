"""Workflow files of GitHub, and other files that services read: their schemas, and the names in them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.locations import ROOT, TESTS

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(path: Path) -> list[str]:
    """The shell lines of a workflow, each with all values of its matrix."""
    result = []
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        cases = matrix.get("include") or [
            dict(zip(matrix, values, strict=True)) for values in product(*matrix.values())
        ]
        lines = [step["run"] for step in job["steps"] if "run" in step]
        for case, line in product(cases, lines):
            for name, value in case.items():
                line = line.replace(f"${{{{ matrix.{name} }}}}", value)
            result.append(line)
    return result


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_file_fits_its_schema(schema, files):
    from check_jsonschema import main

    assert files
    result = CliRunner().invoke(main, ["--builtin-schema", schema, *map(str, files)])
    assert result.exit_code == 0, result.output


def test_hooks_are_valid_and_start_installed_programs():
    from pre_commit.clientlib import load_config

    (local,) = load_config(ROOT / ".pre-commit-config.yaml")["repos"]
    for hook in local["hooks"]:
        program, *arguments = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/")
        assert all((ROOT / each).exists() for each in arguments if each.endswith(".py"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_uses_existing_targets_and_tests(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in commands(path):
        subprocess.run(["bash", "-n", "-c", line], check=True)
        words = shlex.split(line)
        made = [word for word in words[1:] if "=" not in word] if words[0] == "make" else []
        assert {*made} <= {*targets, ".venv/.installed"}, line
        assert all((ROOT / name).exists() for name in re.findall(r"tests/[\w/.]+\w", line)), line


def test_nightly_oracle_covers_every_configuration():
    sys.path.insert(0, str(TESTS))
    from oracle.cases import configurations, named

    families = re.findall(r"make oracle .*FAMILY=(\S+)", "\n".join(commands(WORKFLOWS[-1])))
    assert set(named(",".join(families).split(","))) == set(configurations())
