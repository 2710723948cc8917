"""docs/many-hosts.md works as written: manifests have the fields that Kubernetes knows, scripts run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.command_line import ckpt
from support.locations import GOLDEN, HF, ROOT

PAGE = (ROOT / "docs" / "many-hosts.md").read_text()
SHARDED = GOLDEN / "llama3.1" / "hf_sharded"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def fields(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
AMOUNTS = fields(
    cpu={"type": "string", "pattern": r"^\d+m?$"}, memory={"type": "string", "pattern": r"^\d+[KMGT]i$"}
)
# The fields that the page uses, as batch/v1 (Kubernetes 1.33) and jobset.x-k8s.io/v1alpha2 define them.
CONTAINER = fields(
    ["name", "image"],
    name=NAME,
    image=TEXT,
    command={"type": "array", "items": TEXT},
    resources=fields(requests=AMOUNTS, limits=AMOUNTS),
)
POD = fields(
    ["containers", "restartPolicy"],
    restartPolicy={"enum": ["Never", "OnFailure"]},
    serviceAccountName=NAME,
    containers={"type": "array", "items": CONTAINER, "minItems": 1},
)
JOB = fields(
    ["template"],
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions=NUMBER,
    parallelism=NUMBER,
    backoffLimit=NUMBER,
    backoffLimitPerIndex=NUMBER,
    template=fields(["spec"], spec=POD),
)
REPLICATED = fields(["name", "template"], name=NAME, replicas=NUMBER, template=fields(["spec"], spec=JOB))
SET = fields(
    ["replicatedJobs"],
    failurePolicy=fields(maxRestarts=NUMBER),
    replicatedJobs={"type": "array", "items": REPLICATED, "minItems": 1},
)
KINDS = {"Job": ("batch/v1", JOB), "JobSet": ("jobset.x-k8s.io/v1alpha2", SET)}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_documented_manifests_and_commands_are_valid(text):
    manifest = yaml.safe_load(text)
    version, spec = KINDS[manifest["kind"]]
    schema = fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind=TEXT,
        metadata=fields(["name"], name=NAME),
        spec=spec,
    )
    assert [error.message for error in Draft202012Validator(schema).iter_errors(manifest)] == []
    job = manifest["spec"]
    job = job["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in job else job
    pod = job["template"]["spec"]
    # What Kubernetes asks of a limit for each index.
    assert "backoffLimitPerIndex" not in job or (
        job["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"
    )
    words = pod["containers"][0]["command"]
    assert words[words.index("--parts") + 1] == str(job["completions"]) == str(job["parallelism"])
    check_command(words)


def check_command(words):
    """The options are those of `ckpt run`: it gets as far as to look for the plan."""
    there = [word if not word.endswith(".plan") else "/nowhere/llama.plan" for word in words]
    result = ckpt(*there[1:], JOB_COMPLETION_INDEX="3")
    assert result.exit_code == 2 and "/nowhere/llama.plan does not exist" in result.output, result.output


def test_documented_xpk_command_starts_one_part_per_machine():
    (text,) = [block for block in blocks("shell") if "xpk" in block]
    words = shlex.split(text.replace("\\\n", " "))
    assert words[:3] == ["xpk", "workload", "create"]
    options = dict(word.split("=", 1) for word in words[3:] if "=" in word)
    command = shlex.split(options["--command"])
    assert command[command.index("--parts") + 1] == options["--device-type"].rsplit("-", 1)[1]
    assert options["--num-slices"] == "1"
    check_command(command)


@pytest.fixture
def shell(tmp_path):
    """Runs a script with the environment that is given, and `ckpt` in its path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ckpt").write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpttools "$@"\n')
    (programs / "ckpt").chmod(0o755)

    def run(script, *arguments, **variables):
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **variables}
        return subprocess.run(
            ["bash", "-s", *arguments],
            input=script,
            env=environment,
            text=True,
            capture_output=True,
            timeout=120,
        )

    return run


def test_documented_slurm_script_runs(tmp_path, shell):
    (script,) = blocks("bash")
    script = script.replace("--parts 16", "--parts 3")
    source, there = tmp_path / "llama", tmp_path / "llama-maxtext"
    shutil.copytree(SHARDED, source)
    plan = tmp_path / "llama.plan"
    assert ckpt("plan", "convert", "hf-to-maxtext", source, there, "-o", plan).exit_code == 0
    first = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "0"}
    for number in ("2", "0"):
        done = shell(script, str(plan), SLURM_ARRAY_TASK_ID=number, **first)
        assert done.returncode == 0 and "not published" in done.stderr, done.stderr
    # One that is done again alone: its array has one task, and begins with it.
    again = {"SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_MIN": "1"}
    done = shell(script, str(plan), SLURM_ARRAY_TASK_ID="1", **again)
    assert done.returncode == 0 and "13 arrays" in done.stdout, done.stderr
    assert (there / "0" / "items" / "manifest.ocdbt").is_file()
    assert shell(script).returncode == 1


def test_documented_shell_loop_runs(tmp_path, shell):
    (script,) = [block for block in blocks("shell") if "seq" in block]
    plan = tmp_path / "llama.plan"
    there = tmp_path / "out"
    assert ckpt("plan", "cast", HF, there, "--dtype", "float16", "-o", plan).exit_code == 0
    done = shell(
        script.replace("/data/llama.plan", str(plan)).replace("seq 0 3", "seq 0 1").replace("/4", "/2")
    )
    assert done.returncode == 0 and there.is_dir(), done.stderr
