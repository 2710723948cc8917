"""Who may import whom, and which words may stand where: read from the source, not from running it."""

import ast
from pathlib import Path

import pytest

import ckpttools.errors

ROOT = Path(ckpttools.errors.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

BASE = {"names", "errors", "dtypes", "region"}
# Room -> rooms of this package that it may import, itself left out.
MAY = {
    "names": set(),
    "errors": {"names"},
    "dtypes": {"errors"},
    "region": {"errors"},
    "entry_points": {"errors"},
    "ir": BASE | {"notes"},
    "mapping": BASE | {"ir"},
    "families": BASE | {"ir", "mapping"},
    "family_check": BASE | {"ir", "mapping", "families", "formats", "model", "model_files"},
    "notes": set(),
    "transforms": BASE | {"ir", "mapping", "notes"},
    "stores": BASE,
    "formats": BASE | {"ir", "stores"},
    "plan": BASE | {"ir", "formats.base", "formats.placement", "notes"},
    "run": BASE | {"ir", "stores", "formats.base", "formats.placement", "plan"},
    "doctor": BASE | {"ir", "formats", "stores", "run.staging"},
    "inspect": BASE | {"ir", "mapping", "families", "plan.pieces", "run.scanning"},
    "prove": BASE
    | {"ir", "mapping.values", "stores.memory", "transforms.restack", "plan", "run.events", "run.scanning"},
    "sharding": BASE | {"ir"},
}
# Files that may import more than their room.
MAY_ALSO = {"families/registry.py": {"entry_points"}, "formats/registry.py": {"entry_points"}}
ROOMS = set(MAY) | {"cli", "testing"}
# Words from outside -> rooms that may use them.
ONLY_IN = {
    "struct": {"formats", "stores"},
    "tensorstore": {"formats", "stores"},
    "threading": {"run", "prove", "stores", "cli"},
    "concurrent": {"run", "stores", "cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "xxhash": {"prove"},
    "hypothesis": {"testing"},
}
MECHANISM = ("__init__", "family", "file", "registry", "summary", "toml_read", "toml_values", "toml_write")
DATA = [path for path in (ROOT / "families").glob("*.py") if path.stem not in MECHANISM]


def name(path):
    return path.relative_to(ROOT).as_posix()


def room(path):
    """The top-level package or module that a file belongs to; "" for those that see everything."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return first if first in ROOMS else ""


def parsed(path):
    return ast.parse(path.read_text(), name(path))


def imported(tree):
    """Every dotted name that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(tree):
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def in_rooms(*rooms):
    return pytest.mark.parametrize("path", [path for path in FILES if room(path) in rooms], ids=name)


def allowed(target, own, may):
    """Whether a file of room `own` may import `target`, a name without `ckpttools.`."""
    return any(target == each or target.startswith(f"{each}.") for each in {own, *may})


def test_the_rules_find_something():
    assert len(FILES) > 40
    assert len(DATA) >= 5
    assert not allowed("formats.orbax.FORMAT", "plan", MAY["plan"])
    assert allowed("formats.base.Layout", "plan", MAY["plan"])
    assert not allowed("planning", "plan", set())


@pytest.mark.parametrize("path", FILES, ids=name)
def test_who_imports_whom(path):
    own = room(path)
    may = MAY[own] | MAY_ALSO.get(name(path), set()) if own in MAY else None
    for each in imported(parsed(path)):
        if each.startswith("ckpttools."):
            target = each.removeprefix("ckpttools.")
            assert may is None or allowed(target, own, may), f"{own} may not import {target}"
            top = target.split(".")[0]
            assert own in ("cli", "testing") or top not in ("cli", "testing"), (
                f"{name(path)} imports {target}"
            )


@pytest.mark.parametrize("path", FILES, ids=name)
def test_foreign_packages_stay_in_their_rooms(path):
    for target in imported(parsed(path)):
        rooms = ONLY_IN.get(target.split(".")[0])
        assert rooms is None or room(path) in rooms, f"{target} belongs in {rooms}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_the_command_line_prints(path):
    if room(path) != "cli":
        assert "print" not in called(parsed(path))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_heavy_at_import(path):
    """jax, orbax, tensorstore and huggingface_hub are imported inside the functions that need them."""
    if room(path) in ("testing", "sharding"):
        return
    tops = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {target.split(".")[0] for node in tops for target in imported(ast.Module([node], []))}
    assert not names & {"jax", "orbax", "tensorstore", "huggingface_hub", "transformers", "torch"}


@pytest.mark.parametrize("path", DATA, ids=name)
def test_families_are_data(path):
    """No branch, loop, function or arithmetic on arrays: adding a family is writing down what it is."""
    code = (
        ast.If,
        ast.IfExp,
        ast.For,
        ast.While,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.Lambda,
        ast.comprehension,
        ast.Try,
        ast.ClassDef,
        ast.Match,
    )
    tree = parsed(path)
    assert [type(node).__name__ for node in ast.walk(tree) if isinstance(node, code)] == []
    assert not {target.split(".")[0] for target in imported(tree)} & {"numpy", "re", "ml_dtypes", "jax"}


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) in ("mapping", "families", "transforms")], ids=name
)
def test_no_regular_expressions_in_what_maps(path):
    assert not {target.split(".")[0] for target in imported(parsed(path))} & {"re", "regex"}


@in_rooms("mapping", "families")
def test_no_twins_for_the_two_directions(path):
    words = set()
    for node in ast.walk(parsed(path)):
        words |= {getattr(node, field, None) for field in ("id", "attr", "name", "arg")} - {None}
    twins = ("to_hf", "to_maxtext", "saving_to", "reverse")
    assert [word for word in words if any(twin in word.lower() for twin in twins)] == []


@pytest.mark.parametrize("path", FILES, ids=name)
def test_model_names_stand_in_families_only(path):
    if room(path) not in ("families", "testing", "cli"):
        texts = [
            node.value
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        documented = {
            ast.get_docstring(node, clean=False)
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert [text for text in texts if "model.layers" in text and text not in documented] == []
