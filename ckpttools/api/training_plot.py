"""The image of a plan of saving: an SVG or a PNG file."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.api.output_file import check_output_file
from ckpttools.api.sources import Source, place_of
from ckpttools.core.errors import UsageError
from ckpttools.core.wording import option
from ckpttools.inspect.lost_time import FONTS, lost_time_svg
from ckpttools.inspect.png import png_of, require_png
from ckpttools.maxtext.planning.intervals import Tier
from ckpttools.stores.place import Place

_PNG = ".png"


def check_plot(place: Place, source: Source, *, has_tiers: bool) -> None:
    """Refuses an image before anything is read.

    Args:
        place: where it would be.
        source: what the model is told by.
        has_tiers: whether there is a curve.

    Raises:
        UsageError: it cannot be drawn, or cannot have this name.
    """
    if not place.name.endswith((".svg", _PNG)):
        raise UsageError(f"{place} is not the name of an image", wanted="a name that ends in .svg or .png")
    if place.name.endswith(_PNG):
        require_png()
    if not has_tiers:
        raise UsageError("there is nothing to plot", hint=f"say {option('mtbf', '6h')}")
    if place.lexists():
        raise UsageError(f"{place} is there already", hint="choose another name, or remove it")
    read = place_of(source)
    check_output_file(place, "" if read is None else read)


def draw(tiers: Sequence[Tier], place: Place) -> None:
    """Draws lost time against the interval.

    Raises:
        StorageError, NoSpaceError: the image cannot be drawn or written.
    """
    svg = lost_time_svg(tiers)
    place.put(png_of(svg, FONTS) if place.name.endswith(_PNG) else svg.encode())
