"""Hints for two checkpoints that differ only in ways that an option ignores.

Hints are given only if there are no other differences: real differences are never explained away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.compare.diff import ArrayDiff
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.message_terms import action, call, location, option
from ckpttools.digest.canonical import parameters_among
from ckpttools.digest.pairing import Difference, Pairing
from ckpttools.roles.of_tree import Typed


def diff_command(source: str, checkpoint: str) -> str:
    """Return the command or call that compares two checkpoints value by value."""
    sides = source or "SRC", checkpoint or "DST"
    return action("diff", *sides)


def hints_after_verify(
    result: Collection[Difference], both: Pairing[LazyArray], compared: str
) -> tuple[str, ...]:
    """Return hints after a bit-exact comparison.

    Args:
        result: All differences.
        both: The compared arrays.
        compared: Result of `diff_command` for both checkpoints.
    """
    dtypes = {item.name for item in result if item.reason == "dtype" and _are_floats(item.name, both)}
    rest = [item for item in result if item.name not in dtypes]
    cast = (
        f"{option('cast', True)} compares with {location('against')} cast to the dtypes of "
        f"{location('checkpoint')}"
    )
    reasons = {item.reason for item in rest}
    if reasons in ({"missing"}, {"extra"}) and all(item.name.endswith(_HEAD) for item in rest):
        has = location("against" if reasons == {"missing"} else "checkpoint")
        hints = (
            f"only {has} has an output head: {compared} reports if it equals the embedding; otherwise "
            "the head has its own values"
        )
        return (hints, cast) if dtypes else (hints,)
    if not _are_state(rest, both.a, both.b):
        if both.head is not None and {item.reason for item in result} == {"missing"}:
            pattern = option("drop", "PATTERN")
            return (f"{pattern} compares without arrays that were left out on purpose",)
        return _parameter_hints(result, compared)
    parameters_hint = f"{option('parameters', True)} compares only the parameters"
    if rest and dtypes:
        return (f"two options are needed: {parameters_hint}, and {cast}",)
    if dtypes:
        return (f"values were not compared where dtypes differ: {cast}",)
    return (parameters_hint,) if rest else ()


def _parameter_hints(result: Collection[Difference], compared: str) -> tuple[str, ...]:
    """Return a hint for differing parameters: no option ignores them, but the cause may be known."""
    sides = [{item.name for item in result if item.reason == reason} for reason in ("missing", "extra")]
    stacked = [{_LAYER_NUMBER.sub(r"\1", name) for name in side} for side in sides]
    if stacked[0] & sides[1] or sides[0] & stacked[1]:
        return (
            "layers are stacked on one side and one by one on the other: without "
            f"{option('per_layer', False)} they are compared one by one",
        )
    if any(item.reason == "values" for item in result):
        return (f"{compared} shows the size of the differences and known causes",)
    return ()


# FSDP and DeepSpeed save the head of tied models next to the embedding.
_HEAD = "lm_head.weight"
_LAYER_NUMBER = re.compile(r"(layers)_\d+(?=/)")


def hints_after_manifest(
    result: Collection[Difference], actual: Mapping[str, Typed], expected: Mapping[str, Typed]
) -> tuple[str, ...]:
    """Return hints after a comparison with digests.

    Args:
        result: All differences.
        actual, expected: The compared digests, by name.
    """
    if actual and expected and not actual.keys() & expected.keys():
        return (
            "no array has the same name on both sides: the manifest has the names that are stored in SRC; "
            f"{action('hash', 'SRC', names='maxtext', manifest='FILE')} writes MaxText's digests, which "
            "fit either side; "
            f"{action('verify', 'DST', 'SRC')} needs no manifest",
        )
    if not result or not _are_state(result, actual, expected):
        return ()
    return (f"{option('parameters', True)} compares only the parameters",)


def _are_state(
    result: Collection[Difference], actual: Mapping[str, Typed], expected: Mapping[str, Typed]
) -> bool:
    """Return whether parameters were compared and no difference concerns one."""
    if not result:
        return True
    sides = parameters_among(actual), parameters_among(expected)
    return bool(sides[0] & sides[1]) and not {item.name for item in result} & (sides[0] | sides[1])


def _are_floats(name: str, both: Pairing[LazyArray]) -> bool:
    if name not in both.a or name not in both.b:
        return False
    array_a, array_b = both.a[name], both.b[name]
    return array_a.shape == array_b.shape and array_a.dtype.is_float and array_b.dtype.is_float


def hints_after_diff(
    result: Collection[ArrayDiff], arrays: Mapping[str, LazyArray], a: str, b: str
) -> tuple[str, ...]:
    """Return hints about the likely reasons for the differences that `diff` found.

    Args:
        result: The differences, with causes.
        arrays: The compared arrays of either side, by name.
        a, b: Locations of the checkpoints.
    """
    differing = [item for item in result if not item.is_equal]
    if not differing:
        return ()
    if all(item.outcome == "bits" for item in differing):
        same = "all numbers are the same except for the sign of zero or the bits of NaN"
        return (f"{same}: with a tolerance, such as {option('atol', 1e-45)}, these are equal",)
    known = parameters_among(arrays)
    if known and all(item.outcome == "equal" for item in result if item.name in known):
        parameters_hint = f"{_verify(a, b, parameters=True)} compares all of them and nothing else"
        return (f"the compared parameters do not differ: {parameters_hint}",)
    if all(item.outcome == "dtype" for item in differing):
        return (f"the numbers are the same: with {option('ignore_dtype', True)} they are equal in any dtype",)
    widths = {_widths(item) for item in differing if _is_rounded(item)}
    if all(map(_is_rounded, differing)) and widths in ({1}, {-1}):
        built, source = (b, a) if widths == {1} else (a, b)
        return (f"{_verify(source, built, cast=True)} proves that the one is the other, rounded",)
    return ()


def _verify(source: str, text: str, **options: bool) -> str:
    return call("verify", text, source, **options)


def _is_rounded(diff: ArrayDiff) -> bool:
    """Return whether all numbers are equal in the coarser of the two dtypes."""
    deviation = diff.deviation
    same = deviation is not None and deviation.max_ulp == 0 and deviation.nan == 0
    return diff.outcome == "dtype" or (diff.outcome == "differs" and same and _widths(diff) != 0)


def _widths(diff: ArrayDiff) -> int:
    """Return 1 if A has more bits per element than B, -1 if it has fewer, and 0 otherwise."""
    if diff.a is None or diff.b is None:
        return 0
    a, b = (DTYPES[spec.dtype].bits for spec in (diff.a, diff.b))
    return (a > b) - (a < b)
