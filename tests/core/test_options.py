"""Options as data: what they take and refuse, the flags that are made of them, and who announces some."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from support.internals import parse_size

import ckpttools
from ckpttools import DTYPES, CheckpointError, DType, MappingError, Tree, UsageError
from ckpttools.api.sources import Patterns, Size
from ckpttools.cli.options import given_flags
from ckpttools.cli.write import make_command
from ckpttools.codecs.registry import COMPRESSION
from ckpttools.core.argument_checks import argument_types, validate_arguments
from ckpttools.core.options import Option, parse_options
from ckpttools.core.plugins import entry_points_of, load_group
from ckpttools.formats.base import Writable
from ckpttools.formats.known_formats import formats, writable
from ckpttools.formats.registry import faults_in, writer_options
from ckpttools.formats.zarr.chunking import CHUNKS, parse_chunks
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms import registry

SIZE = Option("most_bytes", parse_size, "2KiB", "A size.")
SWITCH = Option("fast", bool, True, "A switch.")
CHOICE = Option("kind", ("a", "b"), "a", "One of two.")
NUMBER = Option("count", int, None, "A number.")
POSITIVE = Option("every", int, 2, "A number that divides.", "N", least=1)
TEXT = Option("label", str, None, "A text.")
ALL = (SIZE, SWITCH, CHOICE, NUMBER, TEXT, POSITIVE)


def test_option_values_are_parsed_or_refused():
    declared = {"most_bytes": "1MiB", "fast": False, "kind": "b", "count": 0, "label": "x", "every": 3}
    assert parse_options(ALL, declared, tuple, "") == {**declared, "most_bytes": 1 << 20}
    defaults = {"most_bytes": 2048, "fast": True, "kind": "a", "count": None, "label": None, "every": 2}
    assert parse_options(ALL, {}, tuple, "") == defaults
    assert SIZE.parsed(3) == 3
    assert SIZE.parsed(np.int64(3)) == NUMBER.parsed(np.int64(3)) == 3
    wrong = [(SIZE, "lots"), (SIZE, 0), (SWITCH, 1), (CHOICE, "c"), (NUMBER, -1), (NUMBER, True), (TEXT, "")]
    wrong += [(SIZE, True), (SIZE, 1.5), (COMPRESSION, {"zstd": 3})]
    for option, value in wrong:
        with pytest.raises(UsageError):
            option.parsed(value)
    assert POSITIVE.parsed(1) == 1
    with pytest.raises(UsageError) as caught:
        POSITIVE.parsed(0)
    assert caught.value.expected == "an integer of at least 1"


CALLS = [
    call
    for name, home in ckpttools._MODULE_OF.items()
    if ".api." in home and not isinstance(call := ckpttools.__getattr__(name), type)
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_invalid_option_value_error_names_the_option(call):
    for name, kind in argument_types(call).items():
        # That of `resolve` has no name for whoever calls it.
        if name != "command" and Any not in (kind, *get_args(kind)):
            with pytest.raises(UsageError, match=rf"^`{name}` cannot be this") as refused:
                call(**{name: object()})
            assert refused.value.expected


@validate_arguments
def called(
    path: LocationLike = "",
    *,
    dtype: DType | str | None = None,
    named: Mapping[str, DType | str] | None = None,
    paths: Sequence[LocationLike] = (),
    patterns: Patterns = (),
    steps: Iterable[int] = (),
    size: Size = 0,
    share: float = 0.0,
    kind: Literal["a", "b"] | None = None,
    chunks: str | Mapping[str, Sequence[int | None]] | None = None,
    loud: bool = False,
    jobs: int | None = None,
):
    return {name: value for name, value in locals().items() if value}


def test_natural_python_values_are_accepted():
    declared = {"a": ml_dtypes.bfloat16, "b": np.dtype("float64"), "c": np.dtype(bool), "d": np.int64}
    named = {"a": DTYPES["bfloat16"], "b": DTYPES["float64"], "c": DTYPES["bool"], "d": DTYPES["int64"]}
    assert called(dtype=np.dtype(">f4"), named=declared) == {"dtype": DTYPES["float32"], "named": named}
    declared = called(
        Path("a"), paths=Path("b"), patterns={"*": 1}.keys(), steps=np.arange(2), size=np.int64(3)
    )
    expected = {"path": Path("a"), "paths": (Path("b"),), "patterns": ("*",), "steps": (0, 1), "size": 3}
    assert declared == expected
    assert all(type(item) is int for item in (*declared["steps"], declared["size"]))
    assert called(steps=np.array(3)) == {"steps": (3,)}
    kept = {"paths": ["a"], "patterns": "*", "share": 1, "kind": "b", "loud": True, "size": "1GiB", "jobs": 1}
    assert all(value is kept[name] for name, value in called(**kept).items())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("loud", "false", "True or False"),
        ("loud", 1, "True or False"),
        ("share", True, "a number"),
        ("dtype", float, "a dtype or text or None"),
        ("kind", "c", '"a" or "b" or None'),
        ("paths", b"a", "a list of text or paths"),
        ("steps", "12", "a list of integers"),
        ("named", ["float32"], "a dictionary {text: a dtype or text} or None"),
        ("named", {"*": 4}, "a dictionary {text: a dtype or text} or None"),
        ("chunks", {"*": "4x4"}, "text or a dictionary {text: a list of integers or None} or None"),
        ("jobs", 0, "an integer of at least 1 or None"),
    ],
)
def test_ambiguous_values_are_refused(name, value, expected):
    with pytest.raises(UsageError) as refused:
        called(**{name: value})
    assert (refused.value.got, refused.value.expected) == (repr(value), expected)


@pytest.mark.parametrize(
    ("make", "declared", "expected"),
    [
        (ckpttools.ToMaxText, {"scan": "no"}, "True or False"),
        (ckpttools.ToHuggingFace, {"maxtext_config": (1,)}, "a list of text"),
        (ckpttools.ModelOptions, {"tied": False}, "text or None"),
        (ckpttools.StripOptimizer, {"drop": 3}, "a list of text"),
        (ckpttools.StackLayers, {"axis": True}, "an integer"),
        (ckpttools.UnstackLayers, {"axis": "1"}, "an integer or None"),
        (ckpttools.ForceUnroll, {"flavor": "jax"}, '"same" or "linen" or "nnx"'),
        (ckpttools.Select, {"prefix": None}, "text"),
        (ckpttools.CastTo, {"dtype": float}, "a dtype or text"),
        (ckpttools.CastMap, {"dtypes": ["bfloat16"]}, "a dictionary {text: a dtype or text}"),
        (ckpttools.Resources, {"jobs": 0}, "an integer of at least 1 or None"),
    ],
)
def test_option_objects_are_validated_like_call_arguments(make, declared, expected):
    with pytest.raises(UsageError, match=rf"^`{next(iter(declared))}` cannot be this") as refused:
        make(**declared)
    assert refused.value.expected == expected


def test_single_value_becomes_a_list():
    assert ckpttools.Select("params/*").keep == ("params/*",)
    with pytest.raises(TypeError, match=r"^Select\(\) got .* 'kep': did you mean 'keep'"):
        ckpttools.Select(kep="params/*")


def test_chunks_option_accepts_text_or_shapes_by_pattern():
    expected = parse_chunks("*/wo/kernel=512x1x-,*/step=")
    assert parse_chunks({"*/wo/kernel": [512, np.int64(1), None], "*/step": ()}) == expected
    assert CHUNKS.parsed(expected) is expected
    for wrong in ({"*": "512"}, {"*": 512}, {"*": (0,)}, {"*": (True,)}, {"": (1,)}, {1: (1,)}, [1], 3):
        with pytest.raises(UsageError):
            CHUNKS.parsed(wrong)


def test_irrelevant_options_are_accepted_only_with_defaults():
    assert parse_options([SIZE], {"fast": True, "count": None}, lambda: ALL, "")["most_bytes"] == 2048
    for options in ({"fast": False}, {"kind": "b"}, {"nobodys": None}):
        with pytest.raises(UsageError, match="it is not so") as caught:
            parse_options([SIZE], options, lambda: ALL, "it is not so")
        assert caught.value.expected == "none but most_bytes"


def test_options_become_flags_and_pass_values():
    seen = []

    def body(**own):
        seen.append(own)

    command = make_command("x", "Does it.", body, given_flags(*ALL))
    assert CliRunner().invoke(command, ["--most-bytes", "1MiB", "--fast", "--count", "3"]).exit_code == 0
    assert seen == [{"most_bytes": "1MiB", "fast": True, "count": 3}]
    wrong = ("--most-bytes=lots", "--kind=c", "--count=-1", "--every=0", "--label=")
    for words in ([item] for item in wrong):
        assert CliRunner().invoke(command, words).exit_code == 2
    help = CliRunner().invoke(command, ["--help"]).output
    for text in (
        "Does it.",
        "Examples:\n  $ ckpt x SRC DST",
        "--fast / --no-fast",
        "[a|b]",
        "[default: 2KiB]",
    ):
        assert text in help
    with pytest.raises(UsageError, match="declares options that all commands have") as caught:
        make_command("x", "Does it.", body, given_flags(*ALL), click.option("--fast"))
    assert caught.value.got == "--fast"


def test_similar_transform_is_suggested(monkeypatch):
    monkeypatch.setattr(registry, "transforms", lambda: {"every-layer": None})
    for name, hint in (("every-leyer", "did you mean 'every-layer'?"), ("zzz", registry.GROUP)):
        with pytest.raises(UsageError, match=f"unknown transform {name!r}") as caught:
            registry.transform_named(name, {})
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("built", "declared", "got"),
    [
        (lambda every: lambda tree: [][every], {"every": 3}, "IndexError: list index out of range"),
        (lambda every: lambda tree: int("x"), {}, "ValueError: invalid literal for int()"),
        (lambda every: {}[every], {}, "KeyError: 2"),
        (lambda every: lambda tree: tree, {}, "<Tree: 0 arrays"),
    ],
)
def test_failing_plugin_transform_is_named(monkeypatch, built, declared, got):
    built.options = [POSITIVE]
    monkeypatch.setattr(registry, "transforms", lambda: {"every-layer": built})
    with pytest.raises(MappingError, match="the transform every-layer") as caught:
        Tree({}).pipe(registry.transform_named("every-layer", declared))
    assert got in caught.value.got
    assert caught.value.exit_code == 3


def test_transform_usage_error_is_passed_through(monkeypatch):
    def refuse(tree):
        raise UsageError("not this one")

    monkeypatch.setattr(registry, "transforms", lambda: {"picky": lambda: refuse})
    with pytest.raises(UsageError, match="not this one"):
        Tree({}).pipe(registry.transform_named("picky", {}))


def test_formats_declare_their_capabilities():
    assert set(writable()) == {"orbax", "safetensors", "zarr3"} < set(formats())
    assert {option.name for option in writer_options()} >= {"item", "compression", "separator"}
    assert not isinstance(object(), Writable)


def test_errors_raised_by_fault_checks_are_findings():
    class Failing:
        looks_for = "nothing"

        def faults(self, path, options):
            yield CheckpointError("one")
            raise CheckpointError("two")

    assert [item.message for item in faults_in(Failing(), None, None)] == ["one", "two"]


def test_no_entry_points_are_found_without_plugins(tmp_path, monkeypatch):
    assert entry_points_of("ckpttools.nothing") == []
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ckpttools.nothing]\nparser = ckpttools.core.memory_limit:parse_size\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert load_group("ckpttools.nothing") == {"parser": parse_size}
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere")])
    assert entry_points_of("ckpttools.nothing") == []
