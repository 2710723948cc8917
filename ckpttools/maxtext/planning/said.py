"""What the user says of saving: checked with the plan, and before it where both say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttools.core.errors import UsageError
from ckpttools.maxtext.config.given import given
from ckpttools.maxtext.config.known import mistakes
from ckpttools.maxtext.loading.settings import LOCAL_TIERS
from ckpttools.maxtext.planning.commands import KEEP, UNKNOWN, Mode, period_setting
from ckpttools.maxtext.versions import NEWEST
from ckpttools.stores.place import Place


def words_of(settings: Sequence[str]) -> dict[str, str]:
    """Settings of the user, by name.

    Raises:
        UsageError: one is no `NAME=VALUE`.
    """
    for word in settings:
        name, equals, _ = word.partition("=")
        if not (name and equals):
            raise UsageError("this is no setting of MaxText's", got=word, wanted="NAME=VALUE")
    return dict(word.partition("=")[::2] for word in settings)


def run_of(
    mode: Mode, best: int | None, keep: int | None, words: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """The steps between persistent checkpoints, and how many are kept; what the user has set goes first."""
    return steps_said(words, period_setting(mode)) or best, steps_said(words, KEEP) or keep


def steps_said(words: Mapping[str, str], name: str) -> int | None:
    """The number, above 0, that the user has set; None where there is none."""
    said = words.get(name, "")
    return int(said) or None if said.isdecimal() else None


def all_refusals(file: Place | None, planned: Mapping[str, str], settings: Sequence[str]) -> Iterator[str]:
    """Why MaxText would refuse settings: those of the user one by one, then all together.

    Args:
        file: a configuration of MaxText's, whose settings the plan's go before.
        planned: settings of the plan, with those of the user among them.
        settings: those of the user, `NAME=VALUE`.
    """
    wrong = list(mistakes(given(list(settings)).said, NEWEST)) if settings else []
    yield from (f"{each.name}={each.said}: {each.reason}" for each in wrong)
    if not wrong:
        in_file = {} if file is None else {each.name: each.value for each in given([str(file)]).said}
        # Steps that are not known yet will be some.
        known = {name: "1" if said == UNKNOWN else said for name, said in planned.items()}
        yield from refusals({**in_file, **known})


_LOCAL, _PERIOD = "local_checkpoint_directory", "local_checkpoint_period"
_BACKUP = "multi_tier_checkpointing_backup_interval_"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_TRUE = ("true", "t", "yes", "y", "on", "1")


def refusals(settings: Mapping[str, Any]) -> Iterator[str]:
    """Why MaxText would refuse settings of which each alone is one; nothing where it takes them.

    Args:
        settings: name -> value, as text or as what it stands for; those that are absent have MaxText's
            defaults.
    """

    def said(name: str) -> Any:
        value = settings.get(name)
        return None if value is None or str(value).lower() in ("", "none", "null") else value

    def is_set(name: str, default: bool = False) -> bool:
        value = said(name)
        return default if value is None else str(value).lower() in _TRUE

    def number(name: str) -> int | None:
        value = said(name)
        return int(value) if value is not None and _WHOLE.fullmatch(str(value)) else None

    for name in (_PERIOD, f"{_BACKUP}minutes", f"{_BACKUP}steps"):
        if said(name) is not None and number(name) is None:
            yield f"{name} wants a whole number, and {said(name)} is none"
    if said("load_parameters_path") and said("load_full_state_path"):
        yield "load_parameters_path and load_full_state_path exclude each other"
    if said("load_full_state_path") and not is_set("enable_checkpointing", default=True):
        yield "load_full_state_path needs enable_checkpointing=true"
    for tier in filter(is_set, LOCAL_TIERS):
        if not said(_LOCAL):
            yield f"{tier} needs {_LOCAL}"
        if (number(_PERIOD) or 0) <= 0:
            yield f"{tier} needs {_PERIOD} above 0"
    if is_set(LOCAL_TIERS[0]):
        minutes, steps = number(f"{_BACKUP}minutes"), number(f"{_BACKUP}steps")
        if (minutes is None) == (steps is None):
            yield f"{LOCAL_TIERS[0]} needs one of {_BACKUP}minutes and {_BACKUP}steps, not both"
        if steps is not None and steps < (number(_PERIOD) or 0):
            yield f"{_BACKUP}steps must not be less than {_PERIOD}"
