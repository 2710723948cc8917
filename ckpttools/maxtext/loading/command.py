"""Parse a MaxText command: program, configuration file, and settings as key=value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import dropwhile
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError

SETTING = re.compile(r"[A-Za-z_][\w.]*=")
_SUFFIX = ".yml"
_PROGRAM = re.compile(r"python[\d.]*|.*\.py|(maxtext|MaxText)(\.\w+)+")
# Shell variables and Python options: -m, -u, -O, and -X dev as one word.
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_PYTHON_OPTION = re.compile(r"-[a-zA-Z]+")
# Maximum depth, which exceeds that of any real configuration.
_MAX_DEPTH = 50


@dataclass(frozen=True)
class ParsedCommand:
    """A parsed command.

    Attributes:
        program: The module or script to run; None if not specified.
        file: The configuration file; None for MaxText's own base.yml.
        overrides: The other arguments as setting -> value, with nested groups.
    """

    program: str | None = None
    file: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


def parse_command(words: Sequence[str]) -> ParsedCommand:
    """Parse a command like MaxText does.

    Args:
        words: `base.yml key=value …`, with or without a leading `python3 -m maxtext.….train`.

    Raises:
        UsageError: A word is neither a file nor a setting.
        FormatError: A value is not valid YAML.
    """
    program, rest = _split_program(list(words))
    file = rest.pop(0) if rest and not SETTING.match(rest[0]) and rest[0].endswith(_SUFFIX) else None
    overrides: dict[str, Any] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals or not SETTING.match(word):
            raise _not_a_setting_error(word)
        _set_nested(overrides, name.split("."), parse_value(word, value))
    return ParsedCommand(program, file, overrides)


def _split_program(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the program that a command runs, and the arguments after it."""
    before = dropwhile(lambda word: word == "env" or _VARIABLE.match(word), words)
    words = rest if (rest := list(before)) and _is_program(rest[0]) else words
    program = None
    while words and (_is_program(words[0]) or (program is None and _PYTHON_OPTION.fullmatch(words[0]))):
        word = words.pop(0)
        program = program if _is_python(word) or word.startswith("-") else word
    return program, words


def _is_program(word: str) -> bool:
    # A configuration file may be named maxtext.yml.
    return bool(_PROGRAM.fullmatch(word.rpartition("/")[2])) and not word.endswith(_SUFFIX)


def _is_python(word: str) -> bool:
    return word.rpartition("/")[2].startswith("python")


def _not_a_setting_error(word: str) -> UsageError:
    if word.startswith("-"):
        return UsageError(
            f"{word} is neither an option nor a MaxText setting",
            expected="own options first, then the unchanged command of the run, after --",
            hint="-- python3 -m maxtext.trainers.pre_train.train base.yml NAME=VALUE",
        )
    if word.endswith((".yaml", ".json", ".toml")):
        return UsageError(
            f"{word} is not a MaxText configuration",
            expected=f"a file whose name ends in {_SUFFIX}, before all settings",
        )
    return UsageError(
        f"{word} is not a setting",
        expected="a configuration file NAME.yml first, then settings as NAME=VALUE",
        hint=f"if this is a checkpoint: load_parameters_path={word}",
    )


def parse_value(word: str, text: str) -> Any:
    """Parse the value of a setting.

    Raises:
        FormatError: The text is not valid YAML.
    """
    # Imported late, because its fifteen modules take 18 ms and few commands have settings.
    from ckpttools.maxtext.loading.yaml_values import load_yaml

    try:
        return load_yaml(text)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise FormatError("the value of a setting is not valid YAML", location=word, got=reason) from error


def _set_nested(into: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    *above, last = keys
    for key in above:
        below = into.get(key)
        into[key] = below if isinstance(below, dict) else {}
        into = into[key]
    into[last] = value


def merge_nested(below: Mapping[str, Any], above: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Merge two configurations, group by group; `above` takes precedence."""
    result = dict(below)
    for name, value in above.items():
        inner = result.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping) and depth < _MAX_DEPTH:
            result[name] = merge_nested(inner, value, depth + 1)
        else:
            result[name] = value
    return result
