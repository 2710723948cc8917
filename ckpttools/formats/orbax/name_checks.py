"""Names and sizes that Orbax cannot save."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.message_terms import call, option
from ckpttools.formats.base import SIDECARS
from ckpttools.formats.checks import LONGEST_NAME, is_file_name
from ckpttools.formats.orbax import metadata as orbax_metadata
from ckpttools.formats.orbax.index import PROCESSES

# Maximum number of options in the command of a hint.
_MAX_DROPS = 8


def check_sizes(tree: Tree) -> None:
    """Reject arrays without elements, which Orbax cannot store."""
    paths = [path for path, array in tree.arrays.items() if not array.size]
    if paths:
        empty = [f"{keystr(path)}: {list(tree.arrays[path].shape)}" for path in paths]
        source, drops = tree.metadata.location or "SRC", [*map(keystr, paths[:_MAX_DROPS])]
        more = " and so on" if len(paths) > _MAX_DROPS else ""
        raise FormatError(
            "Orbax cannot store arrays without elements:" + listing(empty),
            location=tree.metadata.location or None,
            hint=f"leave them out: {call('select', source, 'DST', format='orbax', drop=drops)}{more}; or "
            "keep "
            f"them in plain zarr v3: {call('convert', source, 'DST', format='zarr3')}",
        )


def check_names(tree: Tree) -> None:
    """Reject names that collide or are ambiguous in Orbax, which joins keys with dots.

    tensorstore drops a trailing slash (`a/` is `a`), and does not allow a name for the root of all arrays.
    """
    unclear = [json.dumps(path) for path in tree.arrays if path and "" in keystr(path).split("/")]
    if unclear:
        source = tree.metadata.location or "SRC"
        raise FormatError(
            "these names have empty parts and collide with others in Orbax:" + listing(unclear),
            location=tree.metadata.location or None,
            expected="non-empty keys without '//' that neither start nor end with '/'",
            hint=f"rename them: {call('remap', source, 'DST', format='orbax', map='RULES.toml')}; "
            'the file has [[rules]] with from = "" and to = "unnamed", and so on',
        )
    names: dict[str, Path] = {}
    for path in tree:
        other = names.setdefault(dotted(path), path)
        if other != path:
            raise FormatError(
                "two paths have the same name in Orbax, which joins keys with dots",
                location=keystr(path),
                got=f"{keystr(other)} is also {dotted(path)!r}",
                hint="rename one of them",
            )


def check_directories(tree: Tree) -> None:
    """Reject names that cannot be directories: without OCDBT each array is a directory next to Orbax's
    files."""
    names = [dotted(path) for path in tree.arrays if path]
    wrong = [name for name in names if not is_file_name(name) or _is_taken(name)]
    if wrong:
        raise FormatError(
            "without OCDBT these arrays would need invalid directory names:" + listing(wrong),
            location=tree.metadata.location or None,
            expected=f"names without '/' and '\\', of at most {LONGEST_NAME} bytes, that are not in use",
            hint=f"write with {option('ocdbt', True)}, or rename them",
        )


def _is_taken(name: str) -> bool:
    """Return whether a file or directory of Orbax or ckpttools has this name in an item."""
    return name in orbax_metadata.OWN_FILES or name == SIDECARS or fnmatchcase(name, PROCESSES)
