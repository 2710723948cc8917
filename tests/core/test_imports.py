"""Who may import whom, and which words may stand where: read from the source, not from running it."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import ckpttools

ROOT = Path(ckpttools.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Room -> what of this package it may import beside itself and `core`: rooms that stand before it.
MAY = {
    "core": set(),
    "stores": set(),
    "array": {"stores"},
    "quantized": {"array"},
    "roles": {"array"},
    "mapping": {"array", "quantized"},
    "model_families": {"array", "mapping"},
    "codecs": {"array"},
    "formats": {"array", "stores", "codecs"},
    "plan": {"array", "stores", "formats.base", "formats.placement"},
    "run": {
        "array",
        "stores",
        "formats.base",
        "formats.placement",
        "plan",
    },
    "transforms": {"array", "quantized", "mapping", "roles.buffers"},
    "maxtext": {
        "array",
        "quantized",
        "roles",
        "mapping",
        "model_families",
        "stores",
        "formats",
        "plan",
        "transforms",
    },
    "adapters": {
        "array",
        "quantized",
        "mapping",
        "model_families",
        "stores",
        "formats",
        "transforms",
        "maxtext",
    },
    "checks": {
        "array",
        "quantized",
        "roles",
        "mapping",
        "model_families",
        "stores",
        "formats",
        "transforms",
        "maxtext",
        "adapters",
    },
    "sharding": {
        "array",
        "roles",
        "mapping",
        "model_families",
        "stores",
        "formats",
        "plan",
        "run",
        "transforms",
        "maxtext",
    },
    "family_check": {"array", "mapping", "model_families", "stores", "formats", "maxtext"},
    "digest": {"array", "roles", "stores", "plan", "run.events", "run.scanning", "maxtext"},
    "compare": {
        "array",
        "roles",
        "mapping",
        "model_families",
        "stores",
        "plan",
        "run.scanning",
        "maxtext",
        "checks",
        "digest",
    },
    "inspection": {
        "stores.base",
        "stores.costs",
        "array",
        "quantized",
        "roles",
        "mapping",
        "model_families",
        "plan.pieces",
        "run.scanning",
        "maxtext",
        "adapters",
        "sharding",
        "digest.pairing",
    },
    "diagnosis": {
        "array",
        "quantized",
        "stores",
        "codecs",
        "formats",
        "checks",
        "adapters.peft",
        "adapters.from_jax",
        "run.scanning",
        "inspection.layer_rows",
        "inspection.stats",
    },
    "runs": {"array", "stores", "formats", "plan", "run", "transforms", "maxtext"},
    "copying": {
        "array",
        "stores",
        "formats",
        "run.overlap_check",
        "run.bindings",
        "run.threads",
        "digest.digest",
    },
    "api": {
        "array",
        "quantized",
        "roles",
        "model_families",
        "stores",
        "codecs",
        "formats",
        "plan",
        "run",
        "transforms",
        "maxtext",
        "adapters",
        "sharding",
        "family_check",
        "digest",
        "compare",
        "inspection",
        "checks",
        "diagnosis",
        "copying",
        "runs",
    },
}
# The rooms that may import all others: the command line, what tests and plug-ins share, and the two doors.
OPEN = {"cli", "testing", "__init__", "__main__"}
ROOMS = {*MAY, *OPEN}
# Words from outside -> rooms that may use them.
ONLY_IN = {
    "struct": {"formats", "stores"},
    "tensorstore": {"codecs"},
    "threading": {"testing", "array", "run", "digest", "compare", "stores", "copying", "sharding", "cli"},
    "concurrent": {"run", "stores", "sharding", "cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "xxhash": {"digest", "run"},
    "hypothesis": {"testing"},
}
MECHANISM = ("__init__", "family", "file", "registry", "hf_defaults", "summary", "toml_write")
BRANCHING = (
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
HEAVY = {"jax", "orbax", "tensorstore", "huggingface_hub", "transformers", "torch"}
DATA = [path for path in FILES if path.parent.name == "model_families" and path.stem not in MECHANISM]


def name(path):
    return path.relative_to(ROOT).as_posix()


def room(path):
    """The top-level package that a file belongs to, or the module, for those that are in none."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree(path):
    """What a file says: read by the first rule that asks, once for all."""
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path):
    """All that a file consists of; walking costs more than parsing."""
    return tuple(ast.walk(tree(path)))


def imported(nodes):
    """Every dotted name that is imported by these."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def all_imported(path):
    return tuple(imported(nodes(path)))


def packages(path):
    """The foreign and own packages of which a file imports something."""
    return {target.split(".")[0] for target in all_imported(path)}


def in_rooms(*rooms):
    return [path for path in FILES if room(path) in rooms]


def outside(*rooms):
    return [path for path in FILES if room(path) not in rooms]


def allowed(target, own, may):
    """Whether a file of room `own` may import `target`, a name without `ckpttools.`."""
    return any(target == item or target.startswith(f"{item}.") for item in {own, "core", *may})


def test_import_rules_detect_violations():
    assert len(FILES) > 40
    assert len(DATA) >= 5
    assert not allowed("formats.orbax.format.FORMAT", "plan", MAY["plan"])
    assert allowed("formats.base.Layout", "plan", MAY["plan"])
    assert not allowed("planning", "plan", set())


def targets(path):
    """What a file imports of this package, without `ckpttools.`."""
    return [item.removeprefix("ckpttools.") for item in all_imported(path) if item.startswith("ckpttools.")]


def test_modules_and_packages_match_the_import_rules():
    assert {room(path) for path in FILES} == ROOMS
    assert {name(path) for path in FILES if "/" not in name(path)} == {"__init__.py", "__main__.py"}


# What touches files itself, and what for: no checkpoint.
TOUCHES_FILES = {
    "__main__.py": "the terminal",
    "api/conversion_fn.py": "the environment",
    "api/plans.py": "the import path",
    "api/resolve.py": "the environment",
    "plan/parts.py": "the environment",
    "plan/task.py": "the number of cores",
    "cli/__init__.py": "the environment",
    "cli/browse.py": "the terminal",
    "cli/browser.py": "the environment",
    "cli/error_boundary.py": "the terminal",
    "cli/main.py": "the environment",
    "cli/completion.py": "startup files of shells",
    "cli/demo.py": "a temporary directory, and Orbax itself",
    "cli/output.py": "the terminal",
    "cli/signals.py": "the terminal",
    "core/argument_checks.py": "what a path is",
    "core/process_exit.py": "processes",
    "core/plugins.py": "installed packages",
    "model_families/file.py": "the user's family files",
    "model_families/registry.py": "the user's family files",
    "core/process_memory.py": "/proc",
    "run/worker_processes.py": "processes",
    "transforms/functions.py": "the user's modules",
    "transforms/rename.py": "the user's rules",
}
FILE_MODULES = {"os", "pathlib", "shutil", "glob", "tempfile", "stat", "fcntl"}


def test_only_stores_access_files():
    touching = {
        name(path)
        for path in outside("stores", "testing")
        if packages(path) & FILE_MODULES
        or any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
            for node in nodes(path)
        )
    }
    assert touching == set(TOUCHES_FILES)


def test_only_stores_import_the_local_store():
    assert [
        f"{name(path)} imports {target}"
        for path in outside("stores")
        for target in targets(path)
        if target.startswith("stores.local")
    ] == []


def test_packages_import_only_allowed_packages():
    assert [
        f"{name(path)} imports {target}"
        for path in in_rooms(*MAY)
        for target in targets(path)
        if not allowed(target, room(path), MAY[room(path)])
    ] == []


def test_architecture_map_lists_packages_in_order():
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*MAY, "cli", "testing"]


def test_package_dependencies_are_acyclic():
    """So that none imports another that imports it."""
    rooms = list(MAY)
    assert [
        f"{room} may import {above}"
        for location, room in enumerate(rooms)
        for above in rooms[location:]
        if above in {item.split(".")[0] for item in MAY[room]}
    ] == []


def test_package_does_not_import_the_command_line():
    assert [
        f"{name(path)} imports {target}"
        for path in outside("cli", "testing", "__main__")
        for target in targets(path)
        if target.split(".")[0] in ("cli", "testing")
    ] == []


def test_third_party_imports_stay_in_allowed_packages():
    assert [
        f"{name(path)} imports {package}, which belongs in {ONLY_IN[package]}"
        for path in FILES
        for package in packages(path) & set(ONLY_IN)
        if room(path) not in ONLY_IN[package]
    ] == []


def test_only_the_command_line_prints():
    assert [
        f"{name(path)}:{node.lineno}"
        for path in outside("cli")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ] == []


def test_heavy_packages_are_not_imported_at_module_level():
    """jax, orbax, tensorstore and huggingface_hub are imported inside the functions that need them."""
    assert [
        f"{name(path)}:{node.lineno} imports {target}"
        for path in outside("testing", "sharding")
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in imported([node])
        if target.split(".")[0] in HEAVY
    ] == []


# Statements of a function, from the first line after its docstring to the last.
LONGEST = 42
# File and function -> how many lines it has. What is here may become shorter and go, never longer.
LONGER: dict[str, int] = {}


def test_type_checkers_see_all_public_names():
    """Its names are listed twice: as imports for them, and by modules that are imported at first use."""
    seen = {
        (node.module, alias.name)
        for node in nodes(ROOT / "__init__.py")
        if isinstance(node, ast.ImportFrom) and node.module.startswith("ckpttools.")
        for alias in node.names
    }
    assert seen == {(home, name) for name, home in ckpttools._MODULE_OF.items()}


def test_functions_fit_on_a_screen():
    longer = {
        f"{name(path)}:{node.name}": length
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (length := lines_of(node)) > LONGEST
    }
    assert longer == LONGER


def lines_of(function):
    declared = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return declared[-1].end_lineno - declared[0].lineno + 1 if declared else 0


def test_class_names_are_unique():
    """A leading underscore makes no other name: who reads it aloud says the same."""
    homes = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(name(path))
    assert {item: files for item, files in homes.items() if len(files) > 1} == {}


def test_benchmarks_import_existing_names():
    """They are run by hand, and seldom."""
    assert [
        f"{path.name} imports {module}.{item.name}"
        for path in sorted((ROOT.parent / "benchmarks").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("ckpttools")
        for item in node.names
        if not hasattr(import_module(module), item.name)
        and not (ROOT.parent / module.replace(".", "/") / f"{item.name}.py").exists()
    ] == []


def test_families_are_data():
    """No branch, loop, function or arithmetic on arrays: adding a family is writing down what it is."""
    assert [
        f"{name(path)}: {type(node).__name__}"
        for path in DATA
        for node in nodes(path)
        if isinstance(node, BRANCHING)
    ] == []
    assert {
        name(path): result
        for path in DATA
        if (result := packages(path) & {"numpy", "re", "ml_dtypes", "jax"})
    } == {}


def test_mapping_packages_use_no_regular_expressions():
    rooms = in_rooms("mapping", "model_families", "transforms")
    assert [name(path) for path in rooms if packages(path) & {"re", "regex"}] == []


def test_only_commands_name_flags():
    """The library says `option("dtype")`; a flag in one of its sentences is of a command that it names."""
    assert [
        f"{name(path)}: {text}"
        for path in outside("cli", "core", "testing")
        for text in set(sentences(path)) - docstrings(path)
        if re.search(r"(^|\S\s)--[a-z]", text) and len(text.split()) > 3 and not _COMMAND.search(text)
    ] == []


def sentences(path):
    """The texts of a file, f-strings without what is filled in."""
    formatted = [node.values for node in nodes(path) if isinstance(node, ast.JoinedStr)]
    parts = {id(item) for values in formatted for item in values}
    whole = [[node] for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in parts]
    for values in (*formatted, *whole):
        texts = (item.value for item in values if isinstance(item, ast.Constant))
        yield "".join(text for text in texts if isinstance(text, str))


# The first word of a command line.
_COMMAND = re.compile(r"\b(ckpt|hf|vllm|sbatch|az|aws|gcloud)\b")


def test_mapping_has_no_direction_specific_code():
    twins = ("to_hf", "to_maxtext", "saving_to", "reverse")
    assert [
        f"{name(path)}:{node.lineno} {word}"
        for path in in_rooms("mapping", "model_families")
        for node in nodes(path)
        for field in ("id", "attr", "name", "arg")
        if (word := getattr(node, field, None)) and any(twin in word.lower() for twin in twins)
    ] == []


def test_model_names_appear_only_in_families():
    assert [
        f"{name(path)}: {text}"
        for path in outside("model_families", "testing", "cli")
        for text in texts(path) - docstrings(path)
        if "model.layers" in text
    ] == []


def texts(path):
    constants = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def docstrings(path):
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {ast.get_docstring(node, clean=False) for node in nodes(path) if isinstance(node, documented)}


def test_tests_do_not_import_other_tests():
    """What two of them need is in tests/support; tests/crash and tests/fuzz have machinery of their own."""
    tests = Path(__file__).parents[1]
    beside = {path.stem for path in tests.glob("*.py")} - {"conftest"}
    assert [stem for stem in sorted(beside) if not stem.startswith("test_")] == []
    assert [
        f"{path.name} imports {module}"
        for path in sorted(tests.rglob("*.py"))
        for module in re.findall(r"^ *(?:from|import) ((?:\w+\.)*test_\w+)", path.read_text(), re.MULTILINE)
    ] == []


def test_fixtures_stay_small():
    files = (path for path in (ROOT.parent / "fixtures").rglob("*") if path.is_symlink() or path.is_file())
    assert sum(path.lstat().st_size for path in files) < 20_000_000
