"""What a destination may be: apart from the source, and replaced only where it is what was meant."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.internals import parse
from support.locations import FIXTURES
from support.mounts import while_mounted

import ckpttools
from ckpttools import StorageError
from ckpttools.formats.orbax.entries import Files
from ckpttools.formats.registry import find_unowned_files
from ckpttools.testing.models import LlamaSizes, write_llama

SIZES = LlamaSizes(layers=2, hidden=64, mlp=128, heads=4, kv_heads=2, head_dim=16, vocab=256)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    location = tmp_path_factory.mktemp("originals")
    write_llama(location / "hf", SIZES)
    assert ckpt("convert", "hf-to-maxtext", location / "hf", location / "mt").exit_code == 0
    run = location / "run" / "checkpoints"
    for step in ("1", "2"):
        shutil.copytree(FIXTURES / "train" / "llama_scanned" / "1", run / step)
    return location


@pytest.fixture
def location(originals, tmp_path):
    return Path(shutil.copytree(originals, tmp_path / "place"))


def state(directory):
    """Everything below a directory: files by content, links by target."""
    return {
        path.relative_to(directory).as_posix(): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() or path.is_symlink()
    }


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def refused(location, *arguments, words, suggests=False):
    """The command is refused with these words, suggests the flag or not, and changes nothing at all."""
    before = state(location)
    result = ckpt(*arguments)
    assert result.exit_code == 2, result.output
    text = " ".join(result.stderr.split())
    assert words in text
    assert ("allow its replacement with --overwrite" in text) == suggests
    assert state(location) == before
    return text


SEPARATE_EXPERTS_FLAG = {
    "is SRC itself": ("mt", "mt"),
    "is SRC itself, through a link": ("mt", "link"),
    "is SRC itself, through ..": ("mt", "hf/../mt"),
    "contains SRC": ("run/checkpoints/1", "run/checkpoints"),
    "contains SRC, through a link": ("run/checkpoints/1", "link-to-run"),
    "is in SRC": ("run/checkpoints", "run/checkpoints/3"),
}


# What is mounted at `alias`, the source, and the destination.
ALIASES = {
    "is SRC itself, in a mount": (".", "mt", "alias/mt"),
    "is SRC itself, read in a mount": (".", "alias/mt", "mt"),
    "contains SRC, in a mount": ("run", "run/checkpoints/1", "alias/checkpoints"),
    "contains SRC, which is mounted": ("run/checkpoints/1", "alias", "run/checkpoints"),
    "is in SRC, in a mount": ("run/checkpoints", "run/checkpoints", "alias/3"),
    "is in SRC, which is mounted": ("run", "alias/checkpoints", "run/checkpoints/3"),
}


class TestOverlapWithSource:
    @pytest.mark.parametrize("overwrite", [(), ("--overwrite",), ("--dry-run",)], ids=str)
    @pytest.mark.parametrize("case", SEPARATE_EXPERTS_FLAG)
    def test_destination_overlapping_source_is_refused(self, location, case, overwrite):
        (location / "link").symlink_to("mt")
        (location / "link-to-run").symlink_to("run/checkpoints")
        source, destination = SEPARATE_EXPERTS_FLAG[case]
        words = f"DST {case.split(',')[0]}"
        refused(
            location,
            "cast",
            location / source,
            location / destination,
            "--dtype=float32",
            *overwrite,
            words=words,
        )

    @pytest.mark.parametrize("case", ALIASES)
    def test_destination_overlapping_source_through_a_mount_is_refused(self, location, case):
        """A directory that is mounted twice has two real paths."""
        what, source, destination = ALIASES[case]
        (location / "alias").mkdir()
        before = state(location)
        arguments = ("cast", location / source, location / destination, "--dtype=float32", "--overwrite")
        [(code, text)] = while_mounted((location / what, location / "alias", arguments))
        assert code == 2 and f"DST {case.split(',')[0]}" in " ".join(text.split()), text
        assert state(location) == before

    def test_destination_equal_to_another_input_through_a_mount_is_refused(self, location):
        (location / "alias").mkdir()
        before = state(location)
        hf, alias = location / "hf", location / "alias" / "hf"
        commands = [
            ("convert", "maxtext-to-hf", location / "mt", alias, "--like", hf, "--overwrite"),
            ("average", location / "hf", hf, alias, "--overwrite"),
        ]
        for code, text in while_mounted(*((location, location / "alias", command) for command in commands)):
            assert code == 2 and "itself" in text, text
        assert state(location) == before

    def test_destination_is_checked_before_reading_source(self, location):
        """A source that is no checkpoint is no reason to say something else first."""
        (location / "junk").mkdir()
        refused(
            location,
            "cast",
            location / "junk",
            location / "junk",
            "--dtype=float32",
            words="DST is SRC itself",
        )

    def test_destination_with_linked_source_files_is_refused(self, location):
        """The Hugging Face cache: a snapshot is links into another directory."""
        (location / "snapshot").mkdir()
        for file in (location / "hf").iterdir():
            (location / "snapshot" / file.name).symlink_to(f"../hf/{file.name}")
        arguments = ("convert", "to-safetensors", location / "snapshot", location / "hf", "--overwrite")
        refused(location, *arguments, words="DST contains a source file")

    def test_destination_equal_to_like_is_refused(self, location):
        arguments = ("convert", "maxtext-to-hf", location / "mt", location / "hf", "--like", location / "hf")
        refused(location, *arguments, "--overwrite", words="DST is --like itself")


class TestManifest:
    def test_only_another_manifest_is_replaced(self, location):
        (location / "thesis.txt").write_text("mine")
        (location / "link.json").symlink_to("thesis.txt")
        command = ("cast", location / "hf", location / "out", "--dtype=float32", "--manifest")
        for name in ("thesis.txt", "link.json", "mt/0/items/d", "hf"):
            refused(
                location,
                *command,
                location / name,
                "--overwrite",
                words="is not replaced: it is not a manifest",
            )
        for extra in ((), ("--overwrite",)):
            assert ckpt(*command, location / "m.json", *extra).exit_code == 0
        refused(
            location, *command[:2], location / "new", *command[3:], location / "m.json", words="m.json exists"
        )

    @pytest.mark.parametrize("name", ["out", "out/", "out.partial", "out/m.json", "out.partial/m.json", "in"])
    def test_manifest_inside_destination_is_refused(self, location, name):
        """Said before anything is done, whatever is there; `in` is a directory that DST will be made in."""
        destination = location / ("in/out" if name == "in" else "out")
        command = (
            "cast",
            location / "hf",
            destination,
            "--dtype=float32",
            "--manifest",
            f"{location}/{name}",
        )
        for built in (False, True):
            if built and "/m" in name:
                (location / name).parent.mkdir()
            for extra in ((), ("--overwrite",), ("--dry-run",)):
                refused(
                    location,
                    *command,
                    *extra,
                    words="expected a file outside the output checkpoint",
                )

    def test_manifest_inside_source_is_refused(self, location):
        """What a checkpoint does not have is not made a part of it."""
        words, hf = "a part of the checkpoint", location / "hf"
        index, shard = "model.safetensors.index.json", "model-00001-of-00001.safetensors"
        cast = ("cast", hf, location / "out", "--dtype=float32", "--manifest")
        for name in (index, shard, "tokenizer.json", "config.json"):
            for command in (
                cast,
                ("hash", hf, "--manifest"),
                ("hash", hf / "model.safetensors", "--manifest"),
                ("inspect", "report", hf, "-o"),
            ):
                refused(location, *command, hf / name, words=words)
        (location / "mt/0/items/hf/config.json").unlink()
        for name in ("hf/config.json", "d/new", "_sharding", "zarr.json", "ocdbt.process_7", "0.0"):
            refused(
                location, "hash", location / "mt", "--manifest", location / "mt/0/items" / name, words=words
            )
        assert ckpt("hash", location / "hf", "--manifest", location / "hf" / "digests.json").exit_code == 0


class TestNames:
    @pytest.mark.parametrize("name", [".", "", "..", "/", "x/..", "./"])
    def test_empty_destination_name_is_refused(self, location, monkeypatch, name):
        monkeypatch.chdir(location)
        words = "cannot be a destination" if name else "the text is empty"
        for extra in ((), ("--overwrite",), ("--dry-run",)):
            refused(location, "cast", "mt", name, "--dtype=float32", *extra, words=words)

    def test_trailing_slash_is_ignored(self, location):
        assert ckpt("cast", location / "mt", f"{location}/new/", "--dtype=float32").exit_code == 0
        assert (location / "new" / "0" / "items").is_dir()


class TestOccupiedDestinations:
    """Refused with and without --overwrite, which is never suggested."""

    def check(self, location, destination, words, command=("cast", "mt", "--dtype=float32")):
        verb, source, *options = command
        arguments = (*verb.split(), location / source, location / destination, *options)
        refused(location, *arguments, words=words)
        refused(location, *arguments, "--overwrite", words=words)
        refused(location, *arguments, "--overwrite", "--dry-run", words=words)

    def test_plain_file_is_not_replaced(self, location):
        (location / "notes").write_text("mine")
        self.check(location, "notes", "is a file")

    def test_symbolic_link_is_not_replaced(self, location):
        shutil.copytree(location / "mt", location / "other")
        (location / "link").symlink_to("other")
        self.check(location, "link", "is a symbolic link to other")
        (location / "dangling").symlink_to("nowhere")
        self.check(location, "dangling", "is a symbolic link to nowhere")

    def test_mount_points_inside_destination_are_kept(self, location):
        """A file and a directory that belong there, and the empty directory itself."""
        shutil.copytree(location / "mt/0/items/d", location / "d")
        shutil.copy(location / "hf" / "config.json", location / "file")
        (location / "empty").mkdir()
        (location / "out").mkdir()
        assert ckpt("convert", "to-safetensors", location / "hf", location / "st").exit_code == 0
        before = state(location)
        cases = [
            (
                location / "file",
                location / "st" / "config.json",
                ("to-safetensors", location / "hf", location / "st"),
            ),
            (location / "d", location / "mt/0/items/d", ("to-orbax", location / "hf", location / "mt")),
            (location / "empty", location / "out", ("to-orbax", location / "hf", location / "out")),
        ]
        command = [(what, where, ("convert", *given, "--overwrite")) for what, where, given in cases]
        result = while_mounted(*command)
        assert [code for code, _ in result] == [2, 2, 2]
        for (_, where, _), (_, text) in zip(cases[:2], result[:2], strict=True):
            assert f"contains the mount point {where}" in text and f"or umount {where}" in text
        assert f"{location / 'out'} is a mount point" in result[2][1]
        assert state(location) == before

    def test_unrelated_directory_is_not_replaced(self, location):
        (location / "home").mkdir()
        (location / "home" / "thesis.tex").write_text("mine")
        self.check(location, "home", "is not a readable checkpoint thesis.tex")

    def test_checkpoint_of_another_format_is_not_replaced(self, location):
        self.check(
            location, "hf", "holds a checkpoint of format safetensors expected a checkpoint of format orbax"
        )

    def test_run_with_several_steps_is_not_replaced(self, location):
        shutil.copytree(location / "run/checkpoints", location / "steps")
        self.check(location, "steps", "holds files that are not part of the checkpoint: 1")

    def test_step_or_item_is_not_replaced(self, location):
        (location / "5").mkdir()
        shutil.copytree(location / "mt" / "0" / "items", location / "5" / "items")
        self.check(location, "5", "items is an item")
        self.check(location, "5/items", "is an item")

    def test_step_with_other_items_is_not_replaced(self, location):
        shutil.copytree(location / "mt", location / "old")
        (location / "old" / "0" / "iter").mkdir()
        (location / "old" / "0" / "iter" / "process_0.json").write_text("{}")
        self.check(location, "old", "holds files that are not part of the checkpoint: 0/iter")

    def test_parameters_do_not_replace_training_checkpoint(self, location):
        (location / "old").mkdir()
        shutil.copytree(location / "run/checkpoints/1", location / "old" / "1")
        command = ("strip-optimizer", "run/checkpoints/2")
        self.check(location, "old", "holds a training checkpoint of step 1, with the state of its", command)

    BESIDE_WEIGHTS = (
        "optimizer.pt",
        "training_args.bin",
        "train.py",
        "README.md",
        "notes.txt",
        "results.json",
        "adapter_config.json",
        "adapter_model.safetensors",
        "hf/model.safetensors",
        "checkpoint-500/model.safetensors",
        ".git/HEAD",
    )

    def add(self, directory, name):
        """A file that the checkpoint does not account for; of weights, one that opens."""
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("adapter_model"):
            save_file({"lora_A": np.zeros(2, np.float32)}, file)
        else:
            file.write_text("mine")
        return lambda: shutil.rmtree(directory / name.split("/")[0]) if "/" in name else file.unlink()

    def test_files_next_to_weights_are_kept(self, location):
        assert ckpt("convert", "maxtext-to-hf", location / "mt", location / "tuned").exit_code == 0
        for name in self.BESIDE_WEIGHTS:
            remove = self.add(location / "tuned", name)
            words = f"holds files that are not part of the checkpoint: {name.split('/')[0]}"
            self.check(location, "tuned", words, ("convert maxtext-to-hf", "mt", "--json"))
            remove()

    @pytest.mark.parametrize("storage", [(), ("--no-ocdbt",)], ids=["ocdbt", "files"])
    def test_files_in_an_item_are_kept(self, location, storage):
        assert ckpt("convert", "hf-to-maxtext", location / "hf", location / "old", *storage).exit_code == 0
        array = "params.params.decoder.decoder_norm.scale"
        names = ["notes.txt", "mine/model.safetensors", "hf/notes.txt", "d/mine/file", "array_metadatas/x/y"]
        for name in [*names, *([f"{array}/notes.txt"] if storage else [])]:
            file = location / "old/0/items" / name
            built = not file.parent.exists()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("mine")
            self.check(location, "old", "holds files that are not part of the checkpoint: 0/items/")
            shutil.rmtree(file.parent) if built else file.unlink()
        arguments = ("convert", "hf-to-maxtext", location / "hf", location / "old", *storage, "--overwrite")
        result = ckpt(*arguments)
        assert result.exit_code == 0, result.output

    def test_files_in_a_zarr_hierarchy_are_kept(self, location):
        assert ckpt("convert", "to-zarr3", location / "mt", location / "z").exit_code == 0
        scale = "params/params/decoder/decoder_norm/scale"
        for name in ("notes.txt", "params/mine/file", f"{scale}/notes.txt", f"{scale}/c/notes.txt"):
            file = location / "z" / name
            built = not file.parent.exists()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("mine")
            self.check(
                location, "z", "holds files that are not part of the checkpoint: ", ("convert to-zarr3", "mt")
            )
            shutil.rmtree(file.parent) if built else file.unlink()
        result = ckpt("convert", "to-zarr3", location / "mt", location / "z", "--overwrite")
        assert result.exit_code == 0, result.output


class TestUnownedFiles:
    """Files with names such as Orbax, zarr and safetensors use, where these have none."""

    def planted(self, top, names, command):
        """Each of these files is named as a stranger, the checkpoint's own are not, and they are not lost."""
        assert strangers_at(top) == set()
        own = set(state(top))
        for name in names:
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text("mine")
        result = [f"{name}/" for name in strangers_at(top)]
        named = {name for name in state(top) if f"{name}/".startswith(tuple(result))}
        assert named == set(names) == state(top).keys() - own
        text = refused(top.parent, *command, top, "--overwrite", words="not part of the checkpoint")
        assert sorted(names)[0] in text

    ITEM = (
        "d/notes.txt",
        "d/d/notes",
        "d/" + "0" * 31,
        "ocdbt.process_0/notes.txt",
        "ocdbt.process_0/d/notes.txt",
        "ocdbt.process_0/array_metadatas/process_0",
        "array_metadatas/notes.txt",
        "zarr.json",
        "0.0",
    )

    @pytest.mark.parametrize(
        "how", [(), ("--target-data-file-size=4kB",), ("--no-ocdbt",), ("--no-ocdbt", "--zarr2")], ids=str
    )
    def test_unowned_files_in_item_are_found(self, location, how):
        command = ("convert", "hf-to-maxtext", location / "hf")
        assert ckpt(*command, location / "old", *how).exit_code == 0
        item, array = location / "old/0/items", "params.params.decoder.decoder_norm.scale"
        inside = ("1.5", "c.0", "c/c/0") if (item / array).is_dir() else ()
        names = [*self.ITEM, *(f"{array}/{name}" for name in inside)]
        names = [f"0/items/{name}" for name in names] + [
            "0/d/notes.txt",
            "0/_sharding",
            "0/array_metadatas/x",
        ]
        self.planted(location / "old", names, command)

    def test_unowned_files_in_orbax_checkpoints_are_found(self, location):
        """Saves of one process and of several, merged or not, of old and new versions."""
        for name in ("multihost_plain", "lazy_2proc", "lazy_workers", "maxtext_nnx", "v1_training"):
            assert strangers_at(FIXTURES / "orbax" / name) == set()
        written = Path(shutil.copytree(FIXTURES / "orbax" / "llama3.1_scanned_1dev", location / "written"))
        item = written / "0" / "items"
        assert list(item.glob("ocdbt.process_0/d/*"))
        (item / "d" / ("0" * 32)).write_bytes(b"nodes of an older version, which no manifest leads to")
        names = [f"0/items/{name}" for name in self.ITEM]
        self.planted(written, names, ("convert", "hf-to-maxtext", location / "hf"))

    def test_hard_linked_destination_is_replaced(self, location):
        for _ in range(2):
            result = ckpt(
                "convert", "to-orbax", location / "hf", location / "linked", "--reference", "--overwrite"
            )
            assert result.exit_code == 0, result.output
        assert list(location.glob("linked/0/*/d/linked-*"))

    def test_unowned_files_in_zarr_hierarchy_are_found(self, location):
        command = ("convert", "to-zarr3", location / "mt")
        assert ckpt(*command, location / "z").exit_code == 0
        scale = "params/params/decoder/decoder_norm/scale"
        inside = ("2024", "1.5", "c/00", "c/0.0", "c.0", ".zattrs", "c/c/0")
        self.planted(
            location / "z", [f"{scale}/{name}" for name in inside] + ["params/.zattrs", "0.0"], command
        )

    def test_unowned_files_in_zarr_python_hierarchy_are_found(self, tmp_path):
        """Separators and encodings of keys other than those that are written here; a group without arrays."""
        group = zarr.open_group(str(tmp_path / "z"), mode="w")
        for name, encoding in KEYS.items():
            array = group.create_array(
                name, shape=(4, 6), chunks=(2, 2), dtype="f4", chunk_key_encoding=dict(encoding)
            )
            array[:] = 1
        (tmp_path / "z/v2-dots/c").mkdir()
        shutil.copytree(tmp_path / "z", tmp_path / "src")
        names = ["default/0.0", "default/c.0.0", "dots/c/0/0", "v2-dots/0/0", "v2/0.0"]
        self.planted(tmp_path / "z", names, ("convert", "to-zarr3", tmp_path / "src"))

    def test_unowned_files_next_to_weights_are_found(self, location):
        command = ("cast", location / "hf", "--dtype=float32")
        assert ckpt(*command, location / "one").exit_code == 0
        save_file({"other": np.zeros(2, np.float32)}, location / "shard")
        other = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "model-2.safetensors"]
        self.planted(location / "one", other, command)
        command = ("convert", "to-safetensors", location / "mt")
        assert ckpt(*command, location / "many", "--max-shard-size=50kB").exit_code == 0
        self.planted(
            location / "many", ["model-00001-of-00999.safetensors", "consolidated.safetensors"], command
        )
        # Without an index both series are read, as one; it is not known that they belong together.
        shutil.copytree(location / "hf", location / "series")
        (location / "series" / "model.safetensors").rename(
            location / "series" / "a-00001-of-00001.safetensors"
        )
        shutil.copy(location / "shard", location / "series" / "b-00001-of-00001.safetensors")
        assert strangers_at(location / "series") == {"b-00001-of-00001.safetensors"}


KEYS = {
    "default": {"name": "default", "separator": "/"},
    "dots": {"name": "default", "separator": "."},
    "v2": {"name": "v2", "separator": "/"},
    "v2-dots": {"name": "v2", "separator": "."},
}


def strangers_at(top):
    where = parse(top)
    return find_unowned_files(where, ckpttools.open(where))


def test_unreadable_metadata_is_not_reported_as_unowned(location, tmp_path, monkeypatch):
    """Which files belong to an array is not known then: exit code 5, as for any other error of the system."""
    words = ("convert", "to-zarr3", location / "hf", tmp_path / "zarr")
    assert ckpt(*words).exit_code == 0
    original = Files.read

    def failing(files, entry):
        if entry.file.startswith("model.norm"):
            raise StorageError(f"cannot read {entry.file}", got="Input/output error")
        return original(files, entry)

    directory = parse(tmp_path / "zarr")
    tree = ckpttools.open(directory)
    monkeypatch.setattr(Files, "read", failing)
    with pytest.raises(StorageError, match="cannot read"):
        list(find_unowned_files(directory, tree))


class TestParentDirectories:
    def test_missing_parent_directories_are_created_and_reported(self, location):
        """As transformers and Orbax do; `cp` refuses, so a slip of the pen should show."""
        words = ("convert", "to-safetensors", location / "hf", location / "new" / "er" / "out")
        planned, done = ckpt(*words, "--dry-run"), ckpt(*words)
        for result in (planned, done):
            assert "/newdoesnotexistandwillbecreated" in "".join(result.output.split())
        assert (location / "new" / "er" / "out" / "config.json").is_file()
        assert "does not exist" not in ckpt(*words, "--overwrite").output


class TestReplaceableOutputs:
    def test_dry_run_prints_plan_before_refusal(self, location):
        """Whether to replace what is there is decided by the plan; the exit code is that of the work."""
        shutil.copytree(location / "hf", location / "there")
        words = ("convert", "to-safetensors", location / "hf", location / "there")
        done, planned = ckpt(*words), ckpt(*words, "--dry-run")
        replacing = ckpt(*words, "--dry-run", "--overwrite")
        assert done.exit_code == planned.exit_code != 0 == replacing.exit_code and not done.stdout
        assert "--overwrite" in done.stderr and done.stderr in planned.stderr
        assert planned.stdout == replacing.stdout and "memory" in planned.stdout

    def test_suggested_overwrite_flag_works(self, location):
        for command, source in (
            ("convert maxtext-to-hf", "mt"),
            ("convert to-zarr3", "hf"),
            ("stack", "flat"),
        ):
            if source == "flat":
                assert ckpt("unstack", location / "mt", location / "flat").exit_code == 0
            arguments = (*command.split(), location / source, location / "out")
            shutil.rmtree(location / "out", ignore_errors=True)
            assert ckpt(*arguments).exit_code == 0
            refused(location, *arguments, words="out exists", suggests=True)
            result = ckpt(*arguments, "--overwrite", "--json")
            assert result.exit_code == 0, result.output
            assert json.loads(result.stdout)["destination"] == str(location / "out")

    def test_training_checkpoint_replaces_training_checkpoint(self, location):
        (location / "old").mkdir()
        shutil.copytree(location / "run/checkpoints/1", location / "old" / "1")
        result = ckpt(
            "cast", location / "run/checkpoints/2", location / "old", "--dtype=bfloat16", "--overwrite"
        )
        assert result.exit_code == 0, result.output


KILLED = """
import os, signal, sys
unlink = os.unlink
from pathlib import Path
Path.unlink = lambda self, missing_ok=False: os.kill(os.getpid(), signal.SIGKILL)
from safetensors.numpy import save_file

from ckpttools.cli.main import main
main(sys.argv[1:])
"""


def test_killed_dry_run_does_not_keep_weights(location):
    arguments = ["unstack", str(location / "mt"), str(location / "flat"), "--dry-run"]
    # A destination that is there already is left alone, also by a trial.
    (location / "flat").mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False).returncode == -9
    assert names(location / "flat") == []
    left = [name for name in names(location) if name.startswith(".ckpttools-trial-")]
    assert len(left) == 1
    (location / ".ckpttools-trial-notes").write_text("mine")
    assert ckpt(*arguments).exit_code == 0
    assert [name for name in names(location) if name.startswith(".")] == [".ckpttools-trial-notes"]
