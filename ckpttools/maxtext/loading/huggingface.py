"""Weights of Hugging Face that MaxText reads itself, converted on the fly or by a function of the user's."""

from __future__ import annotations

from ckpttools.maxtext.loading.paths import Led
from ckpttools.maxtext.loading.report import Problem
from ckpttools.maxtext.loading.settings import DEFAULTS, Settings
from ckpttools.maxtext.versions import Version
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

_HUB, _BUCKET = "hf://", "gs://"


def on_the_fly(text: str, settings: Settings) -> Led:
    """What source_checkpoint_layout=safetensors_dynamic reads.

    Args:
        text: a directory, or a repository of the Hub; "" for the one that MaxText has for the model.
        settings: of the run.

    Raises:
        StorageError: it cannot be looked at.
    """
    if text.startswith(_BUCKET) or (text and not text.startswith(_HUB) and parse(text).is_dir()):
        return _directory(parse(text))
    name, problems = text.removeprefix(_HUB), []
    if not text and settings.text("model_name") == DEFAULTS["model_name"]:
        problems.append(
            Problem("without a path the weights are those of model_name, which is not set", "set it")
        )
    if not settings.text("base_output_directory").startswith(_BUCKET):
        problems.append(
            Problem(
                "weights of the Hub are read through a copy in base_output_directory, which must be on gs://"
                + (f": {text} is no directory here" if text and not text.startswith(_HUB) else ""),
                "set it, or fetch the weights and name their directory",
            )
        )
    shown = f"{_HUB}{name}" if name else f"what the Hub has for model_name={settings.text('model_name')}"
    return Led(None, problems=tuple(problems), shown=shown)


def by_function(text: str, settings: Settings, version: Version) -> Led:
    """What source_checkpoint_layout=safetensors reads, for a full state.

    Raises:
        StorageError: it cannot be looked at.
    """
    place = parse(text)
    led = Led(place) if place.is_file() else _directory(place)
    problems = list(led.problems)
    if not settings.text("checkpoint_conversion_fn"):
        do = "name a function, such as `ckpttools.family_conversion_fn` makes"
        problems.append(Problem("source_checkpoint_layout=safetensors needs checkpoint_conversion_fn", do))
    if version.orbax == "v0" and not settings.flag("enable_orbax_v1"):
        what = f"MaxText {version.name} reads safetensors only with enable_orbax_v1=true"
        problems.append(Problem(what, "set it, or convert the weights first"))
    return Led(led.item, problems=tuple(problems))


def _directory(place: Place) -> Led:
    """Only whether there are weights in it."""
    if place.is_dir() and any(entry.name.endswith(".safetensors") for entry in place.entries()):
        return Led(place)
    return Led(None, problems=(Problem(f"there are no safetensors in {place}", "check its spelling"),))
