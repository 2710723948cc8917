"""Formulas that derive an axis length from others, such as `layers // 6` or `6 * block + 1`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

from ckpttools.core.errors import MappingError

_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class DoesNotDivideError(ArithmeticError):
    """A `/` in a formula leaves a remainder, or a division has divisor 0."""


@lru_cache(maxsize=1024)
def axes_in(formula: str) -> frozenset[str]:
    """Return the axes that a formula names.

    Raises:
        MappingError: The formula uses more than `+ - * / // %` and `min(a, b)` over names and integers.
    """
    nodes = list(ast.walk(_parse(formula)))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and node not in functions)


def value(formula: str, lengths: Mapping[str, int]) -> int:
    """Evaluate a formula.

    Args:
        formula: A formula such as `layers // 6`; `/` is a division that must not leave a remainder.
        lengths: The length of every axis in the formula.

    Raises:
        MappingError: As for `axes_in`.
        DoesNotDivideError: A `/` leaves a remainder, or the divisor is 0.
    """
    return _value(_parse(formula), lengths, formula)


@lru_cache(maxsize=1024)
def _parse(formula: str) -> ast.expr:
    try:
        tree = ast.parse(formula.strip(), mode="eval").body
    except SyntaxError:
        raise MappingError("a length formula may only use + - * / // % and min(a, b)", got=formula) from None
    _check(tree, formula)
    return tree


def _check(node: ast.expr, formula: str) -> None:
    match node:
        case ast.Call(func=ast.Name(id="min"), args=[left, right], keywords=[]):
            _check(left, formula)
            _check(right, formula)
        case ast.Name():
            return
        case ast.Constant(value=int()):
            return
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, ast.Div) or type(op) in _OPERATIONS:
            _check(left, formula)
            _check(right, formula)
        case _:
            raise MappingError("a length formula may only use + - * / // % and min(a, b)", got=formula)


def _value(node: ast.expr, lengths: Mapping[str, int], formula: str) -> int:
    match node:
        case ast.Call(args=[left, right]):
            return min(_value(left, lengths, formula), _value(right, lengths, formula))
        case ast.Name(id=name):
            return lengths[name]
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _value(left, lengths, formula), _value(right, lengths, formula)
            if second == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
                raise DoesNotDivideError(f"{formula} is a division by 0")
            return (
                _divide_exactly(first, second)
                if isinstance(op, ast.Div)
                else _OPERATIONS[type(op)](first, second)
            )
        case _:
            raise AssertionError(formula)


def _divide_exactly(first: int, second: int) -> int:
    quotient, remainder = divmod(first, second)
    if remainder:
        raise DoesNotDivideError(f"{first} is not a multiple of {second}")
    return quotient
