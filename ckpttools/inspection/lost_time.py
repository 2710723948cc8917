"""Plot the lost time against the interval between saves, as an SVG or PNG image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10

from ckpttools.core.errors import StorageError
from ckpttools.core.extras import require_package
from ckpttools.maxtext.training_plan import Tier

_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 400, 70, 50
_RIGHT, _BOTTOM = _WIDTH - 20, _HEIGHT - 60
FONTS = "DejaVu Sans, Liberation Sans, Noto Sans, Arial, Helvetica, sans-serif"
_COLORS = ("#1f77b4", "#d62728")
# The plot extends to intervals that are shorter and longer than the best one by this factor.
_PLOT_RANGE_FACTOR = 30.0
_POINTS = 120
_TICKS = (
    (1, "1 s"),
    (10, "10 s"),
    (60, "1 min"),
    (600, "10 min"),
    (3600, "1 h"),
    (36000, "10 h"),
    (864000, "10 d"),
)


def lost_time_svg(tiers: Sequence[Tier]) -> str:
    """Return a curve for each tier, with a mark at the minimum.

    Args:
        tiers: One or more tiers.
    """
    least = min(tier.best_seconds for tier in tiers) / _PLOT_RANGE_FACTOR
    limit = max(tier.best_seconds for tier in tiers) * _PLOT_RANGE_FACTOR
    top = min(1.0, 4 * max(tier.lost(tier.best_seconds) for tier in tiers))

    def at(seconds: float, lost: float) -> tuple[float, float]:
        along = (log10(seconds) - log10(least)) / (log10(limit) - log10(least))
        up = min(lost / top, 1.0)
        return _LEFT + along * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    parts = [
        *_frame(top),
        *(_tick(at(seconds, 0)[0], text) for seconds, text in _TICKS if least < seconds < limit),
    ]
    for number, (tier, color) in enumerate(zip(tiers, _COLORS, strict=False)):
        times = [least * (limit / least) ** (k / _POINTS) for k in range(_POINTS + 1)]
        visible_times = [time for time in times if tier.lost(time) <= top]
        points = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in (at(time, tier.lost(time)) for time in visible_times)
        )
        x, y = at(tier.best_seconds, tier.lost(tier.best_seconds))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        declared = f"{tier.name}: {tier.best_seconds:.0f} s, {100 * tier.lost(tier.best_seconds):.2g} % lost"
        # Above the frame, where there are no curves.
        line = _TOP - 12 - 16 * (len(tiers) - 1 - number)
        parts.append(f'<text x="{_RIGHT}" y="{line}" text-anchor="end" fill="{color}">{declared}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="{FONTS}" '
        'font-size="12">'
    )
    return (
        "\n".join([head, f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>', *parts, "</svg>"])
        + "\n"
    )


def _frame(top: float) -> Iterator[str]:
    yield f'<path d="M{_LEFT},{_TOP} V{_BOTTOM} H{_RIGHT}" fill="none" stroke="black"/>'
    for k in range(5):
        y = _BOTTOM - k / 4 * (_BOTTOM - _TOP)
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{100 * top * k / 4:.2g} %</text>'
        yield f'<path d="M{_LEFT},{y:.1f} H{_RIGHT}" stroke="#dddddd"/>'
    middle = (_LEFT + _RIGHT) / 2
    yield f'<text x="{middle:.0f}" y="{_HEIGHT - 15}" text-anchor="middle">time between saves</text>'
    yield f'<text x="{_LEFT}" y="{_TOP - 12}">time that is lost</text>'


def _tick(x: float, text: str) -> str:
    return (
        f'<path d="M{x:.1f},{_BOTTOM} v5" stroke="black"/>'
        f'<text x="{x:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{text}</text>'
    )


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
