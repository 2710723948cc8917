"""Build the `config.json` of a model from MaxText's settings and its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError
from ckpttools.core.message_terms import option
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.table import Table
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.config.invert_settings import Candidate, ObservedArrays, candidates, text_types
from ckpttools.maxtext.config.models import defaults
from ckpttools.maxtext.config.report import Contradiction, format_value
from ckpttools.maxtext.config.run_settings import GivenSettings, read_settings
from ckpttools.maxtext.family_layouts import family_as_stored
from ckpttools.maxtext.scan_axis import stored_scan_axis
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import families, family_called

SETTINGS = "MaxText's settings"
_BLOCK = "decoder_block"
_TYPE = "model_type"
# Types that need custom code -> the equivalent type in transformers.
_EQUIVALENT_TYPES = {"kimi_k2": "deepseek_v3"}


def config_from_settings(
    words: Sequence[str],
    arrays: Mapping[str, LazyArray] | None = None,
    *,
    scan_axis: int | None = None,
    family: str | None = None,
    text_alone: bool = False,
) -> dict[str, Any]:
    """Build the configuration of a text model.

    Args:
        words: The settings as passed to MaxText: a configuration file, then `NAME=VALUE`.
        arrays: The checkpoint's parameters by MaxText's dotted names; None without a checkpoint, so that the
            settings must state all sizes.
        scan_axis: The axis on which layers are stacked, if the arrays do not show it.
        family: The name of the family, or a file that describes one; None infers it from `decoder_block`.
        text_alone: Whether to ignore towers among the arrays.

    Raises:
        ConfigError: Settings are missing, or contradict each other, the arrays or the family's code.
        UsageError: A word is not a setting.
    """
    given = read_settings(words)
    result = family_called(family) if family is not None else _family_by_block(given)
    if not text_types(result):
        raise ConfigError(
            f"MaxText's settings do not describe family {result.name} completely, because it has no "
            f"text-only models",
            hint=f"{option('like')} uses the config.json of the original model",
        )
    if arrays is None:
        return _with_loadable_type(
            _only_candidate(result, given, [*candidates(result, given, ObservedArrays())]).config
        )
    _refuse_towers(result, () if text_alone else arrays)
    observed = _ModelArrays.of(result, arrays, scan_axis)
    all_candidates = [*candidates(result, given, observed.known())]
    # Settings alone may leave open what the arrays decide. If no candidate fits, the conversion reports why.
    matching = [item for item in all_candidates if _is_complete(item) and observed.match(item.config)]
    return _with_loadable_type(_only_candidate(result, given, matching or all_candidates).config)


def _with_loadable_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a model type that transformers provides."""
    return {**config, _TYPE: _EQUIVALENT_TYPES.get(config[_TYPE], config[_TYPE])}


def _refuse_towers(family: Family, names: Iterable[str]) -> None:
    towers = family.towers_in(names)
    if towers:
        raise ConfigError(
            "MaxText's settings do not describe towers",
            got=f"arrays of {' and '.join(towers)}",
            expected=f"the config.json of the model, with {option('like')}",
            hint=f"{option('names', 'text')} writes only the text model",
        )


def _family_by_block(given: GivenSettings) -> Family:
    block = given.value(_BLOCK)
    matching = [family for family in families().values() if text_types(family) and block in _blocks(family)]
    if len(matching) == 1:
        return matching[0]
    known = sorted(
        {block for family in families().values() if text_types(family) for block in _blocks(family)}
    )
    raise ConfigError(
        f"{_BLOCK} is unknown" if block is None else f"no family is known for {_BLOCK}",
        location=SETTINGS,
        got=None if block is None else str(block),
        expected="one of " + ", ".join(known),
    )


def _blocks(family: Family) -> list[Any]:
    """Return the `decoder_block` values of a family."""
    rules = (setting for setting in family.settings.settings if setting.name == _BLOCK)
    return [term.value for rule in rules for term in rule.terms]


@dataclass(frozen=True)
class _ModelArrays:
    """The arrays of a checkpoint viewed as a family's text model."""

    family: Family
    arrays: Mapping[str, LazyArray]
    scan_axis: int | None

    @classmethod
    def of(cls, family: Family, arrays: Mapping[str, LazyArray], scan_axis: int | None) -> _ModelArrays:
        family = family_as_stored(family, arrays)
        towers = family.of_towers(arrays)
        text = {name: item for name, item in arrays.items() if name not in towers}
        return cls(family, text, stored_scan_axis(family, arrays, scan_axis))

    def known(self) -> ObservedArrays:
        """Return the facts that the arrays show without a configuration."""
        tied = self._tied()
        lengths, _ = self._table(None, tied).infer_known(self.arrays, left=True)
        return ObservedArrays(lengths, {name: flag.value for name, flag in tied.items()}, True)

    def match(self, config: Mapping[str, Any]) -> bool:
        """Return whether the arrays match a model with this configuration."""
        try:
            self._table(config, {}).to_right(self.arrays)
        except CheckpointError:
            return False
        return True

    def _tied(self) -> dict[str, Flag]:
        return tying.tied_flags("keep", tying.left_head(self.family), self.arrays)

    def _table(self, config: Mapping[str, Any] | None, flags: Mapping[str, Flag]) -> Table:
        without = self.family.towers
        return self.family.table(config, SETTINGS, scan_axis=self.scan_axis, overrides=flags, without=without)


def _is_complete(candidate: Candidate) -> bool:
    return not candidate.contradictions and not candidate.missing


def _only_candidate(family: Family, given: GivenSettings, candidates: Sequence[Candidate]) -> Candidate:
    """Return the only complete candidate.

    Raises:
        ConfigError: No candidate is complete, or a missing setting would have to decide between several.
    """
    complete = [item for item in candidates if _is_complete(item)]
    if not complete:
        best = min(candidates, key=lambda item: (len(item.contradictions), len(item.missing)))
        if best.contradictions:
            raise _contradiction_error(family, best.contradictions)
        raise _incomplete_error(best.missing)
    own = defaults()
    names = {name for item in complete for name in item.settings} - given.values.keys()
    first = complete[0]
    open_names = [
        name
        for name in sorted(names)
        if any(
            item.settings.get(name, own.get(name)) != first.settings.get(name, own.get(name))
            for item in complete
        )
    ]
    if open_names:
        raise _incomplete_error(open_names)
    return first


def _incomplete_error(names: Iterable[str]) -> ConfigError:
    return ConfigError(
        "these settings are not sufficient for a config.json",
        location=SETTINGS,
        expected="also " + ", ".join(f"{name}=VALUE" for name in names),
        hint="add the configuration file of the run or its model_name, which provide MaxText's defaults",
    )


def _contradiction_error(family: Family, contradictions: Sequence[Contradiction]) -> ConfigError:
    unique = {item.name: item for item in reversed(contradictions)}.values()
    return ConfigError(
        f"no config.json of family {family.name} matches this model",
        location=SETTINGS,
        got="; ".join(f"{item.name}={format_value(item.declared)} ({item.declared_in})" for item in unique),
        expected="; ".join(f"{item.name}={format_value(item.expected)} ({item.source})" for item in unique),
        hint="correct the settings: they must be those of the run that wrote the checkpoint",
    )
