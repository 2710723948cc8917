"""Select the leaves of a tree by patterns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpttools.array.patterns import first_match, prefixes
from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError, similar_names
from ckpttools.core.message_terms import action, quoted_option
from ckpttools.core.notes import Notes
from ckpttools.transforms.base import Move, Transformed, move_leaves

_MAX_NAMED = 8


@validate_fields
@dataclass(frozen=True)
class Select:
    """A transform that keeps the leaves matching `keep` (all if it is empty), except those matching `drop`.

    A pattern is a glob of a full path, with keys joined by "/" or by ".", or a key with everything below it:
    `params/*`, `opt_state`, `*.bias`; see `ckpttools.array.patterns`.

    Attributes:
        keep: The patterns of leaves to keep.
        drop: The patterns of leaves to drop, which take precedence over `keep`.
        prefix: Common prefix of the kept names, which is stripped: "policy", or "policy.model".
    """

    keep: Sequence[str] = ()
    drop: Sequence[str] = ()
    prefix: str = ""

    def __call__(self, tree: Tree) -> Transformed:
        """Return the tree of the selected leaves. The step and custom metadata are kept.

        Raises:
            UsageError: A pattern matches nothing, no name has the prefix, or no array is left.
            FormatError: The remaining elements of a list are not its first ones.
        """
        kept = _match_paths(tree, self.keep) if self.keep else set(tree)
        kept -= _match_paths(tree, self.drop)
        names = _cut_prefix(tree, self.prefix) if self.prefix else {path: path for path in tree}
        kept &= names.keys()
        dropped = [path for path in tree.arrays if path not in kept]
        if len(dropped) == len(tree.arrays):
            raise UsageError(
                "no array is left",
                location=tree.metadata.location or None,
                got=" ".join(self._options()),
                hint="keep more leaves, or drop fewer",
            )
        left = (Move(path, names[path], leaf) for path, leaf in tree.items() if path in kept)
        return Transformed(move_leaves(tree, left), Notes(dropped=tuple(map(keystr, dropped))))

    def _options(self) -> Iterator[str]:
        yield from (quoted_option("prefix", self.prefix) for _ in filter(None, [self.prefix]))
        yield from (quoted_option("keep", pattern) for pattern in self.keep)
        yield from (quoted_option("drop", pattern) for pattern in self.drop)


def _cut_prefix(tree: Tree, prefix: str) -> dict[Path, Path]:
    """Strip a prefix. Returns each path that begins with it, with the rest of the path.

    Raises:
        UsageError: No path has the prefix. The message suggests similar names.
    """
    expected = prefix.rstrip("./") + "."
    cut = {path: remainder for path in tree if (remainder := _path_below(path, expected))}
    if cut:
        return cut
    known = {name.partition(".")[0] for name in map(dotted, tree)}
    near = similar_names(prefix.strip("./"), known)
    raise UsageError(
        "no name begins with this prefix",
        location=tree.metadata.location or None,
        got=prefix,
        expected=f"one of {', '.join(sorted(known)[:_MAX_NAMED])}",
        hint=f"did you mean {' or '.join(near)}?"
        if near
        else "a prefix consists of complete words between dots",
    )


def _path_below(path: Path, prefix: str) -> Path:
    """Return the rest of a path after a prefix that ends in a dot; empty if the path lacks the prefix."""
    for location, key in enumerate(path):
        text = str(key)
        if text.startswith(prefix):
            return (text[len(prefix) :], *path[location + 1 :])
        if not prefix.startswith(f"{text}."):
            return ()
        prefix = prefix[len(text) + 1 :]
        if not prefix:
            return path[location + 1 :]
    return ()


def require_matches(patterns: Iterable[str], paths: Iterable[Path], location: str) -> None:
    """Check that every pattern matches a path.

    Raises:
        UsageError: A pattern matches nothing. The message suggests similar paths.
    """
    known = list(paths)
    for pattern in patterns:
        if not any(first_match(path, (pattern,)) for path in known):
            raise unmatched(pattern, known, location)


def unmatched(pattern: str, paths: Sequence[Path], location: str, expected: str | None = None) -> UsageError:
    """Create the error for a pattern that matches no path, with similar paths and their kind."""
    near = [_as_pattern(name, paths) for name in similar_names(pattern.strip("*/."), _names(paths))]
    return UsageError(
        "no array name matches the pattern",
        location=location or None,
        got=pattern,
        expected=expected,
        hint=f"did you mean {' or '.join(near)}?"
        if near
        else f"{action('inspect.names', location or 'SRC')} shows all names",
    )


def _as_pattern(name: str, paths: Sequence[Path]) -> str:
    """Turn a word within paths into a pattern. The name of a path or of its parent is unchanged."""
    return name if any(first_match(path, (name,)) for path in paths) else f"'*{name}*'"


def _match_paths(tree: Tree, patterns: Sequence[str]) -> set[Path]:
    require_matches(patterns, tree, tree.metadata.location)
    return {path for path in tree if first_match(path, patterns)}


def _names(paths: Iterable[Path]) -> list[str]:
    """Return all paths, their prefixes up to a slash or a dot, and the words between, without duplicates."""
    names: dict[str, None] = {}
    for path in paths:
        names.update(dict.fromkeys(prefixes(keystr(path), "/")))
        names.update(dict.fromkeys(prefixes(dotted(path), ".")))
        names.update(dict.fromkeys(dotted(path).replace("/", ".").split(".")))
    return list(names)
