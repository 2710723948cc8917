"""Small changes of a source file that a test should notice, each a replacement of one stretch of text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_OPERATORS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "+": "-",
    "-": "+",
    "*": "//",
    "/": "*",
    "//": "*",
    "%": "//",
    "**": "*",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "^": "&",
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}
_LARGE = 100
# Longest first, so that `is not` is not taken for `is`.
_SIGN = re.compile("|".join(sorted(map(re.escape, _OPERATORS), key=len, reverse=True)))


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: the source, relative to the root of the repository.
        function: qualified name of the outermost function that holds it; `<module>` where none does.
        line: the first line that changes, from 1.
        start, stop: the bytes of the file that change.
        before, after: the text that was there, and what takes its place.
        statement: the line as it was, for people.
    """

    file: str
    function: str
    line: int
    start: int
    stop: int
    before: str
    after: str
    statement: str

    @property
    def key(self) -> str:
        """What tells it from all others of the same source."""
        return f"{self.file}:{self.start}:{self.before}->{self.after}"

    @property
    def room(self) -> str:
        """The package below ckpttools."""
        return self.file.split("/")[1]

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.stop :]


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Every change of a file that this module knows, in the order of the text."""
    source = (root / file).read_bytes()
    result = _Finder(file, source).all(ast.parse(source))
    return sorted(set(result), key=lambda item: (item.start, item.stop, item.after))


class _Finder:
    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source
        lengths = [0]
        for line in source.split(b"\n"):
            lengths.append(lengths[-1] + len(line) + 1)
        self._starts = lengths

    def all(self, module: ast.Module) -> Iterator[Mutant]:
        yield from self._below(module, "<module>", ())

    def _below(self, node: ast.AST, function: str, classes: tuple[str, ...]) -> Iterator[Mutant]:
        for child in _told(node):
            if _is_a_limit(child):
                continue
            inner, inside = function, classes
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and function == "<module>":
                inner = ".".join((*classes, child.name))
            elif isinstance(child, ast.ClassDef) and function == "<module>":
                inside = (*classes, child.name)
            yield from self._of(child, inner)
            yield from self._below(child, inner, inside)

    def _of(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, comparators=others):
                for one, two in pairwise([left, *others]):
                    yield from self._between(one, two, function)
            case ast.BinOp(left=left, right=right):
                yield from self._between(left, right, function)
            case ast.BoolOp(values=values):
                for one, two in pairwise(values):
                    yield from self._between(one, two, function)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self._at(node)
                yield self._change(start, start + len("not"), "", function)
            case ast.Constant(value=bool()) | ast.Name(id="min" | "max" | "any" | "all"):
                start, stop = self._at(node)
                yield self._change(start, stop, _NAMES[self._text(start, stop)], function)
            case ast.Constant(value=int() as number):
                yield self._change(*self._at(node), str(number + 1), function)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not _changes_itself(test):
                start, stop = self._at(test)
                yield self._change(start, stop, f"not ({self._text(start, stop)})", function)
            case ast.Return(value=ast.expr() as value) if not _is_none_or_bool(value):
                yield self._change(*self._at(value), "None", function)
            case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
                yield self._change(*self._at(node), "pass", function)
            case ast.Break() | ast.Continue():
                other = "continue" if isinstance(node, ast.Break) else "break"
                yield self._change(*self._at(node), other, function)

    def _between(self, left: ast.expr, right: ast.expr, function: str) -> Iterator[Mutant]:
        """The operator between two expressions, with nothing but brackets around it."""
        start, stop = self._at(left)[1], self._at(right)[0]
        result = _SIGN.search(self._text(start, stop))
        if result:
            at = start + len(self._text(start, stop)[: result.start()].encode())
            yield self._change(at, at + len(result[0]), _OPERATORS[result[0]], function)

    def _change(self, start: int, stop: int, after: str, function: str) -> Mutant:
        line = self._source.count(b"\n", 0, start) + 1
        statement = self._text(self._starts[line - 1], self._starts[line] - 1).strip()
        return Mutant(self._file, function, line, start, stop, self._text(start, stop), after, statement)

    def _at(self, node: ast.AST) -> tuple[int, int]:
        begins = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        ends = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return begins, ends

    def _text(self, start: int, stop: int) -> str:
        return self._source[start:stop].decode()


def _changes_itself(test: ast.expr) -> bool:
    """Whether another change says the opposite already."""
    return (isinstance(test, ast.Compare) and len(test.ops) == 1) or _is_not(test)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_none_or_bool(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (None, True, False)


def _is_a_limit(node: ast.AST) -> bool:
    """`4 << 20`, `_MOST_ENTRIES = 512`: how much at a time, and one more or less does not matter."""
    match node:
        case ast.BinOp(left=ast.Constant(), op=ast.LShift(), right=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() as number)):
            return name.isupper() and number >= _LARGE
    return False


def _told(node: ast.AST) -> Iterator[ast.AST]:
    """The parts that run and decide something: no annotations, decorators, types or text for people."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body)
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from filter(None, [node.value])
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr():
            return
        case ast.Raise():
            # What is said and of which type has tests of its own; whether it is raised is asked above.
            return
        case _:
            yield from ast.iter_child_nodes(node)
