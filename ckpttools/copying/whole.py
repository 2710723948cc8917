"""Check that a part is complete, because a copy would also lack missing files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttools.array.gaps import refuse_incomplete
from ckpttools.copying.part import FileGroup
from ckpttools.core.errors import FormatError
from ckpttools.core.text import matches_any, plural, sample_names
from ckpttools.formats.json_file import read_json
from ckpttools.formats.lookalikes import MAX_POINTER_BYTES, is_pointer, refuse_disguise
from ckpttools.formats.orbax.entries import entries_of
from ckpttools.formats.orbax.hosts import is_part_of_a_host
from ckpttools.formats.orbax.metadata import TREE_FILE, parse_tree
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, orbax_at
from ckpttools.formats.registry import open_tree
from ckpttools.formats.sidecar import PATTERNS
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

# Other files that repositories keep in Git LFS.
_LARGE_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.distcp")


def check_whole(part: FileGroup) -> tuple[str, ...]:
    """Check metadata and indexes of items, and look for missing chunks and Git LFS pointers.

    Returns:
        Remarks on items that were not searched for missing chunks, with the reason (a copy includes arrays of
        kinds that ckpttools does not read), and on pointers in place of other files.

    Raises:
        FormatError: Metadata is damaged; an index refers to files outside its item, or to files that are
            missing or too short; chunks are missing; or a tokenizer or configuration file is a Git LFS
            pointer.
        StorageError: The part cannot be read.
    """
    remarks = [*_check_pointers(part)]
    result = orbax_at(part.source)
    if isinstance(result, OrbaxRun):
        return (*remarks,)  # Files next to steps, or a checkpoint that has already been opened.
    for item in (result,) if isinstance(result, OrbaxItem) else result.items:
        parse_tree(read_json(item.directory / TREE_FILE), str(item.directory / TREE_FILE))
        _check_index(item.directory)
        # One host's part does not have the chunks of the others.
        if not is_part_of_a_host(item.directory):
            remarks += _check_chunks(item.directory)
    return tuple(remarks)


def _check_pointers(part: FileGroup) -> Iterator[str]:
    """Reject Git LFS pointers in place of sidecars, and report those in place of files that no check opens.

    Files in subdirectories count only if they have typical names, because a checkpoint can have 100,000 chunk
    files, and in a network store each read is a request.
    """
    small = [
        name
        for name, result in part.files.items()
        if 0 < result.size <= MAX_POINTER_BYTES
        and ("/" not in name or _is_named(name, (*PATTERNS, *_LARGE_FILES)))
    ]
    heads = map_concurrently(part.source.store, lambda name: (part.source / name).read_bytes(), small)
    pointers = {name: head for name, head in zip(small, heads, strict=True) if is_pointer(head)}
    for name in pointers:
        if _is_named(name, PATTERNS):
            refuse_disguise(pointers[name], str(part.source / name))
    if pointers:
        are = "is a Git LFS pointer" if len(pointers) == 1 else "are Git LFS pointers"
        copies = "so are their copies" if len(pointers) > 1 else "so is its copy"
        yield (
            f"{plural(len(pointers), 'file')} {are}, not the data, and {copies}: "
            f"{sample_names(sorted(pointers))}; "
            f"run `git lfs pull` in {part.source} before copying"
        )


def _is_named(path: str, patterns: Iterable[str]) -> bool:
    """Return whether the last component of a path matches a pattern.

    The names of chunks are rejected early.
    """
    name = path.rpartition("/")[2]
    return name[:1].isalpha() and matches_any(name, patterns)


def _check_index(item: Location) -> None:
    # An index that names a file above its directory is rejected while it is read.
    fault = next(iter(entries_of(item).faults.values()), None)
    if fault is not None:
        raise FormatError("files that the index names are missing", location=item, got=fault, hint=fault.hint)


def _check_chunks(item: Location) -> Iterator[str]:
    try:
        tree = open_tree(item)
    except FormatError as error:
        yield f"{item} was not searched for missing chunks: {error.raw.message}{_of(error)}"
        return
    refuse_incomplete(tree.arrays.values(), str(item))


def _of(error: FormatError) -> str:
    return "" if error.raw.got is None else f" ({error.raw.got})"
