"""One view of a tree's quantized weights, which all commands ask."""

import gc
import weakref

import numpy as np
from support import quantized_weights as built
from support.internals import quantized_view

from ckpttools import DTYPES, Tree
from ckpttools.quantized.view import make_comparable


def fp8_tree() -> Tree:
    return built.fp8_rows(np.random.default_rng(0), (8, 8)).tree


def test_views_of_a_tree_share_their_results():
    tree = fp8_tree()
    assert quantized_view(tree).candidates is quantized_view(tree).candidates
    assert quantized_view(tree).dequantized() is quantized_view(tree).dequantized()


def test_view_does_not_keep_its_tree_alive():
    tree = fp8_tree()
    quantized_view(tree).dequantized()
    freed = weakref.ref(tree)
    gc.disable()
    try:
        del tree
        assert freed() is None
    finally:
        gc.enable()


def test_dequantized_tree_is_built_once_for_each_dtype():
    view = quantized_view(fp8_tree())
    plain = view.dequantized().tree
    assert view.shown().tree is view.plain().tree is view.plain_where_possible().tree is plain
    assert view.dequantized(DTYPES["float32"]).tree is not plain
    assert view.dequantized(DTYPES["float32"]) is view.dequantized(DTYPES["float32"])


def test_scales_are_read_once(monkeypatch):
    from ckpttools.quantized import scale_checks

    calls, check = [], scale_checks.value_faults
    monkeypatch.setattr(scale_checks, "value_faults", lambda *a, **k: calls.append(a) or check(*a, **k))
    view = quantized_view(fp8_tree())
    view.plain()
    view.check_scales()
    assert view.scale_faults().damaged == () and len(calls) == 1


def test_plain_tree_is_returned_unchanged():
    tree = Tree({})
    view = quantized_view(tree)
    assert view.dequantized().tree is view.plain().tree is view.shown().tree is tree
    assert view.summary is None and not view.is_described
    assert [item.tree for item in make_comparable(tree, tree, is_read=True)] == [tree, tree]
