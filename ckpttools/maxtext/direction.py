"""Which way a conversion goes: a source that is already what it would become is told to be that."""

from __future__ import annotations

from shlex import quote

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.errors import FormatError
from ckpttools.maxtext.view import view_of

_MAXTEXT, _HUGGING_FACE = "token_embedder.embedding", "embed_tokens.weight"


def refuse_maxtext(tree: Tree) -> None:
    """Raises FormatError if the arrays of a source for MaxText have MaxText's names already."""
    if _is_of(tree, _MAXTEXT) and not _is_of(tree, _HUGGING_FACE):
        raise _other_way(tree, "MaxText", "maxtext-to-hf", "Hugging Face", "to-orbax")


def refuse_hugging_face(tree: Tree) -> None:
    """Raises FormatError if the arrays of a source for Hugging Face have Hugging Face's names already."""
    if _is_of(tree, _HUGGING_FACE) and not _is_of(tree, _MAXTEXT):
        raise _other_way(tree, "Hugging Face", "hf-to-maxtext", "MaxText", "to-safetensors")


def _is_of(tree: Tree, embedding: str) -> bool:
    """Whether the embedding has the name that it has on one side, be it within a composite model."""
    return any(f".{dotted(path)}".endswith(f".{embedding}") for path in view_of(tree).parameters)


def _other_way(tree: Tree, this: str, command: str, other: str, rewrite: str) -> FormatError:
    source = quote(tree.metadata.place)
    return FormatError(
        f"this is a {this} checkpoint already",
        place=tree.metadata.place,
        hint=f"ckpt convert {command} {source} DST makes a {other} one of it; "
        f"ckpt convert {rewrite} {source} DST writes it with the names that it has",
    )
