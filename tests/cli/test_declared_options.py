"""Each option is declared once: flags, keyword arguments and both references agree with its declaration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

import click
import pytest
from support.internals import main, parse, parse_size
from support.locations import ROOT

import ckpttools
from ckpttools.cli.options import flag_help
from ckpttools.core.argument_checks import argument_types, argument_validator
from ckpttools.core.dtypes import parse_dtype
from ckpttools.core.options import Option, any_text
from ckpttools.stores.web.hub_name import model_at

# Commands whose functions have other names.
FUNCTIONS = {
    "adapter extract": "extract_adapter",
    "adapter merge": "merge_adapter",
    "adapter to-maxtext": "adapter_to_maxtext",
    "adapter to-peft": "adapter_to_peft",
    "convert hf-to-maxtext": "hf_to_maxtext",
    "convert maxtext-to-hf": "maxtext_to_hf",
    "convert to-orbax": "convert",
    "convert to-safetensors": "convert",
    "convert to-zarr3": "convert",
    "families check": "check_family",
    "inspect chunks": "chunks",
    "inspect report": "report",
    "inspect stats": "stats",
    "inspect tree": "inspect",
    "run": "run_part",
}
WITHOUT_FUNCTION = {"browse", "completion", "skill", "demo", "families show", "formats", "help", "plan"}
# What commands do with results, or how they run.
OUTPUT = {"as_json", "progress", "dry_run", "distributed", "coordinator", "process", "allow_unprotected"}
OUTPUT |= {"into", "as_jsonl"}
READING = {"max_header_bytes", "max_index_bytes", "with_optimizer", "prefer_rank"}
# Flags without an argument of the function: those of a format, views of a report, and modes of a command.
ONLY_FLAGS = {
    "assemble": {"is_listing"},
    "convert to-orbax": {"as_step", "item", "level", "ocdbt", "zarr3", "compression", "chunks"}
    | {"target_data_file_size", "reference"},
    "convert to-safetensors": {"max_shard_size", "separator"},
    "convert to-zarr3": {"chunks", "compression"},
    "doctor": {"as_list"},
    "inspect report": {"name", "no_stats"},
    "inspect stats": {"find_nan"},
    "inspect tree": {"depth", "flat"},
    "maxtext-config": {"check", "command", "form"},
    "prune": {"yes"},
    "reshard": {"as_step", "item", "level"},
    "run": {"publish", "roots", "status", "wait"},
}
# Arguments without a flag: other formats have none of them, or the command's own arguments say it.
ONLY_ARGUMENTS = {
    "assemble": {"prefer_rank"},
    "average": {"step", "with_optimizer"},
    "convert to-orbax": {"format"},
    "convert to-safetensors": {"format"},
    "convert to-zarr3": {"format"},
    "diff": {"step", "with_optimizer"},
    "maxtext-config": READING,
    "reshard": {"chunks", "format", "reference"},
}


def leaf_commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name="ckpt")
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group) and command.list_commands(context):
            yield from leaf_commands(command, (*words, name))
        elif command is not None:
            yield " ".join((*words, name)), command


COMMANDS = {name: item for name, item in leaf_commands(main) if name not in WITHOUT_FUNCTION}
CALLS: dict[str, Callable[..., Any]] = {
    name: call
    for name in ckpttools.__all__
    if hasattr(call := ckpttools.__getattr__(name), "options") and not isinstance(call, type)
}


def options_of(call: Callable[..., Any]) -> tuple[Option, ...]:
    return vars(call)["options"]


def function_of(command: str) -> Callable[..., Any]:
    return CALLS[FUNCTIONS.get(command, command.replace("-", "_"))]


@pytest.mark.parametrize("name", COMMANDS)
def test_command_flags_match_function_declarations(name):
    given = {param.name: param for param in COMMANDS[name].params if isinstance(param, click.Option)}
    declared = {item.name: item for item in options_of(function_of(name)) if item.flag is not None}
    assert given.keys() - declared.keys() - OUTPUT == ONLY_FLAGS.get(name, set())
    assert declared.keys() - given.keys() == ONLY_ARGUMENTS.get(name, set())
    for item in declared.keys() & given.keys():
        flag, option = given[item], declared[item]
        assert flag.help == flag_help(option)
        assert flag.multiple == (option.many is not None)
        if option.default not in (None, False, ()):
            assert flag.default == option.default


@pytest.mark.parametrize("name", CALLS)
def test_function_arguments_match_declarations(name):
    call, parameters = CALLS[name], inspect.signature(CALLS[name]).parameters
    own = {item.name: item for item in parameters.values() if item.kind is item.KEYWORD_ONLY}
    declared = {item.name: item for item in options_of(call)}
    assert len(declared) == len(options_of(call))
    assert declared.keys() <= argument_types(call).keys()
    for item in own.keys() - declared.keys():
        assert f"{item}: " in CALLS[name].__doc__ or f"{item}, " in CALLS[name].__doc__
    for item in own.keys() & declared.keys():
        default, option = own[item].default, declared[item]
        if option.flag is not None:
            wanted = inspect.Parameter.empty if option.is_required else option.default
            assert default == wanted or option.parsed(default) == option.parsed(wanted), item


def values_of(option: Option) -> list[object]:
    """Values that the type of an option allows, as Python users write them."""
    samples: dict[Any, list[object]] = {
        bool: [True],
        int: [option.least or 1],
        float: [0.5],
        str: ["a"],
        any_text: ["a"],
        parse: ["a"],
        model_at: ["a"],
        parse_size: ["1GiB", 1],
        parse_dtype: ["float32"],
    }
    values = list(option.type) if isinstance(option.type, tuple) else samples.get(option.type, [])
    return [[value] for value in values] if option.many is tuple else values


def choices_of(kind: Any) -> set[str]:
    """The texts of the literal types in an annotation."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    return {item for inner in get_args(kind) for item in choices_of(inner)}


@pytest.mark.parametrize("name", CALLS)
def test_annotation_allows_the_declared_type(name):
    kinds, validate = argument_types(CALLS[name]), argument_validator(CALLS[name])
    for option in options_of(CALLS[name]):
        for value in values_of(option):
            validate((), {option.name: value})
        if choices := choices_of(kinds[option.name]):
            assert choices == set(option.type), option.name


@pytest.mark.parametrize("name", CALLS)
def test_reference_names_each_argument(name):
    text = (ROOT / "docs" / "reference.md").read_text()
    shared, section = (
        text.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in ("Shared keywords", name)
    )
    listed = set(re.findall(r"^\* `(\w+)`: ", section, re.MULTILINE))
    for label in ("Options of", "[Shared keywords]"):
        for line in re.findall(rf"^\* {re.escape(label)}.*?: (.*)\.$", section, re.MULTILINE):
            words = re.findall(r"`(\w+)`", line)
            while words:
                group = re.search(rf"^`{words[0]}`: (.*)\.$", shared, re.MULTILINE)
                listed.add(words.pop(0))
                words += re.findall(r"`(\w+)`", group[1]) if group else []
    assert {option.name for option in options_of(CALLS[name])} <= listed
