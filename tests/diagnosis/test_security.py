"""No input makes ckpt run code, and every statement in docs/tested-guarantees.md names an existing test."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ckpt, run, succeed
from support.locations import HF, ROOT
from support.safetensors_files import packed

import ckpttools
from ckpttools.core.user_code import CodeNotAllowedError
from ckpttools.plan.array_lines import ENCODED, OPS, decode_dataclass

CODE = """
from pathlib import Path

Path({mark!r}).write_text("the code ran")
FAMILY = None


def mapped(path, array):
    return path
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists only if the code in `evil` ran."""
    return tmp_path / "mark"


@pytest.fixture
def evil(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with code that creates the mark, even if an earlier test imported it."""
    monkeypatch.delitem(sys.modules, "evil_code", raising=False)
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    (directory / "evil_code.py").write_text(CODE.format(mark=str(mark)))
    return directory


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return planned(tmp_path, "cast", HF, tmp_path / "out", "--dtype", "float16")


def planned(tmp_path: Path, *words: object) -> Path:
    succeed("plan", *words, "-o", tmp_path / "plan")
    return tmp_path / "plan"


def edit(plan: Path, **changes: Any) -> None:
    """Change the header of a plan and update its checksum, which is a plain SHA-256."""
    lines = plan.read_bytes().rstrip(b"\n").split(b"\n")
    kind, header, sizes = json.loads(lines[0])
    lines[0] = json.dumps([kind, {**header, **changes}, sizes], separators=(",", ":")).encode()
    body = b"\n".join(lines[:-1]) + b"\n"
    plan.write_bytes(body + hashlib.sha256(body).hexdigest().encode() + b"\n")


def header(plan: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(plan.read_bytes().split(b"\n")[0])[1]
    return fields


def call(plan: Path, name: str, **arguments: object) -> dict[str, Any]:
    planned_arguments = header(plan)["call"]["arguments"]
    return {
        "name": name,
        "arguments": {key: planned_arguments[key] for key in ("source", "destination")} | arguments,
    }


FUNCTION, MODULE, FAMILY = "EVIL/evil_code.py:mapped", "evil_code:mapped", "EVIL/evil_code.py"
CALLS: dict[str, tuple[str, dict[str, object]]] = {
    "remap by a file": ("remap", {"map": FUNCTION}),
    "remap by a module": ("remap", {"map": MODULE}),
    "remap by a relative file": ("remap", {"map": "evil_code.py:mapped"}),
    "remap by a dotted file": ("remap", {"map": "./evil_code.py:mapped"}),
    "remap by a file without a function": ("remap", {"map": "EVIL/evil_code.py:"}),
    "convert by a file": ("convert", {"map": FUNCTION, "format": "safetensors"}),
    "convert by a module": ("convert", {"map": MODULE, "format": "safetensors"}),
    "family of a conversion": ("hf_to_maxtext", {"family": FAMILY}),
    "family as a path": ("hf_to_maxtext", {"family": "EVIL//./evil_code.py"}),
    "relative family": ("hf_to_maxtext", {"family": "./evil_code.py"}),
    "family of a version": ("remap", {"maxtext": "0.2.5", "family": FAMILY}),
    "family of the reverse conversion": ("maxtext_to_hf", {"family": FAMILY}),
}


class TestPlans:
    @pytest.mark.parametrize("has_tasks", [True, False])
    @pytest.mark.parametrize("called", CALLS)
    def test_code_named_by_plan_never_runs(
        self,
        called: str,
        has_tasks: bool,
        plan: Path,
        evil: Path,
        mark: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.syspath_prepend(str(evil))
        name, arguments = CALLS[called]
        named = {key: str(value).replace("EVIL", str(evil)) for key, value in arguments.items()}
        edit(plan, call=call(plan, name, **named), directory=str(evil), has_tasks=has_tasks)
        for words in (("--status",), ("--part", "0/1"), ("--publish",)):
            done = ckpt("run", plan, *words)
            assert not mark.exists(), words
        assert done.exit_code in (2, 3), done.output
        with pytest.raises(ckpttools.CheckpointError):
            ckpttools.publish_plan(plan)
        assert not mark.exists() and not (plan.parent / "out").exists()

    @pytest.mark.parametrize("called", ["remap by a file", "remap by a module", "convert by a file"])
    def test_error_names_code_and_command(
        self, called: str, plan: Path, evil: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(evil))
        name, arguments = CALLS[called]
        named = {key: str(value).replace("EVIL", str(evil)) for key, value in arguments.items()}
        edit(plan, call=call(plan, name, **named), has_tasks=False)
        done = ckpt("run", plan, "--part", "0/1")
        assert done.exit_code == 2
        assert f"ckpt run {plan} --part 0/1 --map '{named['map']}'" in join_lines(done.output)
        assert not mark.exists()
        with pytest.raises(CodeNotAllowedError, match="code that only a file names"):
            ckpttools.run_part(plan, "0/1")

    def test_unconfirmed_file_of_the_same_name_never_runs(
        self, plan: Path, evil: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A relative name that the user types is relative to the user's directory, not to the plan's."""
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "evil_code.py").write_text("def mapped(path, array):\n    return path\n")
        edit(plan, call=call(plan, "remap", map="evil_code.py:mapped"), directory=str(evil))
        monkeypatch.chdir(mine)
        run("run", plan, "--part", "0/1")
        done = ckpt("run", plan, "--publish", "--map", "evil_code.py:mapped")
        assert not mark.exists() and "make the plan again" in done.output, done.output

    def test_confirmed_function_runs(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("def mapped(path, array):\n    return f'x.{path}'\n")
        words = ("remap", HF, tmp_path / "out", "--map", tmp_path / "mine.py:mapped")
        plan = planned(tmp_path, *words)
        run("run", plan, "--part", "0/1")
        refused = join_lines(ckpt("run", plan, "--publish").output)
        command = refused.split("if you trust it: ", 1)[1].strip()
        run(*shlex.split(command)[1:])
        names = {".".join(map(str, path)) for path in ckpttools.open(tmp_path / "out").arrays}
        assert names == {f"x.{'.'.join(map(str, path))}" for path in ckpttools.open(HF).arrays}

    def test_confirmed_function_may_be_relocated(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("def mapped(path, array):\n    return f'x.{path}'\n")
        plan = planned(tmp_path, "remap", HF, tmp_path / "out", "--map", tmp_path / "mine.py:mapped")
        (tmp_path / "mine.py").rename(tmp_path / "moved.py")
        run("run", plan, "--part", "0/1")
        ckpttools.publish_plan(plan, map=f"{tmp_path / 'moved.py'}:mapped")
        assert (tmp_path / "out").is_dir()

    @pytest.mark.parametrize("option", [("--map", "x.py:f"), ("--family", "x.py")])
    def test_run_refuses_code_that_plan_does_not_name(self, option: tuple[str, str], plan: Path) -> None:
        run("run", plan, "--part", "0/1")
        assert f"does not run code of {option[0]}" in run("run", plan, "--publish", *option, code=2)

    @pytest.mark.parametrize("option", [("--map", "x.toml"), ("--family", "x.toml"), ("--family", "llama")])
    def test_run_refuses_arguments_that_are_not_code(self, option: tuple[str, str], plan: Path) -> None:
        for words in (("--part", "0/1"), ("--publish",)):
            assert "is for code that a plan names" in run("run", plan, *words, *option, code=2)

    def test_directory_of_plan_is_not_on_import_path(self, plan: Path, evil: Path, mark: Path) -> None:
        """An interpreter without a script imports from its current directory before all others."""
        for name in (
            *sys.stdlib_module_names,
            "zstandard",
            "tensorstore",
            "xxhash",
            "yaml",
            "huggingface_hub",
        ):
            (evil / f"{name}.py").write_text(CODE.format(mark=str(mark)))
        run("run", plan, "--part", "0/1")
        rules = evil / "rules.toml"
        rules.write_text('[[rules]]\nfrom = "a"\nto = "b"\n')
        edit(plan, call=call(plan, "remap", map="rules.toml"), directory=str(evil))
        script = f"import ckpttools; ckpttools.publish_plan({str(plan)!r})"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode != 0 and not mark.exists(), done.stderr

    @pytest.mark.parametrize("room", [*OPS, *ENCODED[2:]])
    @pytest.mark.parametrize("name", ["nothing:Known", "..os:system", ":", "x:y:z"])
    def test_plan_lines_import_only_known_names(self, room: str, name: str) -> None:
        with pytest.raises((ValueError, AttributeError)):
            decode_dataclass([f"{room}{name}", {}], (*OPS, *ENCODED))


def test_family_named_by_checkpoint_never_runs(
    tmp_path: Path, evil: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint records the file that described its family; another file may have that name by now."""
    monkeypatch.chdir(evil)
    code = (evil / "evil_code.py").read_text()
    (evil / "evil_code.py").write_text("from ckpttools.model_families.llama import FAMILY\n")
    run("convert", "hf-to-maxtext", HF, tmp_path / "maxtext", "--family", "./evil_code.py")
    (evil / "evil_code.py").write_text(code)
    for words in (("inspect", "tree"), ("doctor",), ("verify", HF), ("diff", HF), ("hash",)):
        ckpt(*words, tmp_path / "maxtext")
    refused = ckpt("convert", "maxtext-to-hf", tmp_path / "maxtext", tmp_path / "back")
    assert refused.exit_code == 2 and "converted with a family file" in join_lines(refused.output)
    assert not mark.exists()


@pytest.mark.parametrize("command", [("inspect", "tree"), ("doctor",), ("convert", "hf-to-maxtext")])
def test_code_named_by_config_never_runs(
    command: tuple[str, ...], tmp_path: Path, evil: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto_map`, with which transformers runs files of a repository (trust_remote_code)."""
    model = tmp_path / "model"
    model.mkdir()
    for file in HF.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    for name in ("modeling_llama.py", "configuration_llama.py", "llama.py", "conftest.py"):
        (model / name).write_text(CODE.format(mark=str(mark)))
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_llama.C", "AutoModelForCausalLM": "modeling_llama.M"}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(model)
    there = [tmp_path / "out"] if command[0] == "convert" else []
    assert ckpt(*command, model, *there).exit_code in (0, 1)
    assert not mark.exists()


@pytest.mark.parametrize(
    "op", ["__import__('os')", "os.system", "shift __import__('os')", "lambda x: x", "evil_code:mapped"]
)
def test_family_in_toml_runs_no_code(
    op: str, tmp_path: Path, evil: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(evil))
    file = tmp_path / "mine.toml"
    rows = f'rows = """\ntoken_embedder.embedding: vocab embed <-> embed.weight: vocab embed, {op}\n"""\n'
    sizes = '[sizes]\nembed = ["hidden_size"]\nvocab = ["vocab_size"]\n'
    file.write_text(f'name = "mine"\nmodel_types = ["mine"]\n{rows}\n{sizes}')
    done = ckpt("families", "check", file)
    assert done.exit_code == 3 and not mark.exists(), done.output
    assert op.split()[0] in done.output


@pytest.mark.parametrize("value", ["evil_code:mapped", "EVIL/evil_code.py:mapped", "__import__('evil_code')"])
def test_rules_in_toml_run_no_code(
    value: str, tmp_path: Path, evil: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(evil))
    (tmp_path / "rules.toml").write_text(
        f'[[rules]]\nfrom = "{{...}}"\nto = "{value.replace("EVIL", str(evil))}"\n'
    )
    ckpt("remap", HF, tmp_path / "out", "--map", tmp_path / "rules.toml")
    assert not mark.exists()


HOSTILE = ("<img src=x onerror=alert(1)>", "</script><script>alert(1)//", "--><svg onload=x>", "'\"&<b>")


@pytest.mark.parametrize("name", HOSTILE)
def test_report_contains_no_markup_from_data(name: str, tmp_path: Path) -> None:
    """Hostile names of arrays and directories add no elements to the page."""

    def elements(directory: str, array: str) -> list[str]:
        model = tmp_path / directory.replace("/", "|") / "m"
        model.mkdir(parents=True)
        content = packed({array: ("F32", (1,), bytes(4))}, metadata={"format": array})
        (model / "model.safetensors").write_bytes(content)
        succeed("inspect", "report", model, "-o", model.parent / "page.html")
        parser = ElementNames()
        parser.feed((model.parent / "page.html").read_text())
        return parser.names

    assert elements(name, name) == elements("plain", "plain")


class ElementNames(HTMLParser):
    """Collects the elements of a page and the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(" ".join([tag, *(name for name, _ in attrs)]))


PAGE = (ROOT / "docs" / "tested-guarantees.md").read_text()


def statements() -> Iterator[tuple[str, str, str]]:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 3 and "`tests/" in cells[2]:
            yield cells[0], cells[1], cells[2]


def test_page_covers_all_inputs() -> None:
    known = " ".join(f"{subject} {statement}" for subject, statement, _ in statements()).lower()
    for subject in (
        "plan",
        "pickle",
        "toml",
        "html",
        "token",
        "symlink",
        "escape",
        "regular expression",
        "config.json",
    ):
        assert subject in known, subject


@pytest.mark.parametrize(("subject", "statement", "proof"), list(statements()))
def test_every_security_statement_has_a_test(subject: str, statement: str, proof: str) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", proof):
        tree = ast.parse((ROOT / file).read_text())
        if name:
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            assert set(name.split("::")) <= names, (subject, name)


def join_lines(text: str) -> str:
    """Join the lines of a wrapped message."""
    return re.sub(r"\s+", " ", text)
