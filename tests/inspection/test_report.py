"""The report: what is packed into the page, the command around it, and the page itself in a browser."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.chromium import Browser, browser, executable
from support.command_line import ckpt
from support.golden_data import golden_checkpoint
from support.internals import Constant, inspect_tree
from support.locations import GOLDEN_0_2_5, HF

import ckpttools
from ckpttools import DTYPES, Tree
from ckpttools.inspection.html_report import contents, page
from ckpttools.inspection.layer_rows import layer_rows
from ckpttools.inspection.stats import inspect_stats
from ckpttools.testing.strategies import many_leaves, stored

SCANNED = golden_checkpoint(scan=True)
# A name that would do something if it were taken for HTML.
HOSTILE = "model.layers.0.</script><img src=x onerror=alert(1)>.weight"


def packed(tree: Tree, *, stats: bool = True) -> dict[str, Any]:
    options: dict[str, Any] = {"memory": 1 << 30, "jobs": 2, "per_layer": True, "histograms": True}
    result = inspect_stats(tree, **options) if stats else None
    return contents(inspect_tree(tree), result, layer_rows(tree))


def unpacked(text: str) -> dict[str, Any]:
    match = re.search(r'id="contents">([A-Za-z0-9+/=]+)</script>', text)
    assert match
    built: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return built


class TestPackedContents:
    def test_packed_paths_round_trip(self):
        tree = ckpttools.open(HF)
        coded, paths = packed(tree, stats=False)["paths"], []
        before = ""
        for shared, rest in zip(coded[::2], coded[1::2], strict=True):
            before = before[:shared] + rest
            paths.append(before)
        assert paths == [".".join(map(str, path)) for path in tree.arrays]

    def test_shared_prefixes_do_not_split_surrogate_pairs(self):
        """JavaScript counts what is beyond 16 bits as two letters."""
        names = ("a\U0001f600a.w", "a\U0001f600b.w", "ab.w")
        coded = packed(Tree({(name,): Constant((1,), DTYPES["float32"], bytes(4)) for name in names}))[
            "paths"
        ]
        before, paths = "", []
        for shared, rest in zip(coded[::2], coded[1::2], strict=True):
            units = before.encode("utf-16-le", "surrogatepass")[: 2 * shared]
            before = (units + rest.encode("utf-16-le", "surrogatepass")).decode("utf-16-le")
            paths.append(before)
        assert paths == list(names)

    def test_constant_layers_have_no_deviation(self, tmp_path: Path):
        layers = {f"model.layers.{k}.w": np.full(770 + k, 0.1 + k, np.float32) for k in range(4)}
        save_file(layers, tmp_path / "c.safetensors")
        (row,) = packed(ckpttools.open(tmp_path / "c.safetensors"))["heat"]
        assert [cell[1] for cell in row["layers"].values()] == [0] * 4

    def test_statistics_of_quantized_weights_are_next_to_their_names(self):
        source = GOLDEN_0_2_5 / "qwen3.5-fp8" / "hf"
        result = unpacked(ckpttools.report(source, memory="512MiB", jobs=1).html)
        assert len(result["bytes"]) == len(result["stats"]["norm"])
        norms = {array.path: array.statistics.norm for array in ckpttools.stats(source, jobs=1).arrays}
        paths = [array.path for array in ckpttools.inspect(source).arrays]
        assert result["stats"]["norm"] == pytest.approx([norms[path] for path in paths])

    def test_heat_map_rows_are_equal_stacked_or_not(self):
        stacked, single = (packed(ckpttools.open(golden_checkpoint(scan)))["heat"] for scan in (True, False))
        assert {row["name"] for row in stacked} == {row["name"] for row in single}
        by_name = {row["name"]: row for row in single}
        for row in stacked:
            assert list(row["layers"]) == ["0", "1", "2", "3"]
            for layer, cell in row["layers"].items():
                assert cell == pytest.approx(by_name[row["name"]]["layers"][layer], rel=1e-4)

    def test_experts_share_one_row(self, tmp_path: Path):
        rng = np.random.default_rng(0)
        experts = {
            f"model.layers.{layer}.mlp.experts.{expert}.up.weight": rng.standard_normal((4, 5)) + layer
            for layer in range(3)
            for expert in range(8)
        }
        save_file(experts, tmp_path / "a.safetensors")
        (row,) = packed(ckpttools.open(tmp_path / "a.safetensors"))["heat"]
        assert row["name"] == "model.layers.*.mlp.experts.*.up.weight"
        for layer, (norm, std, mean, limit, bad) in row["layers"].items():
            whole = np.concatenate([value for name, value in experts.items() if f"layers.{layer}." in name])
            assert norm == pytest.approx(sqrt((whole**2).sum()), rel=1e-4)
            assert (std, mean) == pytest.approx((whole.std(), whole.mean()), rel=1e-3)
            assert (limit, bad) == (pytest.approx(abs(whole).max(), rel=1e-4), 0)

    def test_page_numbers_are_valid_json(self, tmp_path: Path):
        values = np.array([np.nan, np.inf, 1e38, -1e38], np.float32)
        save_file({"layers.0.a": values, "layers.1.a": values[:2]}, tmp_path / "a.safetensors")
        built = page(packed(ckpttools.open(tmp_path / "a.safetensors")), "bad numbers")
        assert unpacked(built)["stats"]["nan"] == [1, 1]
        assert unpacked(built)["heat"][0]["layers"]["1"] == [None, None, None, None, 2]

    def test_page_of_many_arrays_stays_small(self):
        built = page(packed(many_leaves(20_000), stats=False), "many")
        assert len(built) < 250_000
        assert len(unpacked(built)["bytes"]) == 20_000

    def test_equal_checkpoints_give_equal_pages(self):
        tree = ckpttools.open(SCANNED)
        assert page(packed(tree), "a") == page(packed(tree), "a")

    def test_page_loads_no_external_resources(self):
        built = page(packed(ckpttools.open(SCANNED)), "<b>title & more</b>")
        assert "<title>&lt;b&gt;title &amp; more&lt;/b&gt;</title>" in built
        assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', built) == []
        assert set(re.findall(r"https?://[^\s\"']+", built)) == {"http://www.w3.org/2000/svg"}
        assert "innerHTML" not in built and "<!-- " not in built


class TestCommand:
    def test_report_writes_a_page(self, tmp_path: Path):
        result = ckpt("inspect", "report", SCANNED, "-o", tmp_path / "a.html")
        assert result.exit_code == 0, result.output
        assert "13 arrays" in result.stdout
        assert unpacked((tmp_path / "a.html").read_text())["facts"]["kind"] == "stacked-inference"
        assert [path.name for path in tmp_path.iterdir()] == ["a.html"]

    def test_report_accepts_undecodable_directory_name(self, tmp_path: Path):
        odd = tmp_path / os.fsdecode(b"odd\xff")
        odd.mkdir()
        save_file({"a": np.ones(3, np.float32)}, odd / "model.safetensors")
        assert ckpt("inspect", "report", odd, "-o", tmp_path / "r.html").exit_code == 0

    def test_report_accepts_sums_beyond_float64(self, tmp_path: Path):
        big = {f"model.layers.0.experts.{k}.w": np.full(2, 9e153) * [1, 0.1] for k in range(4)}
        save_file(big | {"model.layers.1.experts.0.w": np.ones(2)}, tmp_path / "b.safetensors")
        assert ckpt("inspect", "report", tmp_path / "b.safetensors", "-o", tmp_path / "r.html").exit_code == 0

    def test_report_prints_json(self, tmp_path: Path):
        result = ckpt("inspect", "report", HF, "-o", tmp_path / "a.html", "--json", "--no-stats")
        size = (tmp_path / "a.html").stat().st_size
        assert json.loads(result.stdout) == {
            "schema": 1,
            "output": str(tmp_path / "a.html"),
            "nbytes": size,
            "num_arrays": 39,
            "stats": False,
        }

    def test_no_stats_reads_no_arrays(self, tmp_path: Path):
        path = tmp_path / "cut.safetensors"
        save_file({"a": np.zeros(1000, np.float32)}, path)
        tree = ckpttools.open(path)
        path.write_bytes(path.read_bytes()[:100])
        assert packed(tree, stats=False)["stats"] is None

    def test_page_is_written_to_stdout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        result = ckpt("inspect", "report", SCANNED, "-o", "-", "--no-stats")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("<!doctype html>") and result.stdout.endswith("</html>\n")
        assert result.stderr.startswith("13 arrays, a page of ")
        assert list(tmp_path.iterdir()) == []
        refused = ckpt("inspect", "report", SCANNED, "-o", "-", "--json")
        assert refused.exit_code == json.loads(refused.stdout)["error"]["exit_code"] == 2
        named = ckpt("inspect", "report", SCANNED, "-o", "./-", "--no-stats")
        assert named.exit_code == 0 and [path.name for path in tmp_path.iterdir()] == ["-"]

    def test_existing_file_is_replaced_only_with_overwrite(self, tmp_path: Path):
        location = tmp_path / "a.html"
        location.write_text("mine")
        result = ckpt("inspect", "report", HF, "-o", location)
        assert result.exit_code == 2
        assert "--overwrite" in result.stderr
        assert location.read_text() == "mine"
        assert ckpt("inspect", "report", HF, "-o", location, "--overwrite", "--no-stats").exit_code == 0
        assert location.read_text().startswith("<!doctype html>")

    def test_page_never_replaces_a_checkpoint(self, tmp_path: Path):
        location = tmp_path / "model.safetensors"
        save_file({"a": np.ones(3, np.float32)}, location)
        before = location.read_bytes()
        (tmp_path / "alias").symlink_to(location)
        for source, output in ((location, location), (tmp_path, location), (location, tmp_path / "alias")):
            result = ckpt("inspect", "report", source, "-o", output, "--overwrite")
            assert result.exit_code == 2
            assert "is a part of the checkpoint" in result.stderr
        assert location.read_bytes() == before
        for _ in range(2):
            assert (
                ckpt("inspect", "report", tmp_path, "-o", tmp_path / "a.html", "--overwrite").exit_code == 0
            )

    def test_only_report_pages_are_replaced(self, tmp_path: Path):
        """Neither what a link into a cache leads to, nor a shard that an index names, nor what is no file."""
        blob, text = tmp_path / "blob", tmp_path / "notes.txt"
        save_file({"a": np.ones(3, np.float32)}, blob)
        text.write_text("mine")
        (tmp_path / "snapshot").mkdir()
        link, page_link = tmp_path / "snapshot" / "model.safetensors", tmp_path / "a.html"
        link.symlink_to(blob)
        page_link.symlink_to(blob)
        os.mkfifo(tmp_path / "pipe")
        for output in (link, page_link, text, tmp_path / "pipe"):
            result = ckpt("inspect", "report", link, "-o", output, "--overwrite", "--no-stats")
            assert result.exit_code == 2
            assert "is not a report" in result.stderr or "is a part of" in result.stderr
        assert link.is_symlink() and text.read_text() == "mine"
        assert ckpttools.open(link).arrays["a",].read().tolist() == [1, 1, 1]

    def test_overwrite_follows_a_link_to_a_page(self, tmp_path: Path):
        link, location = tmp_path / "link.html", tmp_path / "page.html"
        link.symlink_to(location)
        assert ckpt("inspect", "report", HF, "-o", link, "--no-stats").exit_code == 2
        assert ckpt("inspect", "report", HF, "-o", link, "--no-stats", "--overwrite").exit_code == 0
        assert link.is_symlink() and location.read_text().startswith("<!doctype html>")

    def test_missing_directory_is_refused(self, tmp_path: Path):
        result = ckpt("inspect", "report", HF, "-o", tmp_path / "none" / "a.html")
        assert result.exit_code == 5
        assert "no such directory" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_output_directory_is_refused(self, tmp_path: Path):
        assert ckpt("inspect", "report", HF, "-o", tmp_path, "--overwrite").exit_code == 2

    def test_non_checkpoint_has_no_report(self, tmp_path: Path):
        assert ckpt("inspect", "report", tmp_path, "-o", tmp_path / "a.html").exit_code == 3
        assert ckpt("inspect", "report", tmp_path / "none", "-o", tmp_path / "a.html").exit_code == 2
        assert not (tmp_path / "a.html").exists()

    def test_empty_tree_has_a_report(self, tmp_path: Path):
        save_file({}, tmp_path / "a.safetensors")
        result = ckpt("inspect", "report", tmp_path / "a.safetensors", "-o", tmp_path / "a.html")
        assert result.exit_code == 0, result.output
        assert "0 arrays" in result.stdout


COMMAND = executable()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if COMMAND is None:
        pytest.skip("no Chromium here: install chromium-headless-shell, or name one in CHROMIUM")
    with browser(COMMAND) as built:
        built.look(1280, 900)
        yield built


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """The report on a checkpoint in the browser; nothing may have complained in the end."""
    location = tmp_path / "report.html"
    location.write_text(page(packed(ckpttools.open(request.param)), "report"), "utf-8")
    chromium.open(location)
    yield chromium
    assert chromium.complaints() == []


def report_on(*paths: Path) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("opened", paths, indirect=True, ids=lambda path: path.name)


def count(page: Browser, selector: str) -> int:
    result: int = page.value(f"document.querySelectorAll({json.dumps(selector)}).length")
    return result


def text(page: Browser, selector: str) -> str:
    result: str = page.value(f"document.querySelector({json.dumps(selector)}).textContent")
    return result


class TestPage:
    @report_on(SCANNED, HF)
    def test_page_shows_all_sections(self, opened: Browser):
        assert "181 k" in text(opened, "#facts")
        assert count(opened, ".tile") > 8
        assert count(opened, ".heat tbody tr") == 9
        assert count(opened, ".heat td[data-tip]") == 36
        assert count(opened, ".card svg") == 3
        rows = opened.value("document.querySelector('.arrays').getAttribute('aria-rowcount')")
        assert rows in ("14", "40")
        assert 10 < count(opened, ".arrays tbody tr[data-index]") < 40

    @report_on(SCANNED)
    def test_treemap_zooms_in_and_out(self, opened: Browser):
        before = count(opened, ".tile")
        label = '.tile[aria-label^="decoder,"]'
        opened.click(label)
        assert text(opened, ".crumbs [aria-current]").endswith("decoder")
        assert count(opened, label) == 0
        opened.click('.tile[aria-label^="layers,"]')
        crumbs = opened.value("[...document.querySelectorAll('.crumbs button')].map((e) => e.textContent)")
        assert crumbs[0] == "everything" and crumbs[-1].endswith("layers")
        opened.press("Escape")
        assert text(opened, ".crumbs [aria-current]").endswith("decoder")
        opened.click(".crumbs li:first-child button")
        assert count(opened, ".tile") == before
        assert opened.value("document.activeElement.classList.contains('tile')")

    @report_on(SCANNED)
    def test_treemap_rectangles_do_not_overlap(self, opened: Browser):
        outside = opened.value(
            """(() => {
              const whole = document.querySelector(".treemap").getBoundingClientRect();
              return [...document.querySelectorAll(".tile")]
                .map((tile) => tile.getBoundingClientRect())
                .filter((box) => box.left < whole.left - 1 || box.right > whole.right + 1
                  || box.top < whole.top - 1 || box.bottom > whole.bottom + 1).length;
            })()"""
        )
        assert outside == 0
        overlaps = opened.value(
            """(() => {
              const tiles = [...document.querySelectorAll(".tile:not(.head)")];
              const boxes = tiles.map((tile) => tile.getBoundingClientRect());
              return boxes.flatMap((a, k) => boxes.slice(k + 1).filter((b) =>
                Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)).length;
            })()"""
        )
        assert overlaps == 0

    @report_on(HF)
    def test_table_is_searched_and_sorted(self, opened: Browser):
        opened.press("/")
        assert opened.value("document.activeElement.id") == "search"
        opened.type("MLP layers.2.")
        assert text(opened, "#count").startswith("Found 3 arrays")
        opened.value("document.querySelector('#search').value = ''")
        opened.type("*layernorm*")
        assert text(opened, "#count").startswith("Found 8 arrays")
        for expected in ("descending", "ascending"):
            opened.click(".arrays th:nth-child(6) button")
            assert opened.value("document.querySelector('.arrays th:nth-child(6)').ariaSort") == expected
            cells = "[...document.querySelectorAll('.arrays tr[data-index] td:nth-child(6)')]"
            norms = opened.value(f"{cells}.map((cell) => +cell.textContent)")
            assert norms == sorted(norms, reverse=expected == "descending") and len(norms) == 8
        opened.click(".arrays th:nth-child(6) button")
        assert opened.value("document.querySelector('.arrays th:nth-child(6)').ariaSort") is None
        opened.value("document.querySelector('#search').value = ''")
        opened.type("nothing of the kind")
        assert text(opened, "#count") == "Found 0 arrays, 0 B"

    @report_on(HF)
    def test_selecting_an_array_shows_its_card(self, opened: Browser):
        opened.click(".arrays tr[data-index='5'] button")
        assert text(opened, ".card h3") == text(opened, ".arrays tr[aria-current] td:first-child")
        assert count(opened, ".card") == 4
        opened.click(".card .close")
        assert count(opened, ".card") == 3

    @report_on(SCANNED)
    def test_heat_map_works_by_keyboard(self, opened: Browser):
        opened.value("document.querySelector('.heat td[tabindex=\"0\"]').focus()")
        opened.press("ArrowRight")
        opened.press("ArrowDown")
        assert "layer 1" in text(opened, "#tip")
        assert "wi_1" in text(opened, "#tip")
        for selector, value in (("#heat-value", "2"), ("#heat-scale", "all")):
            opened.value(
                f"(() => {{ const e = document.querySelector('{selector}'); e.value = '{value}'; "
                "e.dispatchEvent(new Event('change')); })()"
            )
        assert count(opened, ".heat td[data-tip]") == 36

    @report_on(SCANNED)
    def test_page_fits_screens_dark_mode_and_print(self, opened: Browser):
        for width, dark in ((360, False), (800, True), (1920, False)):
            opened.look(width, 800, dark=dark)
            assert opened.value("document.documentElement.scrollWidth") <= width
        assert opened.pdf().startswith(b"%PDF")
        opened.look(1280, 900)

    @pytest.mark.parametrize("dark", [False, True])
    @report_on(SCANNED)
    def test_text_contrast_meets_wcag_aa(self, opened: Browser, dark: bool):
        """Text on every background that it stands on, as WCAG AA wants it: at least 4.5."""
        opened.look(1280, 900, dark=dark)
        pairs = [
            ("ink", "page"),
            ("soft", "page"),
            ("soft", "surface"),
            ("accent", "page"),
            ("bad", "surface"),
        ]
        pairs += [("ink", "warn"), ("ink", "wash"), *(("ink", f"hue{k}") for k in range(8))]
        low = opened.value(CONTRAST % json.dumps(pairs))
        opened.look(1280, 900)
        assert low == []


# Relative luminance as WCAG 2 defines it. The strongest cells of the heat map are tested as they are drawn.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const style = getComputedStyle(document.documentElement);
  const light = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((each) => {
      const share = each / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const named = %s.map(([text, back]) =>
    [text, back, ratio(style.getPropertyValue(`--${text}`), style.getPropertyValue(`--${back}`))]);
  const cells = [...document.querySelectorAll(".heat td[data-tip]")].map((cell) => {
    const own = getComputedStyle(cell);
    return ["cell", cell.textContent, ratio(own.color, own.backgroundColor)];
  });
  return [...named, ...cells].filter(([, , found]) => found < 4.5);
})()"""


class TestUnusualPages:
    def show(self, chromium: Browser, tmp_path: Path, arrays: dict[str, np.ndarray], **options: Any) -> None:
        save_file(arrays, tmp_path / "a.safetensors")
        built = page(packed(ckpttools.open(tmp_path / "a.safetensors"), **options), "odd")
        (tmp_path / "a.html").write_text(built, "utf-8")
        chromium.open(tmp_path / "a.html")
        assert chromium.complaints() == []

    def test_single_leaf_is_shown(self, chromium: Browser, tmp_path: Path):
        self.show(chromium, tmp_path, {"w": np.ones((3, 4), np.float32)})
        assert (count(chromium, ".tile"), count(chromium, ".card")) == (1, 1)
        assert chromium.value("document.querySelector('#layers').hidden")

    def test_empty_tree_is_shown(self, chromium: Browser, tmp_path: Path):
        self.show(chromium, tmp_path, {})
        assert "All arrays are empty" in text(chromium, ".treemap")

    def test_control_characters_in_names_are_escaped(self, chromium: Browser, tmp_path: Path):
        """As in the text of other commands, what is not printable is spelled out."""
        self.show(chromium, tmp_path, {"a\u202ebc\x1b[31m\n": np.ones(3, np.float32)})
        assert text(chromium, ".tile .name") == r"a\u202ebc\x1b[31m\n"

    def test_array_with_nested_arrays_can_be_selected(self, chromium: Browser, tmp_path: Path):
        """Quantized weights have such names: w, w.absmax, and here one more w below it."""
        names = ("head", "layers.0.w", "layers.0.w.absmax", "layers.0.w.w")
        self.show(chromium, tmp_path, {name: np.ones((8, 8), np.float32) for name in names})
        labels = "[...document.querySelectorAll('.tile')].map((tile) => tile.ariaLabel).sort()"
        assert chromium.value(labels) == [
            "absmax, 256 B",
            "head, 256 B",
            "layers.0.w, 768 B, zoom in",
            "w, 256 B",
            "w, 256 B",
        ]
        chosen = set()
        for number in (0, 1):
            chromium.click('.tile[aria-label^="w,"]', number)
            chosen.add(text(chromium, ".card h3"))
            assert text(chromium, "#tip .first") == text(chromium, ".card h3")
        assert chosen == {"layers.0.w", "layers.0.w.w"}
        chromium.click('.tile[aria-label^="layers.0.w,"]')
        assert text(chromium, ".crumbs [aria-current]") == "layers"
        assert count(chromium, ".tile") == 3
        assert chromium.complaints() == []

    def test_content_fits_into_its_card(self, chromium: Browser, tmp_path: Path):
        """Exponents of three digits, at both ends of the chart and in the quantiles."""
        values = np.ldexp(np.ones(20, np.float64), np.arange(-1000, 1000, 100))
        chromium.look(390, 800)
        self.show(chromium, tmp_path, {"w": values})
        spilt = """(() => {
          const out = (inner, outer) => {
            const a = inner.getBoundingClientRect(), b = outer.getBoundingClientRect();
            return a.left < b.left - 1 || a.right > b.right + 1;
          };
          const within = (inner, outer) => [...document.querySelectorAll(inner)]
            .filter((each) => out(each, each.closest(outer))).map((each) => each.textContent);
          return [...within(".tick", "svg"), ...within(".quantiles dd", ".card")];
        })()"""
        assert chromium.value(spilt) == []
        assert chromium.value("document.documentElement.scrollWidth") <= 390

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ([0.0, 0.0], "All elements are zero."),
            ([1e-42, 1e-42], "All magnitudes are below 2⁻¹³³."),
            ([0.0, 1e-42], "All magnitudes are below 2⁻¹³³, 50.0 % zero."),
            ([0.0, 1e-42, 1.0, 1.0], "Magnitude |x|, 25.0 % zero, 25.0 % below 2⁰"),
        ],
    )
    def test_zeros_are_labeled_as_zero(
        self, chromium: Browser, tmp_path: Path, values: list[float], words: str
    ):
        self.show(chromium, tmp_path, {"w": np.array(values, np.float32)})
        assert text(chromium, ".card figcaption") == words

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ([1.7e308 + 1.7e308j, 1], "A magnitude is too large for float64."),
            ([complex(np.nan, 0), complex(np.inf, 0)], "No element is finite."),
        ],
    )
    def test_missing_chart_is_explained(
        self, chromium: Browser, tmp_path: Path, values: list[complex], words: str
    ):
        dtype = DTYPES["complex128"]
        leaf = stored(np.array(values).view(dtype.carrier), dtype)
        (tmp_path / "a.html").write_text(page(packed(Tree({("a",): leaf})), "odd"), "utf-8")
        chromium.open(tmp_path / "a.html")
        chromium.click(".arrays tr[data-index] button")
        assert text(chromium, ".card .note") == words
        assert chromium.complaints() == []

    def test_names_are_never_markup(self, chromium: Browser, tmp_path: Path):
        self.show(chromium, tmp_path, {HOSTILE: np.ones(3, np.float32), "b": np.zeros(2, np.float32)})
        assert count(chromium, "img") == 0
        assert HOSTILE in text(chromium, ".arrays")

    def test_page_with_only_non_finite_values_is_shown(self, chromium: Browser, tmp_path: Path):
        bad = np.full((2, 2), np.nan, np.float32)
        self.show(chromium, tmp_path, {"layers.0.a": bad, "layers.1.a": np.zeros((2, 2), np.float32)})
        assert "4 NaN" in text(chromium, "#facts")
        assert count(chromium, ".heat td.bad") == 1

    def test_page_without_statistics_is_shown(self, chromium: Browser, tmp_path: Path):
        arrays = {"layers.0.a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)}
        self.show(chromium, tmp_path, arrays, stats=False)
        assert chromium.value("document.querySelector('#distributions').hidden")
        assert count(chromium, ".arrays th") == 5
        chromium.click(".tile")
        assert chromium.complaints() == []

    def test_many_leaves_render_few_rows(self, chromium: Browser, tmp_path: Path):
        (tmp_path / "a.html").write_text(page(packed(many_leaves(20_000), stats=False), "many"), "utf-8")
        chromium.open(tmp_path / "a.html")
        assert text(chromium, "#count").startswith("20,000 arrays")
        assert count(chromium, ".arrays tr[data-index]") < 100
        assert count(chromium, ".tile") < 2500
        chromium.value("document.querySelector('.rows').scrollTop = 1e9")
        chromium.wait("document.querySelector('.arrays').textContent.includes('layers_19999')")
        assert chromium.complaints() == []
