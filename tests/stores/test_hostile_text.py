"""JSON that is nested too deep, and names that would steer a terminal: refused, or spelled out."""

import base64
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt
from support.internals import main, parse, printable
from support.orbax_items import LITTLE, write_item, zarr3

from ckpttools import FormatError
from ckpttools.core.text import mark_style, printable_text, unmark_styles
from ckpttools.formats.json_file import DEEPEST, parse_json, read_json
from ckpttools.formats.orbax.entries import Indexed
from ckpttools.formats.orbax.index import Index

STEERING = "a\x1b[2Jb\x1b]0;title\x07c\x9bd\u202ee\u2066f\rg\nError: all is lost"
ONES = (zarr3([LITTLE], [2]), np.ones(4, "float32"))
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def header_file(path, header):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    return path


def deep(levels):
    return b"[" * levels + b"]" * levels


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


class TestDeepJson:
    @given(st.integers(1, 2 * DEEPEST))
    def test_json_nested_too_deeply_is_refused(self, levels):
        try:
            parse_json(deep(levels))
        except ValueError as error:
            assert levels > DEEPEST
            assert str(error) == f"nested more than {DEEPEST} levels deep"
        else:
            assert levels <= DEEPEST

    @pytest.mark.parametrize("levels", [DEEPEST + 1, 5000, 400_000])
    def test_commands_refuse_deep_json_in_any_file(self, tmp_path, levels):
        """Each of these once in a checkpoint that is otherwise as it should be; every command says where."""
        nested = b'{"x": ' + deep(levels) + b"}"
        item = write_item(
            tmp_path / "item", {("w",): (zarr3([LITTLE], [2]), np.ones(4, "float32"))}, use_ocdbt=False
        )
        metadata = json.loads((item / "_METADATA").read_bytes())
        name = base64.urlsafe_b64encode(b"w").decode()
        (item / "_sharding").write_text(json.dumps({name: '{"sharding_type": "x"}'}))
        damages = {
            "_METADATA": json.dumps(metadata | {"custom_metadata": 0})
            .encode()
            .replace(b": 0}", b": " + nested + b"}"),
            "w/zarr.json": nested,
            "_CHECKPOINT_METADATA": nested,
            "_sharding": json.dumps({name: nested.decode()}).encode(),
            "array_metadatas/process_0": nested,
        }
        (item / "array_metadatas").mkdir()
        for file, content in damages.items():
            before = (item / file).read_bytes() if (item / file).exists() else None
            (item / file).write_bytes(content)
            shown = ckpt("inspect", "tree", item, "--sharding")
            assert shown.exit_code == 3, file
            assert file.rpartition("/")[2] in shown.output, shown.output
            assert ckpt("doctor", item).exit_code in (0, 1), file
            assert "stopped:" not in ckpt("doctor", item).output, file
            (item / file).unlink() if before is None else (item / file).write_bytes(before)
        assert ckpt("inspect", "tree", item, "--sharding").exit_code == 0

    @pytest.mark.parametrize("levels", [DEEPEST - 1, DEEPEST])
    def test_custom_metadata_round_trips(self, tmp_path, levels):
        item, copy = tmp_path / "item", tmp_path / "copy"
        write_item(item, {("w",): (zarr3([LITTLE], [2]), np.ones(4, "float32"))}, use_ocdbt=False)
        nested = json.loads(b'{"x":' * levels + b"1" + b"}" * levels)
        metadata = json.loads((item / "_METADATA").read_bytes())
        (item / "_METADATA").write_text(json.dumps(metadata | {"custom_metadata": nested}))
        converted = ckpt("convert", "to-orbax", item, copy)
        assert converted.exit_code == (0 if levels < DEEPEST else 3), converted.output
        if levels < DEEPEST:
            assert ckpt("inspect", "tree", copy).exit_code == 0

    @pytest.mark.parametrize("levels", [DEEPEST + 1, 5000])
    def test_commands_refuse_deep_json_in_other_files(self, tmp_path, levels):
        nested = b'{"x": ' + deep(levels) + b"}"
        weights = header_file(tmp_path / "model.safetensors", {"a": ENTRY})
        for name, command in {
            "config.json": ["inspect", "tree", tmp_path],
            "rules.json": ["remap", weights, tmp_path / "out", "--map", tmp_path / "rules.json"],
            "rules.toml": ["remap", weights, tmp_path / "out", "--map", tmp_path / "rules.toml"],
            "digests.json": ["verify", weights, "--manifest", tmp_path / "digests.json"],
            "family.toml": ["families", "check", tmp_path / "family.toml"],
        }.items():
            (tmp_path / name).write_bytes(nested if name.endswith("json") else b"x = " + deep(levels))
            assert ckpt(*command).exit_code == 3, name
            assert name in ckpt(*command).output, ckpt(*command).output
            (tmp_path / name).unlink()
        header_file(weights, nested)
        assert ckpt("inspect", "tree", weights).exit_code == 3

    def test_deeply_nested_groups_are_refused(self, tmp_path):
        location = tmp_path / "groups"
        location.mkdir()
        try:
            self.check_groups(location)
        finally:
            # Python's own rmtree calls itself.
            subprocess.run(["rm", "-rf", location], check=True)

    def check_groups(self, location):
        descriptor = os.open(location, os.O_RDONLY)
        for _ in range(1500):
            with open(os.open("zarr.json", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor), "w") as file:  # noqa: PTH123
                file.write('{"zarr_format": 3, "node_type": "group"}')
            os.mkdir("g", dir_fd=descriptor)
            inner = os.open("g", os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        os.close(descriptor)
        shown = ckpt("inspect", "tree", location)
        assert shown.exit_code == 3
        assert "groups are nested too deep" in shown.output
        assert ckpt("doctor", location).exit_code in (0, 1)


class TestNames:
    @given(st.text())
    def test_control_characters_are_escaped(self, text):
        assert printable(text).isprintable()
        shown = printable_text(text)
        assert all(line.isprintable() for line in shown.split("\n"))
        assert all(line.startswith(" ") or not line for line in shown.split("\n")[1:])
        assert printable(printable(text)) == printable(text)

    @given(st.binary(max_size=4), st.binary(max_size=4))
    def test_non_utf8_names_stay_different(self, a, b):
        one, other = (data.decode(errors="surrogateescape") for data in (a, b))
        assert (printable(one) == printable(other)) == (a == b) or b"\\" in a + b

    def test_undecodable_bytes_and_characters_are_escaped(self):
        assert printable("é\udcff\x80\x1b\n") == "é\\xff\\u0080\\x1b\\n"
        own = f"{mark_style('1')}a{mark_style('0')}\n  b\nc"
        assert unmark_styles(printable_text(f"{own}\x1b[2J\x1b[31m")) == (
            "\x1b[1ma\x1b[0m\n  b\\nc\\x1b[2J\\x1b[31m"
        )

    def test_header_names_are_escaped(self, tmp_path):
        path = header_file(tmp_path / "model.safetensors", {STEERING: ENTRY})
        for command in (
            "inspect tree",
            "inspect tree --flat",
            "inspect stats",
            "inspect chunks",
            "hash",
            "doctor",
        ):
            self.check(ckpt(*command.split(), path).output, command)
        for words in (("remap", path, tmp_path / "out", "--map", tmp_path), ("diff", path, path)):
            self.check(ckpt(*words).output, words)
        names = [
            load["path"] for load in json.loads(ckpt("inspect", "tree", path, "--json").output)["arrays"]
        ]
        assert names == [STEERING]

    def test_file_names_in_errors_are_escaped(self, tmp_path):
        location = tmp_path / STEERING.replace("/", "")
        location.mkdir()
        header_file(location / "model.safetensors", {STEERING: ENTRY | {"dtype": STEERING}})
        item = write_item(
            location / "item", {(STEERING.replace("/", ""),): (zarr3([LITTLE], [2]), np.ones(4, "float32"))}
        )
        for words in (
            ("inspect", "tree", location),
            ("inspect", "tree", location / "model.safetensors"),
            ("inspect", "tree", item),
            ("doctor", location),
            ("doctor", item),
            ("convert", "to-safetensors", location, location / "out"),
            ("convert", "to-safetensors", item, location / "out", "--dry-run"),
            ("convert", "to-safetensors", item, location / "out"),
            ("convert", "to-orbax", item, location / STEERING),
        ):
            self.check(ckpt(*words).output, words)

    def check(self, output, what):
        shown = COLOR.sub("", output)
        assert all(line.isprintable() for line in shown.split("\n")), (what, shown)
        assert "\nError: all is lost" not in shown, (what, shown)


CONTROLS = st.sampled_from(
    [
        *map(chr, range(1, 32)),
        *map(chr, range(127, 160)),
        *"\u061c\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2069\ufeff\u00ad",
        "\x1b[35m",  # a color that the program does not use
        "\x1b[0m",
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x1b]8;;http://x\x1b\\",
        "\nnext   rm -rf",
        "\U000e0041",
    ]
)
HOSTILE = st.lists(CONTROLS | st.sampled_from("ab.é"), min_size=1, max_size=12).map("".join)
# The only sequences that the program itself prints.
OWN = re.compile(r"\x1b\[(?:0|1|2|3[1236])m")


def assert_clean(words, name):
    result = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False, color=True)
    shown = OWN.sub("", result.output)
    assert result.exit_code != 70, shown
    assert all(c.isprintable() or c == "\n" for c in shown), (words, name, shown)
    assert "\nnext   rm" not in shown, (words, shown)


@settings(max_examples=25, deadline=None)
@given(HOSTILE, HOSTILE)
def test_commands_escape_control_characters(tmp_path_factory, name, other):
    """Names of arrays, files, directories and types; values of configurations and metadata."""
    top = tmp_path_factory.mktemp("hostile")
    file_name = name.replace("/", "")[:40]
    location = top / f"m{file_name}"
    location.mkdir()
    layer = "model.layers.0.mlp.up_proj.weight"
    names = {f"model.{name}.weight": ENTRY, layer + other: ENTRY | {"data_offsets": [0, 4]}}
    header_file(location / "model.safetensors", {**names, "__metadata__": {name: other, "format": other}})
    config = {
        "model_type": other,
        "architectures": [name],
        "torch_dtype": other,
        "hidden_size": name,
        name: other,
    }
    (location / "config.json").write_text(json.dumps(config))
    (location / f"tokenizer{file_name}").write_text(name)
    bad = top / f"b{file_name}"
    bad.mkdir()
    header_file(bad / "model.safetensors", {name: ENTRY | {"dtype": other, "shape": [name]}})
    (bad / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": other}))
    (bad / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: other}}))
    out = top / f"o{file_name}"
    for words in (
        ("inspect", "tree", location),
        ("inspect", "tree", location, "--flat", "--json"),
        ("inspect", "stats", location),
        ("doctor", location),
        ("doctor", bad),
        ("doctor", bad, "--json"),
        ("ls", top),
        (location,),
        ("hash", location),
        ("diff", location, bad),
        ("verify", location, "--against", bad),
        ("convert", "hf-to-maxtext", location, out),
        ("convert", "to-orbax", location, out, "--dry-run"),
        ("convert", "to-safetensors", bad, out),
        ("copy", location, out),
        ("copy", bad, out),
        ("select", location, out, "--include", name),
        ("inspect", "tree", location / name.replace("/", "")),
        ("convert", name, location, out),
        ("doctor", f"--{name}"),
        ("maxtext-config", location),
        ("resolve", location, f"{name}={other}"),
    ):
        assert_clean(words, name)


def test_one_module_prints_all_output():
    """What is printed elsewhere would not be escaped; what is styled elsewhere would be."""
    package = Path(printable.__code__.co_filename).parents[1]
    allowed = {
        "cli/output.py",
        "cli/report.py",
        "cli/families.py",
        "cli/signals.py",
        "cli/error_boundary.py",
    }
    # Help, a script and a page, which have no text from data.
    allowed |= {"cli/command.py", "cli/completion.py", "cli/help.py"}
    writes = re.compile(
        r"click\.(?:echo|secho|style)\(|(?<![\w.`])print\(|sys\.std(?:out|err)\.(?:buffer\.)?write\("
    )
    result = {
        path.relative_to(package).as_posix(): line.strip()
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if writes.search(line)
    }
    assert {name: line for name, line in result.items() if name not in allowed} == {
        # An error of a background save, escaped there: it is printed where Python's logging does not.
        "sharding/save_background.py": 'sys.stderr.write(f"ckpttools: {text}\\n")'
    }


def test_non_text_keys_stay_distinct(tmp_path):
    """They are other keys, not one and the same; nothing of them is lost where the index is shown."""
    item = write_item(tmp_path / "item", {("w",): ONES})
    metadata = json.loads((item / "_METADATA").read_bytes())
    entry = metadata["tree_metadata"]["('w',)"]
    entry["key_metadata"][0]["key"] = "\ud800"
    (item / "_METADATA").write_text(json.dumps(metadata))
    shown = ckpt("inspect", "tree", item)
    assert shown.exit_code == 3
    assert "an unpaired surrogate" in shown.output
    entries = {b"a/\xff": b"1", b"a/\xfe": b"2", "a/é".encode(): b"3"}
    index = Indexed(item, Index((), entries, ()))
    keys = list(index.below("a/"))
    assert len(set(keys)) == 3
    assert [index.get(f"a/{key}") for key in keys] == [b"3", b"2", b"1"]


def test_oversized_config_is_not_read(tmp_path):
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 8 << 30)
    with pytest.raises(FormatError, match="is too large for such a file"):
        read_json(parse(tmp_path / "config.json"))
