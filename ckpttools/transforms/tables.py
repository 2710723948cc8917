"""Arrays that hold whole numbers of something, in whichever dtype: unlike weights they are no amounts."""

from __future__ import annotations

from ckpttools.array.tree import Path

# The experts of each token, as DeepSeek V4 calls them, and MaxText, which trains with them in float32.
_TABLES = frozenset(("tid2eid",))


def is_table(path: Path) -> bool:
    """Whether an array is a table of whole numbers.

    In bfloat16 expert 257 would be 256: a wrong one, without a word.
    """
    return not _TABLES.isdisjoint(key for item in path for key in str(item).split("."))
