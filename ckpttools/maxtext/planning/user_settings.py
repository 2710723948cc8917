"""Check the user's settings for saving, separately and together with the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttools.core.errors import UsageError
from ckpttools.maxtext.config.run_settings import read_settings
from ckpttools.maxtext.config.setting_kinds import find_mistakes
from ckpttools.maxtext.loading.settings import LOCAL_TIERS
from ckpttools.maxtext.planning.commands import KEEP, UNKNOWN, Mode, period_setting
from ckpttools.maxtext.versions import NEWEST
from ckpttools.stores.location import Location


def parse_user_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return the user's settings by name.

    Raises:
        UsageError: A setting does not have the form `NAME=VALUE`.
    """
    for word in settings:
        name, equals, _ = word.partition("=")
        if not (name and equals):
            raise UsageError("this is not a MaxText setting", got=word, expected="NAME=VALUE")
    return dict(word.partition("=")[::2] for word in settings)


def effective_run(
    mode: Mode, best: int | None, keep: int | None, words: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Return the steps between persistent checkpoints and the number kept; the user's settings win."""
    return declared_steps(words, period_setting(mode)) or best, declared_steps(words, KEEP) or keep


def declared_steps(words: Mapping[str, str], name: str) -> int | None:
    """Return the positive number that the user set for a setting; None if there is none."""
    declared = words.get(name, "")
    return int(declared) or None if declared.isdecimal() else None


def find_refusals(
    file: Location | None, planned: Mapping[str, str], settings: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons why MaxText would refuse settings: first single settings, then combinations.

    Args:
        file: A MaxText configuration file, which settings of the plan override.
        planned: The settings of the plan, including the user's.
        settings: The user's settings as `NAME=VALUE`.
    """
    wrong = list(find_mistakes(read_settings(list(settings)).declared, NEWEST)) if settings else []
    yield from (f"{item.name}={item.declared}: {item.reason}" for item in wrong)
    if not wrong:
        in_file = (
            {} if file is None else {item.name: item.value for item in read_settings([str(file)]).declared}
        )
        # Steps that are still unknown will be positive.
        known = {name: "1" if declared == UNKNOWN else declared for name, declared in planned.items()}
        yield from refused_combinations({**in_file, **known})


_LOCAL_DIRECTORY, _LOCAL_PERIOD = "local_checkpoint_directory", "local_checkpoint_period"
_BACKUP = "multi_tier_checkpointing_backup_interval_"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_TRUE_WORDS = ("true", "t", "yes", "y", "on", "1")


def refused_combinations(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why MaxText would refuse a combination of valid settings.

    Args:
        settings: Name -> value, as text or parsed; absent settings have MaxText's defaults.
    """

    def declared(name: str) -> Any:
        value = settings.get(name)
        return None if value is None or str(value).lower() in ("", "none", "null") else value

    def is_set(name: str, default: bool = False) -> bool:
        value = declared(name)
        return default if value is None else str(value).lower() in _TRUE_WORDS

    def number(name: str) -> int | None:
        value = declared(name)
        return int(value) if value is not None and _INTEGER.fullmatch(str(value)) else None

    for name in (_LOCAL_PERIOD, f"{_BACKUP}minutes", f"{_BACKUP}steps"):
        if declared(name) is not None and number(name) is None:
            yield f"{name} must be an integer, but is {declared(name)}"
    if declared("load_parameters_path") and declared("load_full_state_path"):
        yield "load_parameters_path and load_full_state_path are mutually exclusive"
    if declared("load_full_state_path") and not is_set("enable_checkpointing", default=True):
        yield "load_full_state_path needs enable_checkpointing=true"
    for tier in filter(is_set, LOCAL_TIERS):
        if not declared(_LOCAL_DIRECTORY):
            yield f"{tier} needs {_LOCAL_DIRECTORY}"
        if (number(_LOCAL_PERIOD) or 0) <= 0:
            yield f"{tier} needs {_LOCAL_PERIOD} above 0"
    if is_set(LOCAL_TIERS[0]):
        minutes, steps = number(f"{_BACKUP}minutes"), number(f"{_BACKUP}steps")
        if (minutes is None) == (steps is None):
            yield f"{LOCAL_TIERS[0]} needs one of {_BACKUP}minutes and {_BACKUP}steps, not both"
        if steps is not None and steps < (number(_LOCAL_PERIOD) or 0):
            yield f"{_BACKUP}steps must not be less than {_LOCAL_PERIOD}"
