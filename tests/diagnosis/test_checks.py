"""What writers refuse: also those of other packages, which call it by its name."""

from __future__ import annotations

import numpy as np
import pytest
from support.trees import lazy

from ckpttools import Empty, FormatError, Text, Tree
from ckpttools.formats.checks import check_plain

ARRAY = lazy(np.ones(2, np.float32))


def test_arrays_without_other_leaves_are_plain():
    check_plain(Tree({("a",): ARRAY, ("b", 0): ARRAY}), "a table")
    check_plain(Tree({}), "a table")


@pytest.mark.parametrize("leaf", [Empty("None"), Text("adam")])
def test_non_array_leaf_is_named(leaf):
    with pytest.raises(FormatError, match="a table can hold only arrays") as error:
        check_plain(Tree({("a",): ARRAY, ("state", "kind"): leaf}), "a table")
    assert "state/kind" in str(error.value) and "\n    a\n" not in str(error.value)
