"""Running the checks over a path, and the fix that a user asked for."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path

from ckpttools.doctor import checks as checks_room
from ckpttools.doctor.base import ERROR, LEVELS, Check, Finding, Fix
from ckpttools.doctor.scene import Scene, scene_at
from ckpttools.errors import FormatError, UsageError

# The check that opens everything: what it finds is only said where no other check says more.
LAST_RESORT = "opens"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found at a path.

    Attributes:
        path: what was asked about.
        healthy: whether nothing is an error.
        looked_at: what there is, in words: "2 steps", "1 item".
        findings: errors first.
        fixed: what was changed, when a fix was asked for.
    """

    path: str
    healthy: bool
    looked_at: tuple[str, ...]
    findings: tuple[Finding, ...]
    fixed: tuple[str, ...] = ()


@cache
def checks() -> tuple[Check, ...]:
    """All checks, by name."""
    modules = (
        import_module(f"{checks_room.__name__}.{each.name}")
        for each in pkgutil.iter_modules(checks_room.__path__)
    )
    return tuple(sorted((module.CHECK for module in modules), key=lambda check: check.name))


def fixes() -> dict[str, Fix]:
    """All fixes by name."""
    return {check.fix.name: check.fix for check in checks() if check.fix is not None}


def examine(path: Path) -> Diagnosis:
    """Looks at everything at or below a path; reads no arrays and changes nothing.

    Raises:
        FormatError: there is nothing, or nothing that is or was going to be a checkpoint.
    """
    scene = scene_at(path)
    if scene.is_empty:
        raise FormatError(
            f"{path} is no checkpoint",
            wanted="a step, item or run of Orbax, safetensors, or a zarr v3 hierarchy, whole or damaged",
            hint="`ckpt formats` lists what can be read",
        )
    found = dict.fromkeys(finding for check in checks() for finding in _looked(check, scene))
    ordered = sorted(_told_once(found), key=lambda each: (LEVELS.index(each.level), each.place, each.check))
    healthy = all(each.level != ERROR for each in ordered)
    return Diagnosis(str(path), healthy, tuple(_counted(scene)), tuple(ordered))


def _looked(check: Check, scene: Scene) -> Iterator[Finding]:
    """What a check finds. One that fails says so: a report on garbage must not depend on any one of them."""
    try:
        for finding in check.look(scene):
            yield replace(finding, check=check.name)
    except Exception as error:
        what = f"the check {check.name!r} stopped: {type(error).__name__}: {error}"
        why = "the files are damaged in a way that it did not expect; what it looks for was not looked for"
        yield Finding(ERROR, str(scene.path), what, why, "fetch the checkpoint again", check=check.name)


def _counted(scene: Scene) -> Iterator[str]:
    numbers = {
        "step": len(scene.steps),
        "item": len(scene.items),
        "directory of safetensors": len(scene.weights),
        "zarr v3 hierarchy": len(scene.hierarchies),
        "leftover": len(scene.leftovers),
    }
    plurals = {
        "directory of safetensors": "directories of safetensors",
        "zarr v3 hierarchy": "zarr v3 hierarchies",
    }
    for noun, number in numbers.items():
        if number:
            yield f"1 {noun}" if number == 1 else f"{number:,} {plurals.get(noun, noun + 's')}"


def _told_once(found: Iterable[Finding]) -> Iterator[Finding]:
    """Findings without those that only say that something cannot be opened, where others say why."""
    places = [each.place for each in found if each.level == ERROR and each.check != LAST_RESORT]
    for each in found:
        if each.check != LAST_RESORT or not any(_is_told(each, place) for place in places):
            yield each


def _is_told(last: Finding, place: str) -> bool:
    """Whether an error at a place is why something cannot be opened; the message may name its directory."""
    if _is_at(place, last.place) or _is_at(last.place, place):
        return True
    return place in last.what or f"{Path(place).parent}: " in last.what


def _is_at(place: str, top: str) -> bool:
    """Whether a place is another one or below it."""
    return place == top or place.startswith((f"{top}/", f"{top}:"))


def mend(path: Path, name: str) -> Diagnosis:
    """Applies a fix wherever a finding asks for it, then looks again.

    Raises:
        UsageError: no fix has this name.
        CheckpointError: it was not safe or not possible; places before have been mended.
    """
    known = fixes()
    if name not in known:
        raise UsageError(f"there is no fix {name!r}", wanted=" or ".join(known), hint="ckpt doctor --list")
    found = examine(path).findings
    places = dict.fromkeys(each.place for each in found if each.fix == name)
    done = []
    for place in places:
        if known[name].needs_health:
            _refuse_ill(place, found)
        done.append(known[name].apply(Path(place)))
    if not os.path.lexists(path):
        return Diagnosis(str(path), True, (), (), tuple(done))
    return replace(examine(path), fixed=tuple(done))


def _refuse_ill(place: str, found: Iterable[Finding]) -> None:
    for each in found:
        if each.level == ERROR and _is_at(each.place, place):
            raise FormatError(
                "this cannot be said to be whole while something in it is an error",
                place=each.place,
                got=each.what,
                hint="mend the errors first",
            )
