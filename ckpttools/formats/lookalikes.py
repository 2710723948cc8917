"""Recognize files that are commonly mistaken for safetensors files, with a hint for each kind."""

from __future__ import annotations

import re
from typing import NoReturn

from ckpttools.core.errors import CheckpointError, FormatError

# Each entry: a pattern for the start of the file, what the file is, and a hint.
_WEB_PAGE = (
    rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml)",
    "a web page",
    "the download returned a web page: log in or pass an access token, then fetch the file again",
)
_DISGUISES = (
    _WEB_PAGE,
    (rb"GGUF", "a GGUF file", "fetch the safetensors files of this model; GGUF cannot be read"),
    (
        rb"PK",
        "a zip archive, as torch.save writes it",
        "load it with torch.load(..., weights_only=True) and save it with safetensors.torch.save_file",
    ),
    (
        rb"\x80[\x02-\x05][^\0]",
        "a pickle, as older versions of torch.save write it",
        "load it with torch.load(..., weights_only=True) and save it with safetensors.torch.save_file",
    ),
    (
        rb"\s*[{\[]",
        "a JSON text",
        "open it in a text editor: it may be an index, a configuration, or a server's error message",
    ),
    (
        rb"\0{8}",
        "a file that starts with zeros",
        "the download reserved the space and did not fill it: fetch it again",
    ),
)

# A pointer file has about 130 bytes; the specification requires fewer than 1,024.
MAX_POINTER_BYTES = 1024


_PULL = "run `git lfs pull` in that repository, or download the file with `hf download`"
# Placeholders left by a failed or skipped download: (start of the file, kind, hint).
_NOT_FETCHED = (
    (rb"version https://git-lfs", "a Git LFS pointer", _PULL),
    (rb"/annex/objects/", "a git-annex pointer", "run `git annex get .` in that repository"),
    _WEB_PAGE,
)


def missing_content(head: bytes) -> tuple[str, str] | None:
    """Return the kind of a placeholder file from a failed or skipped download, and a hint; else None.

    Args:
        head: The start of the file, up to `MAX_POINTER_BYTES`.
    """
    result = ((kind, hint) for start, kind, hint in _NOT_FETCHED if re.match(start, head))
    return next(result, None)


def refuse_pointer(content: bytes | bytearray, location: str, kind: type[CheckpointError]) -> None:
    """Raise an error of class `kind` if a file is a Git LFS pointer."""
    if is_pointer(content):
        _refuse_pointer(content, location, kind)


def is_pointer(head: bytes | bytearray) -> bool:
    """Return whether a file that starts with `head` is a Git LFS pointer."""
    return head.startswith(b"version https://git-lfs")


def refuse_disguise(
    head: bytes,
    location: str,
    kind: type[CheckpointError] = FormatError,
    expected: str = "a safetensors file",
) -> None:
    """Raise an error of class `kind` if `head` is the start of a known kind of file other than `expected`."""
    if is_pointer(head):
        _refuse_pointer(head, location, kind)
    for start, description, hint in _DISGUISES:
        if re.match(start, head):
            got = f"a file that starts with {head[:24]!r}"
            raise kind(
                f"this is {description}, not {expected}",
                location=location,
                got=got,
                expected=expected,
                hint=hint,
            )


def _refuse_pointer(head: bytes | bytearray, location: str, kind: type[CheckpointError]) -> NoReturn:
    size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
    real = f"of {size[1].decode()} bytes" if size else "that the pointer stands for"
    raise kind(
        "this is a Git LFS pointer, not the file itself",
        location=location,
        got="the text of the pointer",
        expected=f"the file {real}",
        hint=_PULL,
    )
