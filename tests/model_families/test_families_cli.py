"""`ckpt families` lists, shows and checks families, as text and as JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from support.command_line import ckpt, succeed
from support.internals import families, family_from_toml, family_to_toml
from support.locations import GOLDEN

LLAMA = GOLDEN / "llama3.1"


@pytest.fixture
def mine(tmp_path: Path):
    """Write the file of the llama family with one text replaced."""

    def write(old: str = "", new: str = "") -> Path:
        text = family_to_toml(families()["llama"])
        assert old in text
        path = tmp_path / "mine.toml"
        path.write_text(text.replace(old, new) if old else text)
        return path

    return write


class TestList:
    @pytest.mark.parametrize("columns", [80, 200])
    def test_every_family_is_listed_completely(self, columns):
        lines = succeed("families", COLUMNS=str(columns)).stdout.splitlines()
        assert max(map(len, lines)) <= columns
        heads = [line for line in lines if line in families()]
        assert heads == sorted(families())
        for family in families().values():
            start = lines.index(family.name)
            block = " ".join(" ".join(lines[start : lines.index("", start)]).split())
            for text in (", ".join(family.models), ", ".join(family.model_types)):
                assert text in block
            never, scanned = family.no_scan_reason, [group.scanned for group in family.layers]
            # Names longer than a line are broken.
            packed = "".join(block.split())
            assert all("".join(text.split()) in packed for text in ([never] if never else scanned))

    def test_inexact_rows_are_named(self):
        text = " ".join(succeed("families", COLUMNS="200").stdout.split())
        scaled = (
            "inexact self_attention.query.kernel: times 1/sqrt(head_dim): exact if that is a power of two"
        )
        # gemma, llama, mistral and mixtral; gemma2 has two kinds of queries.
        assert text.count(scaled) == 4
        assert "times sqrt(embed) in bfloat16" in text
        assert "exact 8 rows: +1, stored in float32" in text
        assert "hf-to-maxtext, maxtext-to-hf" in text

    def test_families_list_prints_json(self):
        result = {load["name"]: load for load in json.loads(succeed("families", "--json").stdout)}
        assert result.keys() == families().keys()
        llama = result["llama"]
        assert llama["model_types"] == ["llama"]
        assert llama["directions"] == ["hf-to-maxtext", "maxtext-to-hf"]
        assert llama["layers"] == [
            {
                "right": "model.layers.{layer}",
                "unscanned": "decoder.layers_{layer}",
                "scanned": "decoder.layers",
                "stacked": ["layer"],
            }
        ]
        (value,) = llama["values"]
        assert (value["op"], value["is_exact"]) == ("scale head_dim -0.5", False)
        assert value["rows"] == ["self_attention.query.kernel"]
        assert result["qwen3"]["values"] == []

    def test_help_names_the_commands(self):
        text = succeed("families", "--help").stdout
        assert "check" in text
        assert "show" in text


class TestShow:
    @pytest.mark.parametrize("name", sorted(families()))
    def test_families_show_prints_every_row(self, name):
        lines = succeed("families", "show", name, COLUMNS="80").stdout.splitlines()
        family = families()[name]
        rows = (*family.rows, *(row for group in family.layers for row in group.rows))
        # Names are never broken; those of towers are long.
        names = {str(side) for row in rows for side in (row.left, row.right)}
        assert all(len(line) <= 80 or line.strip(" ,") in names for line in lines)
        for row in rows:
            at = lines.index(str(row.left))
            assert lines[at + 1].startswith("  ")

    def test_show_toml_reproduces_the_family(self):
        text = succeed("families", "show", "gemma3", "--toml").stdout
        assert family_from_toml(text, "out") == families()["gemma3"]

    def test_json_equals_the_text_output(self):
        result = json.loads(succeed("families", "show", "deepseek", "--json").stdout)
        toml = tomllib.loads(succeed("families", "show", "deepseek", "--toml").stdout)
        assert result == {"schema": 1, **toml}

    def test_families_show_accepts_a_file(self, mine):
        assert succeed("families", "show", mine()).stdout.startswith("llama\n")

    def test_families_show_suggests_similar_names(self):
        result = ckpt("families", "show", "lama")
        assert result.exit_code == 2
        assert "did you mean llama?" in result.stderr


class TestCheck:
    def test_correct_family_passes_check(self, mine):
        for name in ("llama", mine()):
            lines = succeed("families", "check", name).stdout.splitlines()
            assert lines[0] == "llama: sound"
            assert "4 synthetic models" in lines[1]
            assert [line.split("converts")[1].split(":")[0].strip() for line in lines[2:]] == [
                "unscanned",
                "scanned on axis 0",
                "scanned on axis 1",
            ]

    @pytest.mark.parametrize(
        ("source", "names"),
        [
            ("hf", "Hugging Face's"),
            ("hf/model.safetensors", "Hugging Face's"),
            ("maxtext_scanned", "MaxText's"),
            ("maxtext_unscanned/0/items", "MaxText's"),
        ],
    )
    def test_check_accepts_either_side(self, mine, source, names):
        result = succeed(
            "families", "check", mine(), "--against", LLAMA / source, "--config", LLAMA / "hf", COLUMNS="200"
        )
        assert f"with {names} names" in result.stdout
        assert "39 arrays" in result.stdout

    def test_check_accepts_only_a_config(self, mine):
        text = succeed("families", "check", mine(), "--config", LLAMA / "hf" / "config.json").stdout
        assert "config.json" in text
        assert "39 arrays, 12 in MaxText, and back" in text

    def test_families_check_prints_json(self, mine):
        result = json.loads(succeed("families", "check", mine(), "--against", LLAMA / "hf", "--json").stdout)
        assert result["findings"] == []
        assert result["side"] == "huggingface"
        assert [layout["num_arrays"] for layout in result["layouts"]] == [39, 12, 12]

    def test_findings_are_listed_with_exit_code_3(self, mine):
        broken = mine("_proj.weight: mlp embed", "_proj.weight: embed mlp")
        result = ckpt("families", "check", broken, "--against", LLAMA / "hf", COLUMNS="200")
        assert result.exit_code == 3
        assert result.stderr == ""
        lines = result.stdout.splitlines()
        assert lines[0] == "llama: 8 findings"
        assert "shape (8)" in lines
        expected = "mlp.up_proj.weight: got [128, 64], expected [64, 128] (it looks transposed)"
        assert f"  model.layers.{{0..3}}.{expected}" in lines

    def test_json_lists_each_finding(self, mine):
        broken = mine("_proj.weight: mlp embed", "_proj.weight: embed mlp")
        result = ckpt("families", "check", broken, "--against", LLAMA / "hf", "--json")
        assert result.exit_code == 3
        findings = json.loads(result.stdout)["findings"]
        assert len(findings) == 8
        assert findings[0] == {
            "kind": "shape",
            "location": "model.layers.0.mlp.gate_proj.weight",
            "text": "got [128, 64], expected [64, 128] (it looks transposed)",
        }

    @pytest.mark.parametrize("columns", [80, 200])
    def test_findings_fit_the_terminal(self, mine, columns):
        broken = mine("unless tied", "unless tyed")
        result = ckpt("families", "check", broken, COLUMNS=str(columns))
        assert result.exit_code == 3
        assert max(map(len, result.stdout.splitlines())) <= columns
        assert "did you mean tied?" in " ".join(result.stdout.split())

    def test_two_rows_for_one_array_are_found(self, mine):
        result = ckpt("families", "check", mine("mlp.wi_1", "mlp.wi_0"))
        assert result.exit_code == 3
        assert "produced twice" in result.stdout

    def test_array_of_a_missing_row_is_listed(self, mine, tmp_path):
        path = mine("mlp.up_proj.weight", "mlp.up_prj.weight")
        result = ckpt("families", "check", path, "--against", LLAMA / "hf", COLUMNS="200")
        assert result.exit_code == 3
        text = result.stdout
        assert "missing (4)" in text
        assert "model.layers.0.mlp.up_proj.weight exists" in text
        assert "not expected (4)" in text

    def test_family_of_another_model_fails_check(self):
        result = ckpt("families", "check", "qwen2", "--against", LLAMA / "hf")
        assert result.exit_code == 3
        assert "missing (12)" in result.stdout


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "text", "code", "message"),
        [
            ("mine.toml", "name =", 3, "not a TOML file"),
            ("mine.toml", 'name = "t"\nrows = []\nmodel_typ = []', 3, "did you mean model_types?"),
            ("mine.py", "raise ValueError('boom')", 3, "mine.py, line 1"),
            ("mine.py", "FAMILY = 3", 3, "FAMILY of type int"),
            ("mine.json", "{}", 2, "ends in .toml or .py"),
            ("mine.toml", None, 2, "cannot read"),
        ],
    )
    def test_invalid_family_file_is_refused(self, tmp_path, name, text, code, message):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        # One that is not there has no other sign of a file than the path.
        for command in (("families", "check", path), ("families", "show", path)):
            result = ckpt(*command)
            assert result.exit_code == code, result.output
            assert message in result.stderr
            assert "Traceback" not in result.stderr
            assert result.stdout == ""

    def test_missing_checkpoints_and_configs_are_refused(self, tmp_path):
        for option in ("--against", "--config"):
            result = ckpt("families", "check", "llama", option, tmp_path / "nothing")
            assert result.exit_code == 2
            assert "nothing" in result.stderr

    def test_invalid_config_is_refused(self, tmp_path):
        (tmp_path / "config.json").write_text("[]")
        result = ckpt("families", "check", "llama", "--config", tmp_path)
        assert result.exit_code == 3
        assert "not a JSON object" in result.stderr

    def test_unknown_subcommand_gets_a_suggestion(self):
        result = ckpt("families", "chek", "llama")
        assert result.exit_code == 2
        assert "Did you mean 'check'?" in result.stderr

    def test_conversion_reports_location_in_family_file(self, mine, tmp_path):
        path = mine("scale head_dim -0.5", "halve")
        result = ckpt("convert", "hf-to-maxtext", LLAMA / "hf", tmp_path / "out", "--family", path)
        assert result.exit_code == 3
        assert "mine.toml: layers[0].rows\n" in result.stderr
        sides = "query.kernel: embed heads head_dim <-> self_attn.q_proj.weight: (heads head_dim) embed"
        column = len(f"self_attention.{sides}, h")
        assert f"column {column} of 'self_attention.{sides}, halve" in result.stderr
        assert not (tmp_path / "out").exists()


def test_long_labels_are_separated_from_texts():
    assert (
        "\n  vision_position  vision_config.num_position_embeddings\n"
        in succeed("families", "show", "qwen3-vl").stdout
    )
