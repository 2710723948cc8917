"""Render an SVG image as PNG, with resvg (`pip install 'ckpttools[plot]'`)."""

from __future__ import annotations

from ckpttools.core.errors import StorageError
from ckpttools.core.extras import require_package

# Scale of the image, because text of size 12 is hard to read in the SVG's own units.
_ZOOM = 2
_WORD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20" font-family="{}">'
    '<text y="15">{}</text></svg>'
)


def png_of(svg: str, fonts: str) -> bytes:
    """Return the image as PNG.

    Args:
        svg: SVG with a viewBox.
        fonts: Font families of the text, as named in the SVG.

    Raises:
        MissingPackageError: The package is not installed.
        StorageError: No font is installed, so text would be silently omitted.
    """
    require_package("resvg_py", "a PNG image")
    import resvg_py

    if resvg_py.svg_to_bytes(_WORD.format(fonts, "x")) == resvg_py.svg_to_bytes(_WORD.format(fonts, "")):
        raise StorageError(
            "no font was found for the text of the image",
            expected=f"one of {fonts}",
            hint="install one, such as fonts-dejavu-core; or choose a name that ends in .svg",
        )
    return bytes(resvg_py.svg_to_bytes(svg, zoom=_ZOOM))
