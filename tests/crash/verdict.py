"""Checks of the state after a command."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from crash.disk import Content, Disk, State, Stored, lay_out
from crash.runner import Ended, Runner
from crash.scenarios import LOCATION, MODEL, OLD, OTHER, SOURCES, Scenario, empty_location

Contents = Mapping[str, bytes]
_MARK = ".ckpttools-plan"


def contents(path: Path) -> Contents | None:
    """Return every file and directory below a path without times; None if the path does not exist."""
    if not path.exists():
        return None
    result = {f"{item.relative_to(path)}{'/' if item.is_dir() else ''}": item for item in path.rglob("*")}
    return {name: _bytes(None if item.is_dir() else item, item) for name, item in sorted(result.items())}


def contents_in(state: State, path: str) -> Contents:
    """Return the same for a path in a state; empty if the path does not exist."""
    below = {
        name.removeprefix(f"{path}/"): item for name, item in state.items() if name.startswith(f"{path}/")
    }
    return {name + ("/" if item is None else ""): _bytes(item, Path(name)) for name, item in below.items()}


def _bytes(content: Content, name: Path) -> bytes:
    if content is None or isinstance(content, str):
        return os.fsencode(content or "")
    data = content.data if isinstance(content, Stored) else content.read_bytes()
    if name.name == "_CHECKPOINT_METADATA":
        with suppress(ValueError, AttributeError):  # where a crash has torn it
            return json.dumps({key: bool(value) for key, value in json.loads(data).items()}).encode()
    return data


def surroundings(root: Path, scenario: Scenario) -> Contents:
    """Return everything in the location except DST."""
    everything, name = contents(root / LOCATION) or {}, scenario.destination
    return {key: data for key, data in everything.items() if not key.startswith(f"{name}/")}


class WrongError(AssertionError):
    """A broken guarantee."""


def spoken(ended: Ended, *codes: int) -> None:
    """Assert that the exit code is one of these, and that errors have a message."""
    if "Traceback" in ended.err or ended.code not in codes or (ended.code and "Error: " not in ended.err):
        raise WrongError(f"{ended}\nwanted: exit {' or '.join(map(str, codes))} and a message")


def digest(runner: Runner, path: Path) -> str:
    """Return the digest of all arrays, or the error."""
    ended = runner.run("hash", str(path), "--json", "--no-progress")
    return str(json.loads(ended.out)["digest"]) if ended.code == 0 else str(ended)


class Case:
    """A scenario, its initial state, and its result without faults."""

    def __init__(self, runner: Runner, scenario: Scenario) -> None:
        self.runner, self.scenario = runner, scenario
        self.destination = runner.root / LOCATION / scenario.destination
        self._made: dict[str, Contents] = {"": {}}
        self._around: dict[str, Contents] = {}
        self._digests: dict[str, str] = {}
        empty_location(runner.root, scenario)
        self._before = surroundings(runner.root, scenario)
        if scenario.replaces:
            self._make(OLD)
        self._start = Disk(runner.root, (SOURCES,)).state(())
        self.disk = Disk(runner.root, (SOURCES,))
        self.recorded = self._make(MODEL)
        self.lasting = contents(runner.root / LOCATION)
        self.moments = self.disk.apply(self.recorded.notes.calls)
        self.begin()
        self._make(OTHER)

    def _make(self, model: str) -> Ended:
        ended = self.scenario.run(self.runner, model)
        assert ended.code == 0, f"{self.scenario.name}: {ended}"
        self._made[model] = contents(self.destination) or {}
        self._around[model] = surroundings(self.runner.root, self.scenario)
        # Files that grow by appending, and those that could not be linked.
        self._may_lie_otherwise = "zstd" in self.scenario.options or "link" in ended.notes.counts
        if self._may_lie_otherwise:
            self._digests[digest(self.runner, self.destination)] = model
        self.foreign()
        return ended

    def begin(self) -> None:
        """Restore the initial state of the location."""
        lay_out(self._start, self.runner.root, LOCATION)

    @property
    def before(self) -> str:
        """The model in DST before the command; "" for none."""
        return OLD if self.scenario.replaces else ""

    @property
    def between(self) -> tuple[str, ...]:
        """The models that DST may contain while the command runs; "" for none."""
        away = () if self.scenario.exchange else ("",)
        return (self.before, *away, MODEL)

    def model(self, *, marked: bool) -> str | None:
        """Return the model in DST; "" if DST does not exist, None if it is something else.

        Args:
            marked: Whether DST may have the mark of an unfinished conversion.
        """
        exact = self._made_of(contents(self.destination) or {}, marked)
        if exact is None and self._may_lie_otherwise:
            return self._digests.get(digest(self.runner, self.destination))
        return exact

    def _made_of(self, result: Contents, marked: bool) -> str | None:
        """Return the model from which this content was converted; "" for no content, None if there is no such
        model.
        """
        bare = {name: data for name, data in result.items() if not (marked and name == _MARK)}
        return next((model for model, built in self._made.items() if built == bare), None)

    def whole_in(self, state: State, *may_be: str) -> None:
        """Assert the same as `whole` for a state; the default models are `between`."""
        model = self._made_of(contents_in(state, f"{LOCATION}/{self.scenario.destination}"), True)
        if model not in (may_be or self.between):
            raise WrongError(f"DST is {_named(model)}")

    def whole(self, *may_be: str, marked: bool = False) -> str:
        """Assert that DST is one of these models, complete; "" means no DST. See `model` for `marked`."""
        model = self.model(marked=marked)
        if model not in may_be:
            expected = " or ".join(map(_named, may_be))
            raise WrongError(f"DST is {_named(model)}, not {expected}: {self._listing()}")
        return model

    def tidy(self, model: str, *, empty_is_tidy: bool = False) -> None:
        """Assert that only the original files and those of the command are next to DST.

        The staging directory may remain, empty, if `empty_is_tidy`.
        """
        around, expected = dict(surroundings(self.runner.root, self.scenario)), self._around[model]
        if empty_is_tidy:
            around.pop(f"{self.scenario.destination}.partial/", None)
        if around != expected:
            changed = sorted(key for key in {*around, *expected} if around.get(key) != expected.get(key))
            raise WrongError(f"beside DST changed: {changed}")

    def foreign(self) -> None:
        """Assert that the original files next to DST are unchanged."""
        around = surroundings(self.runner.root, self.scenario)
        lost = [key for key, data in self._before.items() if around.get(key) != data]
        if lost:
            raise WrongError(f"somebody else's files changed: {lost}")

    def again(self, model: str = MODEL) -> Ended:
        """Assert that the command succeeds without faults, or is refused with a message and leaves DST
        unchanged.

        An interrupted command may be refused only if its work is complete and nothing is left of it.
        """
        result = self.whole("", MODEL, OTHER, OLD, marked=True)
        ended = self.scenario.run(self.runner, model)
        self.foreign()
        if ended.code == 0:
            spoken(ended, 0)
            self.whole(model)
            self.tidy(model)
            return ended
        spoken(ended, 2, 3, 4, 5)
        self.whole(result, self.before, marked=True)
        if "  hint " not in ended.err:
            raise WrongError(f"{ended}\nwanted: a next step")
        if model == MODEL:
            if result != model:
                raise WrongError(f"the same command does not go on: {ended}")
            self.tidy(model, empty_is_tidy=True)
        return ended

    def _listing(self) -> list[str]:
        result = sorted(str(item.relative_to(self.destination)) for item in self.destination.rglob("*"))
        return result or ["empty" if self.destination.exists() else "nothing"]


def _named(model: str | None) -> str:
    names = {"": "absent", None: "something else", MODEL: "new", OTHER: "of the other command", OLD: "old"}
    return names[model]
