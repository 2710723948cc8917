"""What a tree is to MaxText is worked out once for each tree, however many ask."""

import gc
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest
from support.internals import view_of
from support.locations import GOLDEN, TRAINED

import ckpttools

PACKAGE = Path(ckpttools.__file__).parent
# What a view has worked out, in the modules below.
WORK = [
    "flavor_of",
    "regions_of",
    "optimizer_of",
    "scan_axis",
    "stacked_keys",
    "single_layers",
    "layer_stacks",
]
OF_VIEWS = {f"maxtext/{name}.py" for name in ("flavors", "layers", "layer_notes", "optimizer")}


def calls(work):
    """(file of the caller, file, function) -> number of calls within the package while something is done."""
    result = Counter()

    def watch(frame, event, _):
        if event == "call" and frame.f_back is not None:
            locations = [Path(item.f_code.co_filename) for item in (frame.f_back, frame)]
            if all(location.is_relative_to(PACKAGE) for location in locations):
                caller, called = (location.relative_to(PACKAGE).as_posix() for location in locations)
                result[caller, called, frame.f_code.co_name] += 1

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return result


def number(result, name, caller=None):
    return sum(n for (by, _, called), n in result.items() if called == name and caller in (None, by))


# The trees of a comparison: both sources, Hugging Face's with names split at "/" and at ".", and MaxText's
# layer by layer. Before there were views, flavors were told 8 times and stacked keys 11 times for them.
@pytest.mark.parametrize(
    ("work", "trees"),
    [
        (lambda: ckpttools.diff(GOLDEN / "llama3.1/maxtext_scanned", GOLDEN / "llama3.1/hf"), 5),
        (lambda: ckpttools.inspect(TRAINED), 1),
    ],
    ids=["diff", "inspect"],
)
def test_view_computes_each_property_once(work, trees):
    result = calls(work)
    assert number(result, "_view") == trees
    assert number(result, "_roles", "array/tree.py") == number(result, "_view")
    for name in WORK:
        # A tree with arrays that are scanned along another axis asks a second time, without these.
        assert number(result, name, "maxtext/view.py") <= 2 * number(result, "_view"), name
    # Nobody else asks for it past the view.
    outside = {by for by, called, _ in result if called in OF_VIEWS and not by.startswith("maxtext/")}
    assert outside == set()


def test_view_lives_as_long_as_its_tree():
    tree = ckpttools.open(TRAINED)
    view = view_of(tree)
    assert view_of(tree) is view and view.parameters is view.parameters
    gone = weakref.ref(tree)
    gc.disable()
    try:
        del tree
        assert gone() is None
    finally:
        gc.enable()
