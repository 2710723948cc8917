"""Scales of which no finite numbers can be made, listed from all that a failed run was to read.

Whoever multiplies by scales looks at them, and stops at the first that is damaged. That costs a run which
succeeds next to nothing, and says nothing of the others: these are looked for once it has failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpttools.array.dequantized import Dequantized
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Elementwise, distinct
from ckpttools.core.errors import CheckpointError, DamagedScalesError, listing
from ckpttools.core.region import Region, split_to
from ckpttools.quantized.decoding import GET_AGAIN, Decode
from ckpttools.quantized.sound_scales import Sound

# Elements that are read at once, in a few MiB beside the buffers of workers that are still at work.
_TOGETHER = 1 << 18
# Weights that are looked at where each takes a request to a store behind a network: for some 30 s.
_MOST_FAR = 1000


def damaged_error(
    lines: Iterable[str], *, location: str | None = None, got: str | None = None, hint: str = GET_AGAIN
) -> DamagedScalesError:
    """The error for damaged scales.

    Args:
        lines: one for each quantised weight that has some.
        location: the checkpoint.
        got: how its weights are quantised.
        hint: the next step.
    """
    return DamagedScalesError(
        "these quantised weights have scales of which no finite numbers can be made:" + listing(list(lines)),
        location=location,
        got=got,
        hint=hint,
    )


def of_no_numbers(decode: Decode) -> str:
    """How a line goes on after the value of a damaged scale."""
    return f"of which no finite {decode.result} can be made"


def are_near(scales: Iterable[LazyArray]) -> bool:
    """Whether reading them takes no request to a store behind a network."""
    return all(getattr(source, "price", 1) == 1 for scale in scales for source in scale.sources())


def naming_all(error: BaseException, arrays: Iterable[LazyArray]) -> BaseException:
    """The error with all damaged scales of some arrays, where it is about one; else as it is.

    Args:
        error: what reading them has raised.
        arrays: all that was to be read. Of scales that lie behind a network the first are looked at.
    """
    if not isinstance(error, DamagedScalesError):
        return error
    # Several may have one name: weights of averaged models, zero points and what they are taken from.
    scaled = [*_scaled(arrays)]
    far = dict.fromkeys(sound.decode.where for sound, scales in scaled if not are_near(scales))
    rest = {*[*far][_MOST_FAR:]} - {error.location}
    result: dict[Decode, float] = {}
    try:
        for sound, scales in scaled:
            if sound.decode.where not in rest and (wrong := next(_wrong(sound, scales), None)) is not None:
                result.setdefault(sound.decode, wrong)
    except CheckpointError:
        return error
    if not result:
        return error
    unseen = f"; scales of {len(rest):,} more weights were not looked at" if rest else ""
    built = _error_of(result, GET_AGAIN + unseen)
    built.__cause__ = error
    return built


def _error_of(result: Mapping[Decode, float], hint: str) -> DamagedScalesError:
    """The error for damaged scales: of one checkpoint under its place, of several each with its own."""
    locations = {decode.location for decode in result}
    named = ((d.name if len(locations) == 1 else d.where, d, value) for d, value in result.items())
    lines = dict.fromkeys(f"{name}: {value:g}, {of_no_numbers(d)}" for name, d, value in named)
    return damaged_error(lines, location=locations.pop() or None if len(locations) == 1 else None, hint=hint)


def _scaled(arrays: Iterable[LazyArray]) -> Iterator[tuple[Sound, Sequence[LazyArray]]]:
    """What makes numbers of scales, and these, of all arrays that are made of quantised weights."""
    for item in distinct(arrays):
        if isinstance(item, Dequantized) and isinstance(item.decoding, Decode):
            yield Sound(item.decoding), item.scales[: len(item.decoding.scales)]
        elif isinstance(item, Elementwise) and isinstance(item.op, Sound):
            yield item.op, (item.source,)


def _wrong(sound: Sound, scales: Sequence[LazyArray]) -> Iterator[float]:
    """Factors of which no finite numbers can be made."""
    first, *others = scales
    # All but the first have one element.
    ones = [other.read().view(other.dtype.carrier) for other in others]
    for region in split_to(Region.whole(first.shape), _TOGETHER):
        some = first.read(region).view(first.dtype.carrier)
        for factors in sound.factors([some, *ones]):
            yield from map(float, sound.decode.beyond(factors))
