"""Docstrings name the arguments that their functions have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ckpttools

_PACKAGE = Path(ckpttools.__file__).parent
_ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)


def _documented(node: ast.AST) -> Iterator[tuple[ast.arguments, str]]:
    """Yield the arguments of a function or a constructor, and the section that describes them."""
    call = node
    if isinstance(node, ast.ClassDef):
        call = next((item for item in node.body if getattr(item, "name", "") == "__init__"), node)
    if isinstance(call, ast.FunctionDef):
        text = ast.get_docstring(node) or ""
        _, found, section = text.partition("\nArgs:\n")
        if found:
            yield call.args, section.partition("\n\n")[0]


def test_documented_arguments_exist():
    unknown = []
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for arguments, section in _documented(node):
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                known = {item.arg for item in (*named, arguments.vararg) if item}
                listed = [name.strip("* ") for entry in _ENTRY.findall(section) for name in entry.split(",")]
                # Arguments of `**options` are declared elsewhere.
                if arguments.kwarg is None:
                    unknown += [f"{path.name}: {node.name}({name})" for name in listed if name not in known]
    assert not unknown
