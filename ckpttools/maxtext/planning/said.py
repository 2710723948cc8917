"""What the user says of saving: checked with the plan, and before it where both say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttools.core.errors import UsageError
from ckpttools.maxtext.config.given import given
from ckpttools.maxtext.config.known import mistakes
from ckpttools.maxtext.planning.commands import KEEP, UNKNOWN, Mode, period_setting
from ckpttools.maxtext.planning.rules import refusals
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
