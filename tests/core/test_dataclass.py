"""`ckpttools.core.dataclass` makes classes that behave as those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.core.dataclass import dataclass

options = st.fixed_dictionaries({name: st.booleans() for name in ("frozen", "eq", "repr", "slots")})
defaults = st.sampled_from(
    [
        {},
        {"default": 3},
        {"default_factory": list},
        {"default": 1, "repr": False},
        {"default": 2, "compare": False},
        {"default": 5, "init": False},
        {"default": 4, "kw_only": True},
    ]
)
fields = st.lists(defaults, max_size=4).map(lambda result: sorted(result, key=bool))


def built(
    decorator: Any, fields: list[dict[str, Any]], options: dict[str, bool], base: type = object
) -> type:
    names = [f"{base.__name__[0]}{number}" for number in range(len(fields))]
    body: dict[str, Any] = {
        "__annotations__": dict.fromkeys(names, "int"),
        "__doc__": "",
        "__module__": __name__,
    }
    body |= {name: dataclasses.field(**item) for name, item in zip(names, fields, strict=True) if item}
    return decorator(**options)(type("Made", (base,), body))


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


@given(fields, options, st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, 1), max_size=5))
def test_decorator_matches_the_standard_library(
    fields: list[dict[str, Any]], options: dict[str, bool], one: list[int], other: list[int]
) -> None:
    def told(decorator: Any) -> list[Any]:
        cls = built(decorator, fields, options)
        first, second = outcome(lambda: cls(*one)), outcome(lambda: cls(*other))
        if isinstance(first, tuple) or isinstance(second, tuple):
            return [item if isinstance(item, tuple) else "made" for item in (first, second)]
        has_name = options["repr"]
        return [
            [outcome(lambda name=field.name: getattr(first, name)) for field in dataclasses.fields(first)],
            outcome(lambda: repr(first)) if has_name else None,
            outcome(lambda: first == second),
            outcome(lambda: first == first),
            outcome(lambda: first == 1),
            outcome(lambda: hash(first)) if options["eq"] else None,
            outcome(lambda: setattr(first, "o0", 7)) if fields else None,
            outcome(lambda: delattr(first, "o0")) if fields else None,
            cls.__match_args__,
            str(inspect.signature(cls)),
            cls.__init__.__globals__ is globals(),
            hasattr(first, "__dict__"),
        ]

    assert told(dataclass) == told(dataclasses.dataclass)


@given(options, st.integers(), st.integers())
def test_subclass_has_fields_of_both_classes(options: dict[str, bool], one: int, other: int) -> None:
    above = built(dataclass, [{}], options)
    below = built(dataclass, [{"default": 3}], options, above)
    assert [field.name for field in dataclasses.fields(below)] == ["o0", "M0"]
    result = below(one, other)
    assert (result.o0, result.M0) == (one, other)
    assert above(one).o0 == one
    assert not options["eq"] or result != above(one)


@pytest.mark.parametrize("above", [dataclass, dataclasses.dataclass])
@pytest.mark.parametrize("below", [dataclass, dataclasses.dataclass])
def test_classes_of_both_decorators_inherit_from_each_other(above: Any, below: Any) -> None:
    """A plug-in makes its classes by the standard library."""
    made_above = built(above, [{}], {"frozen": True})
    assert repr(built(below, [{}], {"frozen": True}, made_above)(1, 2)) == "Made(o0=1, M0=2)"
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        built(below, [{}], {"frozen": False}, made_above)


# The standard library's with slots fails in CPython 3.11: its `super()` is of the class without them.
@pytest.mark.parametrize(
    ("decorator", "slots"), [(dataclass, True), (dataclass, False), (dataclasses.dataclass, False)]
)
def test_plain_subclass_of_frozen_class_sets_attributes(decorator: Any, slots: bool) -> None:
    above = built(decorator, [{}], {"frozen": True, "slots": slots})
    below = type("Below", (above,), {})(1)
    below.more = 2
    assert (below.o0, below.more) == (1, 2)
    del below.more
    for refused in (lambda: setattr(below, "o0", 3), lambda: delattr(below, "o0")):
        with pytest.raises(dataclasses.FrozenInstanceError, match="field 'o0'"):
            refused()


def test_methods_compile_after_the_module_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gone", ModuleType("gone"))
    body = {"__annotations__": {"x": "int"}, "__doc__": "", "__module__": "gone"}
    cls = dataclass(frozen=True)(type("Homeless", (), body))
    monkeypatch.delitem(sys.modules, "gone")
    assert repr(cls(3)) == "Homeless(x=3)"
    assert cls(3) == cls(3) and hash(cls(3)) == hash(cls(3))


@dataclass(frozen=True, slots=True)
class Point:
    """A class of which objects are pickled."""

    x: int
    y: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("below zero")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_frozen_objects_with_slots_are_copied(again: Any) -> None:
    assert again(Point(1, [2])) == Point(1, [2])


def test_replace_validates_like_the_constructor() -> None:
    assert dataclasses.replace(Point(1, [2]), x=5) == Point(5, [2])
    with pytest.raises(ValueError, match="below zero"):
        dataclasses.replace(Point(1), x=-1)


def test_methods_defined_by_the_class_are_kept() -> None:
    @dataclass(frozen=True)
    class Own:
        """A class that shows and compares in its own way."""

        x: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 4

    assert (repr(Own(1)), hash(Own(1)), Own(1) == Own(2)) == ("own", 4, True)


def test_frozen_class_with_own_eq_is_hashable() -> None:
    @dataclass(frozen=True)
    class Alike:
        """A class that only compares in its own way."""

        x: int

        def __eq__(self, other: object) -> bool:
            return True

    assert hash(Alike(1)) == hash(Alike(1))


def test_methods_are_compiled_once() -> None:
    @dataclass(frozen=True)
    class Once:
        """A class of which nothing was asked yet."""

        x: int

    before = vars(Once)["__init__"]
    Once(1)
    after = vars(Once)["__init__"]
    assert not inspect.isfunction(before) and inspect.isfunction(after)
    Once(2)
    assert vars(Once)["__init__"] is after
    with pytest.raises(TypeError, match=r"Once\.__init__\(\) missing 1 required positional argument: 'x'"):
        Once()  # type: ignore[call-arg]
