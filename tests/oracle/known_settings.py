"""Lists MaxText's settings by name and type: `known_settings.py NEWEST [VERSION=OLDER ...]`.

NEWEST and OLDER are directories of the package `maxtext`, as a wheel or its repository has them. The list is
ckpttools/maxtext/config/setting_kinds.txt. It marks names that only an older version has, or lacks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap

HEAD = """\
# MaxText's settings: a type, then the names that have it. `?` may be null; `>0` and `>=0` as MaxText has
# them, or as sizes are; NAME-VERSION is not in that version, NAME+VERSION in that one alone. Made by
# tests/oracle/known_settings.py from configs/types.py of MaxText 0.2.5 and e591f30.
"""
WHOLE = ("MaxTextConfig", "RLConfig")
# Read by what loads the files, and not kept.
OF_FILES = {"base_config": "text", "override_logical_axis_rules": "bool"}
PLAIN = {"bool": "bool", "int": "int", "float": "float", "str": "text", "PathStr": "text", "dict": "group"}
BOUNDED = {"PositiveInt": "int>0", "NonNegativeInt": "int>=0", "NonNegativeFloat": "float>=0"}
LENGTHS = re.compile(r"(^|_)(dim|heads|layers|experts|size|rank|length|tok|topk|factor|timescale)(_|$)")


class Sources:
    """Classes, enumerations and aliases of one version."""

    def __init__(self, package: Path) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.words: dict[str, tuple[str, ...]] = {}
        for file in ("common/common_types.py", "configs/types.py"):
            for node in ast.parse((package / file).read_text()).body:
                self._take(node)

    def _take(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
            values = [each.value for each in node.body if isinstance(each, ast.Assign)]
            words = [each.value for each in values if isinstance(each, ast.Constant)]
            if any("Enum" in ast.unparse(base) for base in node.bases):
                self.words[node.name] = tuple(map(str, words))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            self.words[ast.unparse(node.targets[0])] = _literal(node.value)

    def settings(self) -> dict[str, str]:
        """Name -> type; those of groups with the group's name before theirs."""
        found = dict(OF_FILES)
        for name in WHOLE:
            found |= dict(self._of_class(name, ""))
        return found

    def _of_class(self, name: str, group: str) -> Iterator[tuple[str, str]]:
        node = self.classes[name]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                yield from self._of_class(base.id, group)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                of = ast.unparse(each.annotation)
                yield group + each.target.id, self._type(each)
                if of in self.classes and of not in self.words:
                    yield from self._of_class(of, f"{group}{each.target.id}.")

    def _type(self, node: ast.AnnAssign) -> str:
        annotation = ast.unparse(node.annotation)
        parts = [each.strip() for each in re.sub(r"^Optional\[(.*)\]$", r"None | \1", annotation).split("|")]
        kinds = {self._plain(each) for each in parts if each != "None"}
        kind = kinds.pop() if len(kinds) == 1 else "any"
        if kind in ("int", "float"):
            kind += self._bound(node)
        return kind + ("?" if "None" in parts else "")

    def _plain(self, annotation: str) -> str:
        if annotation.startswith("Literal["):
            return _choice(_literal(ast.parse(annotation, mode="eval").body))
        if annotation in self.words:
            return _choice(self.words[annotation])
        if annotation.startswith(("list", "tuple")):
            return "list"
        if annotation in self.classes or annotation.startswith("dict"):
            return "group"
        return {**PLAIN, **BOUNDED}.get(annotation, "any")

    @staticmethod
    def _bound(node: ast.AnnAssign) -> str:
        said = {}
        default = node.value
        if isinstance(default, ast.Call):
            said = {each.arg: ast.unparse(each.value) for each in default.keywords}
            default = default.args[0] if default.args else None
        if said.get("gt", "") in ("0", "0.0") or said.get("ge") == "1":
            return ">0"
        if said.get("ge", "") in ("0", "0.0"):
            return ">=0"
        usual = ast.literal_eval(default) if default is not None and _is_number(default) else -1
        if usual < 0 or not LENGTHS.search(ast.unparse(node.target)):
            return ""
        return ">0" if usual > 0 else ">=0"


def _wrapped(names: Iterable[str]) -> list[str]:
    return wrap(" ".join(sorted(names)), 104, break_long_words=False, break_on_hyphens=False)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _literal(node: ast.expr) -> tuple[str, ...]:
    return tuple(str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant))


def _choice(words: tuple[str, ...]) -> str:
    return "one of " + ",".join(word or '""' for word in sorted(set(words)))


def listed(newest: Mapping[str, str], older: Mapping[str, Mapping[str, str]]) -> str:
    """The text of the list."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, kind in newest.items():
        marks = "".join(f"-{version}" for version, said in older.items() if name not in said)
        names[kind].append(name + marks)
    for version, said in older.items():
        for name, kind in said.items():
            if name not in newest:
                names[kind].append(f"{name}+{version}")
    lines = [HEAD]
    for kind in sorted(names):
        lines += [f"{kind}\n", *(f"    {line}\n" for line in _wrapped(names[kind]))]
    return "".join(lines)


if __name__ == "__main__":
    package, *others = sys.argv[1:]
    versions = dict(each.split("=", 1) for each in others)
    older = {name: Sources(Path(each)).settings() for name, each in versions.items()}
    print(listed(Sources(Path(package)).settings(), older), end="")
