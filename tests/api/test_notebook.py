"""Trees and reports in notebooks: as HTML, as data frames, and in a kernel of Jupyter itself."""

from html.parser import HTMLParser
from itertools import product

import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient
from safetensors.numpy import save_file
from support.locations import GOLDEN
from support.trees import tree_with

import ckpttools
from ckpttools import Text, Tree

HF = GOLDEN / "qwen3" / "hf"
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


class Page(HTMLParser):
    """The text of a page whose elements are all closed, and whose tags are the expected ones."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.tags == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=4).map(tuple), st.integers(0, 9), max_size=12))
def test_tree_html_is_well_formed_for_any_names(sizes):
    tree = tree_with({path: np.zeros(size, "f4") for path, size in sizes.items()})
    page = Page(tree._repr_html_())
    assert page.seen <= {"div", "details", "summary", "span"}
    assert f"{len(sizes):,} array" in page.text


def test_tree_html_shows_an_array_without_keys():
    assert "float32[3]" in Page(tree_with({(): np.zeros(3, "f4")})._repr_html_()).text


def test_tree_html_folds_equal_layers_and_counts_their_bytes():
    page = Page(ckpttools.open(HF)._repr_html_())
    assert "layers.{0..3} 44 arrays, 296 kB" in page.text
    assert "embed_tokens.weight bfloat16[256, 64] · 32.8 kB" in page.text


def test_tree_html_of_many_names_is_short():
    one = np.zeros(1, "f4")
    blocks = tree_with({(f"block {number}", "x" * (number % 7 + 1)): one for number in range(7000)})
    text = Page(blocks._repr_html_()).text
    assert text.count("… (1,000 keys)") == 7 and len(text) < 1500
    names = map("".join, product("abcdefghijklm", repeat=3))
    assert "… 197 more lines" in Page(tree_with({(name, "x"): one for name in names})._repr_html_()).text


def test_length_of_a_tree_agrees_with_its_repr():
    tree = Tree({**tree_with({"x": np.zeros(3)}).leaves, ("note",): Text("<b>")})
    assert len(tree) == 2
    assert repr(tree).startswith("<Tree: 1 array and 1 other leaf, 24 bytes")
    assert "&lt;b&gt;" in tree._repr_html_()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    broken = tmp_path_factory.mktemp("broken")
    save_file({"a": np.float32([1, np.nan]), "b": np.zeros((2, 3), "f4")}, broken / "model.safetensors")
    return {
        "inspect": ckpttools.inspect(HF),
        "stats": ckpttools.stats(HF, histogram=True),
        "hash": ckpttools.hash(HF),
        "diff": ckpttools.diff(broken, ckpttools.open(broken).glob("a"), explain=False),
        "verify": ckpttools.verify(broken, ckpttools.open(broken).glob("a")),
        "chunks": ckpttools.chunks(HF),
        "doctor": ckpttools.doctor(broken),
        "ls": ckpttools.ls(GOLDEN / "llama3.1" / "maxtext_scanned"),
    }


@pytest.mark.parametrize("name", ["inspect", "stats", "hash", "diff", "verify", "chunks", "doctor", "ls"])
def test_report_has_a_row_for_each_item(reports, name):
    report = reports[name]
    rows = getattr(report, report.rows_field)
    assert rows
    frame = report.to_pandas()
    assert len(frame) == len(rows)
    page = Page(report._repr_html_())
    assert type(report).__name__ in page.text
    assert "svg" in page.seen or name != "stats"


def test_nested_fields_are_columns(reports):
    frame = reports["stats"].to_pandas()
    largest = frame.loc[frame["statistics.max"].idxmax()]
    assert largest["path"] == max(reports["stats"].arrays, key=lambda item: item.statistics.max).path
    assert frame["nbytes"].sum() == ckpttools.open(HF).nbytes


def test_arrays_become_numpy_arrays():
    array = ckpttools.open(HF)["model.norm.weight"]
    np.testing.assert_array_equal(array.to_numpy(), np.asarray(array))
    assert "64 elements, 128 B, not read" in Page(array._repr_html_()).text


def test_jupyter_shows_trees_and_completes_names():
    sources = (
        f"import ckpttools\ntree = ckpttools.open({str(HF)!r})\ntree",
        "get_ipython().complete('model.nor', 'tree[\"model.nor', 15)[1]",
    )
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    shown, completed = (cell.outputs[0]["data"] for cell in notebook.cells)
    assert shown["text/html"] == ckpttools.open(HF)._repr_html_()
    assert shown["text/plain"].startswith("<Tree of safetensors")
    assert "model.norm.weight" in completed["text/plain"]
