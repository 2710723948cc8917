"""MaxText's settings and their accepted values: its pydantic fields, as listed in setting_kinds.txt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import did_you_mean
from ckpttools.core.message_terms import option
from ckpttools.maxtext.config.report import InvalidSetting, ModelSetting, format_value
from ckpttools.maxtext.versions import VERSIONS
from ckpttools.stores.registry import parse

_LIST = "setting_kinds.txt"
_CHOICE = "one of "
_MARK = re.compile(r"([-+])([0-9a-f]{7})$")
# The values that pydantic accepts.
_BOOLEAN_WORDS = frozenset(("true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0"))
_LISTS = (list, tuple)
# Lists that may be text, as in MaxText's base.yml, and text settings for which null means empty.
_LISTS_AS_TEXT = frozenset(("constant_bound_config",))
_MAY_BE_EMPTY = frozenset(
    ("base_output_directory", "dump_hlo_local_module_name", "dump_hlo_module_name", "run_name")
)


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that a setting accepts.

    Attributes:
        type: "bool", "int", "float", "text", "list", "group", "any", or "one of" for `words`.
        least: The lower bound: "", ">0" or ">=0".
        words: The accepted values of "one of".
        may_be_null: Whether null is accepted.
    """

    type: str
    least: str = ""
    words: tuple[str, ...] = ()
    may_be_null: bool = False

    @classmethod
    def of(cls, text: str) -> Kind:
        """Parse a kind as written in the list of settings, such as `int>0?`."""
        plain = text.removesuffix("?")
        if plain.startswith(_CHOICE):
            words = plain.removeprefix(_CHOICE).split(",")
            return cls("one of", "", tuple(item.strip('"') for item in words), plain != text)
        kind, more, bound = plain.partition(">")
        return cls(kind, more + bound, (), plain != text)

    def expected(self, value: Any) -> str | None:
        """Return what MaxText expects instead of a value; None if it accepts the value."""
        if value is None or (isinstance(value, str) and value.lower() == "none" and "none" not in self.words):
            return None if self.may_be_null else f"{self._description}, not null"
        if isinstance(value, str) and "${" in value:
            return None
        fits = {
            "bool": lambda: str(value).lower() in _BOOLEAN_WORDS,
            "int": lambda: self._is_in_range(value) and float(value).is_integer(),
            "float": lambda: self._is_in_range(value),
            "text": lambda: isinstance(value, str),
            "one of": lambda: str(value) in self.words,
            "list": lambda: isinstance(value, _LISTS),
        }.get(self.type)
        return None if fits is None or fits() else self._description

    def _is_in_range(self, value: Any) -> bool:
        if isinstance(value, bool):
            return False
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return False
        return not (self.least == ">0" and number <= 0) and not (self.least == ">=0" and number < 0)

    @property
    def _description(self) -> str:
        names = {"bool": "true or false", "int": "an integer", "float": "a number", "list": "[a, list]"}
        limits = {">0": " above 0", ">=0": " of 0 or more"}
        if self.type == "one of":
            return "one of " + ", ".join(item or '""' for item in self.words)
        return names.get(self.type, self.type) + limits.get(self.least, "")


@cache
def setting_kinds(version: str) -> Mapping[str, Kind]:
    """Map the names of settings to their accepted values; names in groups have the group as a prefix.

    Args:
        version: The version of MaxText; an unlisted version is treated as the newest.
    """
    return {
        name: kind
        for name, kind, exclusive_version, absent in _read_list()
        if version != absent and exclusive_version in ("", version)
    }


@cache
def _read_list() -> tuple[tuple[str, Kind, str, str], ...]:
    """Return name, kind, the only version with the setting, and the version without it."""
    result: list[tuple[str, Kind, str, str]] = []
    kind = Kind("any")
    for line in (parse(__file__).parent / _LIST).read_bytes().decode().splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            kind = Kind.of(line)
            continue
        for item in line.split():
            marked = _MARK.search(item)
            name, sign, version = (item[: marked.start()], *marked.groups()) if marked else (item, "", "")
            result.append((name, kind, version if sign == "+" else "", version if sign == "-" else ""))
    return tuple(result)


def find_invalid_settings(settings: Iterable[ModelSetting], version: str) -> Iterator[InvalidSetting]:
    """Yield the settings that MaxText refuses because of their names or values.

    Args:
        settings: The settings, with nested groups.
        version: The version of MaxText.
    """
    kinds = setting_kinds(version)
    for item in settings:
        kind = kinds.get(item.name)
        if kind is None:
            reason = f"MaxText {version} has no such setting"
            yield InvalidSetting(item.name, item.value, item.source, reason, _name_hint(item.name, version))
        elif isinstance(item.value, Mapping) and any(name.startswith(f"{item.name}.") for name in kinds):
            inner = (ModelSetting(f"{item.name}.{key}", at, item.source) for key, at in item.value.items())
            yield from find_invalid_settings(inner, version)
        elif (expected := kind.expected(item.value)) is not None and not _is_special(item):
            yield InvalidSetting(
                item.name, item.value, item.source, f"MaxText expects {expected}", _value_hint(kind, item)
            )


def _name_hint(name: str, version: str) -> str:
    """Return a hint for a setting that a version of MaxText does not have."""
    kinds = setting_kinds(version)
    if within := next((known for known in kinds if known.endswith(f".{name}")), None):
        return f"write {within}"
    others = [other for other in VERSIONS if other != version and name in setting_kinds(other)]
    if others:
        return f"leave it out, or use MaxText {others[0]}, which has it: {option('maxtext', others[0])}"
    return did_you_mean(name, kinds) or "leave it out"


def _is_special(setting: ModelSetting) -> bool:
    """Return whether MaxText accepts a value whose type differs from that of the setting."""
    value, name = setting.value, setting.name
    return (value is None and name in _MAY_BE_EMPTY) or (isinstance(value, str) and name in _LISTS_AS_TEXT)


def _value_hint(kind: Kind, setting: ModelSetting) -> str:
    if kind.type == "one of" and (near := did_you_mean(str(setting.value), kind.words)):
        return near
    if kind.type == "text" and setting.value is not None:
        return f"quote it for YAML too: {setting.name}='\"{format_value(setting.value)}\"'"
    return "correct it, or leave it out"
