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
from support.mounts import while_mounted
from support.places import FIXTURES

from ckpttools.core.errors import StorageError
from ckpttools.formats.orbax.entries import Files
from ckpttools.formats.registry import open_tree, strangers_in
from ckpttools.stores import parse
from ckpttools.testing.models import LlamaSizes, write_llama

SIZES = LlamaSizes(layers=2, hidden=64, mlp=128, heads=4, kv_heads=2, head_dim=16, vocab=256)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    place = tmp_path_factory.mktemp("originals")
    write_llama(place / "hf", SIZES)
    assert ckpt("convert", "hf-to-maxtext", place / "hf", place / "mt").exit_code == 0
    run = place / "run" / "checkpoints"
    for step in ("1", "2"):
        shutil.copytree(FIXTURES / "train" / "llama_scanned" / "1", run / step)
    return place


@pytest.fixture
def place(originals, tmp_path):
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


def refused(place, *arguments, words, suggests=False):
    """The command is refused with these words, suggests the flag or not, and changes nothing at all."""
    before = state(place)
    result = ckpt(*arguments)
    assert result.exit_code == 2, result.output
    text = " ".join(result.stderr.split())
    assert words in text
    assert ("allow its replacement with --overwrite" in text) == suggests
    assert state(place) == before
    return text


APART = {
    "is SRC itself": ("mt", "mt"),
    "is SRC itself, through a link": ("mt", "link"),
    "is SRC itself, through ..": ("mt", "hf/../mt"),
    "contains SRC": ("run/checkpoints/1", "run/checkpoints"),
    "contains SRC, through a link": ("run/checkpoints/1", "link-to-run"),
    "lies in SRC": ("run/checkpoints", "run/checkpoints/3"),
}


# What is mounted at `alias`, the source, and the destination.
ALIASES = {
    "is SRC itself, in a mount": (".", "mt", "alias/mt"),
    "is SRC itself, read in a mount": (".", "alias/mt", "mt"),
    "contains SRC, in a mount": ("run", "run/checkpoints/1", "alias/checkpoints"),
    "contains SRC, which is mounted": ("run/checkpoints/1", "alias", "run/checkpoints"),
    "lies in SRC, in a mount": ("run/checkpoints", "run/checkpoints", "alias/3"),
    "lies in SRC, which is mounted": ("run", "alias/checkpoints", "run/checkpoints/3"),
}


class TestApartFromTheSource:
    @pytest.mark.parametrize("overwrite", [(), ("--overwrite",), ("--dry-run",)], ids=str)
    @pytest.mark.parametrize("case", APART)
    def test_every_case(self, place, case, overwrite):
        (place / "link").symlink_to("mt")
        (place / "link-to-run").symlink_to("run/checkpoints")
        source, destination = APART[case]
        words = f"DST {case.split(',')[0]}"
        refused(
            place, "cast", place / source, place / destination, "--dtype=float32", *overwrite, words=words
        )

    @pytest.mark.parametrize("case", ALIASES)
    def test_destination_overlaps_source_through_a_mount(self, place, case):
        """A directory that is mounted twice has two real paths."""
        what, source, destination = ALIASES[case]
        (place / "alias").mkdir()
        before = state(place)
        arguments = ("cast", place / source, place / destination, "--dtype=float32", "--overwrite")
        [(code, text)] = while_mounted((place / what, place / "alias", arguments))
        assert code == 2 and f"DST {case.split(',')[0]}" in " ".join(text.split()), text
        assert state(place) == before

    def test_destination_is_another_input_through_a_mount(self, place):
        (place / "alias").mkdir()
        before = state(place)
        hf, alias = place / "hf", place / "alias" / "hf"
        commands = [
            ("convert", "maxtext-to-hf", place / "mt", alias, "--like", hf, "--overwrite"),
            ("average", place / "hf", hf, alias, "--overwrite"),
        ]
        for code, text in while_mounted(*((place, place / "alias", each) for each in commands)):
            assert code == 2 and "itself" in text, text
        assert state(place) == before

    def test_nothing_is_read_before(self, place):
        """A source that is no checkpoint is no reason to say something else first."""
        (place / "junk").mkdir()
        refused(place, "cast", place / "junk", place / "junk", "--dtype=float32", words="DST is SRC itself")

    def test_a_file_that_is_read_lies_in_the_destination(self, place):
        """The Hugging Face cache: a snapshot is links into another directory."""
        (place / "snapshot").mkdir()
        for file in (place / "hf").iterdir():
            (place / "snapshot" / file.name).symlink_to(f"../hf/{file.name}")
        arguments = ("convert", "to-safetensors", place / "snapshot", place / "hf", "--overwrite")
        refused(place, *arguments, words="DST holds what is read")

    def test_the_model_it_is_like_is_not_replaced(self, place):
        arguments = ("convert", "maxtext-to-hf", place / "mt", place / "hf", "--like", place / "hf")
        refused(place, *arguments, "--overwrite", words="DST is --like itself")


class TestManifest:
    def test_only_another_manifest_is_replaced(self, place):
        (place / "thesis.txt").write_text("mine")
        (place / "link.json").symlink_to("thesis.txt")
        command = ("cast", place / "hf", place / "out", "--dtype=float32", "--manifest")
        for name in ("thesis.txt", "link.json", "mt/0/items/d", "hf"):
            refused(
                place, *command, place / name, "--overwrite", words="is not replaced: it is not a manifest"
            )
        for extra in ((), ("--overwrite",)):
            assert ckpt(*command, place / "m.json", *extra).exit_code == 0
        refused(place, *command[:2], place / "new", *command[3:], place / "m.json", words="m.json exists")

    @pytest.mark.parametrize("name", ["out", "out/", "out.partial", "out/m.json", "out.partial/m.json", "in"])
    def test_it_lies_apart_from_what_is_written(self, place, name):
        """Said before anything is done, whatever is there; `in` is a directory that DST will be made in."""
        destination = place / ("in/out" if name == "in" else "out")
        command = ("cast", place / "hf", destination, "--dtype=float32", "--manifest", f"{place}/{name}")
        for made in (False, True):
            if made and "/m" in name:
                (place / name).parent.mkdir()
            for extra in ((), ("--overwrite",), ("--dry-run",)):
                refused(
                    place, *command, *extra, words="wanted a file outside of the checkpoint that is written"
                )

    def test_it_is_no_file_of_what_is_read(self, place):
        """What a checkpoint does not have is not made a part of it."""
        words, hf = "a part of the checkpoint", place / "hf"
        index, shard = "model.safetensors.index.json", "model-00001-of-00001.safetensors"
        cast = ("cast", hf, place / "out", "--dtype=float32", "--manifest")
        for name in (index, shard, "tokenizer.json", "config.json"):
            for command in (
                cast,
                ("hash", hf, "--manifest"),
                ("hash", hf / "model.safetensors", "--manifest"),
                ("inspect", "report", hf, "-o"),
            ):
                refused(place, *command, hf / name, words=words)
        (place / "mt/0/items/hf/config.json").unlink()
        for name in ("hf/config.json", "d/new", "_sharding", "zarr.json", "ocdbt.process_7", "0.0"):
            refused(place, "hash", place / "mt", "--manifest", place / "mt/0/items" / name, words=words)
        assert ckpt("hash", place / "hf", "--manifest", place / "hf" / "digests.json").exit_code == 0


class TestNames:
    @pytest.mark.parametrize("name", [".", "", "..", "/", "x/..", "./"])
    def test_what_is_no_name(self, place, monkeypatch, name):
        monkeypatch.chdir(place)
        words = "cannot be a destination" if name else "nothing is named: the text is empty"
        for extra in ((), ("--overwrite",), ("--dry-run",)):
            refused(place, "cast", "mt", name, "--dtype=float32", *extra, words=words)

    def test_a_slash_at_the_end_is_none(self, place):
        assert ckpt("cast", place / "mt", f"{place}/new/", "--dtype=float32").exit_code == 0
        assert (place / "new" / "0" / "items").is_dir()


class TestWhatIsThere:
    """Refused with and without --overwrite, which is never suggested."""

    def check(self, place, destination, words, command=("cast", "mt", "--dtype=float32")):
        verb, source, *options = command
        arguments = (*verb.split(), place / source, place / destination, *options)
        refused(place, *arguments, words=words)
        refused(place, *arguments, "--overwrite", words=words)
        refused(place, *arguments, "--overwrite", "--dry-run", words=words)

    def test_a_plain_file(self, place):
        (place / "notes").write_text("mine")
        self.check(place, "notes", "is a file")

    def test_a_link(self, place):
        shutil.copytree(place / "mt", place / "other")
        (place / "link").symlink_to("other")
        self.check(place, "link", "is a symbolic link to other")
        (place / "dangling").symlink_to("nowhere")
        self.check(place, "dangling", "is a symbolic link to nowhere")

    def test_what_is_mounted_in_it(self, place):
        """A file and a directory that belong there, and the empty directory itself."""
        shutil.copytree(place / "mt/0/items/d", place / "d")
        shutil.copy(place / "hf" / "config.json", place / "file")
        (place / "empty").mkdir()
        (place / "out").mkdir()
        assert ckpt("convert", "to-safetensors", place / "hf", place / "st").exit_code == 0
        before = state(place)
        cases = [
            (place / "file", place / "st" / "config.json", ("to-safetensors", place / "hf", place / "st")),
            (place / "d", place / "mt/0/items/d", ("to-orbax", place / "hf", place / "mt")),
            (place / "empty", place / "out", ("to-orbax", place / "hf", place / "out")),
        ]
        command = [(what, where, ("convert", *given, "--overwrite")) for what, where, given in cases]
        found = while_mounted(*command)
        assert [code for code, _ in found] == [2, 2, 2]
        for (_, where, _), (_, text) in zip(cases[:2], found[:2], strict=True):
            assert f"holds what is mounted at {where}" in text and f"or umount {where}" in text
        assert f"{place / 'out'} is where a file system is mounted" in found[2][1]
        assert state(place) == before

    def test_an_unrelated_directory(self, place):
        (place / "home").mkdir()
        (place / "home" / "thesis.tex").write_text("mine")
        self.check(place, "home", "is not a readable checkpoint thesis.tex")

    def test_a_checkpoint_of_another_format(self, place):
        self.check(
            place, "hf", "holds a checkpoint of format safetensors wanted a checkpoint of format orbax"
        )

    def test_a_run_of_several_steps(self, place):
        shutil.copytree(place / "run/checkpoints", place / "steps")
        self.check(place, "steps", "holds files that are not part of the checkpoint: 1")

    def test_a_step_or_an_item(self, place):
        (place / "5").mkdir()
        shutil.copytree(place / "mt" / "0" / "items", place / "5" / "items")
        self.check(place, "5", "items is an item")
        self.check(place, "5/items", "is an item")

    def test_other_items_of_the_step(self, place):
        shutil.copytree(place / "mt", place / "old")
        (place / "old" / "0" / "iter").mkdir()
        (place / "old" / "0" / "iter" / "process_0.json").write_text("{}")
        self.check(place, "old", "holds files that are not part of the checkpoint: 0/iter")

    def test_a_training_checkpoint_by_its_parameters(self, place):
        (place / "old").mkdir()
        shutil.copytree(place / "run/checkpoints/1", place / "old" / "1")
        command = ("strip-optimizer", "run/checkpoints/2")
        self.check(place, "old", "holds a training checkpoint of step 1, with the state of its", command)

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

    def test_what_lies_beside_the_weights(self, place):
        assert ckpt("convert", "maxtext-to-hf", place / "mt", place / "tuned").exit_code == 0
        for name in self.BESIDE_WEIGHTS:
            remove = self.add(place / "tuned", name)
            words = f"holds files that are not part of the checkpoint: {name.split('/')[0]}"
            self.check(place, "tuned", words, ("convert maxtext-to-hf", "mt", "--json"))
            remove()

    @pytest.mark.parametrize("storage", [(), ("--no-ocdbt",)], ids=["ocdbt", "files"])
    def test_what_lies_in_an_item(self, place, storage):
        assert ckpt("convert", "hf-to-maxtext", place / "hf", place / "old", *storage).exit_code == 0
        array = "params.params.decoder.decoder_norm.scale"
        names = ["notes.txt", "mine/model.safetensors", "hf/notes.txt", "d/mine/file", "array_metadatas/x/y"]
        for name in [*names, *([f"{array}/notes.txt"] if storage else [])]:
            file = place / "old/0/items" / name
            made = not file.parent.exists()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("mine")
            self.check(place, "old", "holds files that are not part of the checkpoint: 0/items/")
            shutil.rmtree(file.parent) if made else file.unlink()
        arguments = ("convert", "hf-to-maxtext", place / "hf", place / "old", *storage, "--overwrite")
        result = ckpt(*arguments)
        assert result.exit_code == 0, result.output

    def test_what_lies_in_a_zarr_hierarchy(self, place):
        assert ckpt("convert", "to-zarr3", place / "mt", place / "z").exit_code == 0
        scale = "params/params/decoder/decoder_norm/scale"
        for name in ("notes.txt", "params/mine/file", f"{scale}/notes.txt", f"{scale}/c/notes.txt"):
            file = place / "z" / name
            made = not file.parent.exists()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("mine")
            self.check(
                place, "z", "holds files that are not part of the checkpoint: ", ("convert to-zarr3", "mt")
            )
            shutil.rmtree(file.parent) if made else file.unlink()
        result = ckpt("convert", "to-zarr3", place / "mt", place / "z", "--overwrite")
        assert result.exit_code == 0, result.output


class TestEveryFileIsAccountedFor:
    """Files with names such as Orbax, zarr and safetensors use, where these have none."""

    def planted(self, top, names, command):
        """Each of these files is named as a stranger, the checkpoint's own are not, and they are not lost."""
        assert strangers_at(top) == set()
        own = set(state(top))
        for name in names:
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text("mine")
        found = [f"{name}/" for name in strangers_at(top)]
        named = {name for name in state(top) if f"{name}/".startswith(tuple(found))}
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
    def test_in_an_item(self, place, how):
        command = ("convert", "hf-to-maxtext", place / "hf")
        assert ckpt(*command, place / "old", *how).exit_code == 0
        item, array = place / "old/0/items", "params.params.decoder.decoder_norm.scale"
        inside = ("1.5", "c.0", "c/c/0") if (item / array).is_dir() else ()
        names = [*self.ITEM, *(f"{array}/{name}" for name in inside)]
        names = [f"0/items/{name}" for name in names] + [
            "0/d/notes.txt",
            "0/_sharding",
            "0/array_metadatas/x",
        ]
        self.planted(place / "old", names, command)

    def test_in_what_orbax_wrote(self, place):
        """Saves of one process and of several, merged or not, of old and new versions."""
        for name in ("multihost_plain", "lazy_2proc", "lazy_workers", "maxtext_nnx", "v1_training"):
            assert strangers_at(FIXTURES / "orbax" / name) == set()
        written = Path(shutil.copytree(FIXTURES / "orbax" / "llama3.1_scanned_1dev", place / "written"))
        item = written / "0" / "items"
        assert list(item.glob("ocdbt.process_0/d/*"))
        (item / "d" / ("0" * 32)).write_bytes(b"nodes of an older version, which no manifest leads to")
        names = [f"0/items/{name}" for name in self.ITEM]
        self.planted(written, names, ("convert", "hf-to-maxtext", place / "hf"))

    def test_what_is_linked_is_its_own(self, place):
        for _ in range(2):
            result = ckpt("convert", "to-orbax", place / "hf", place / "linked", "--reference", "--overwrite")
            assert result.exit_code == 0, result.output
        assert list(place.glob("linked/0/*/d/linked-*"))

    def test_in_a_zarr_hierarchy(self, place):
        command = ("convert", "to-zarr3", place / "mt")
        assert ckpt(*command, place / "z").exit_code == 0
        scale = "params/params/decoder/decoder_norm/scale"
        inside = ("2024", "1.5", "c/00", "c/0.0", "c.0", ".zattrs", "c/c/0")
        self.planted(place / "z", [f"{scale}/{name}" for name in inside] + ["params/.zattrs", "0.0"], command)

    def test_in_a_hierarchy_of_zarr(self, tmp_path):
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

    def test_beside_weights(self, place):
        command = ("cast", place / "hf", "--dtype=float32")
        assert ckpt(*command, place / "one").exit_code == 0
        save_file({"other": np.zeros(2, np.float32)}, place / "shard")
        other = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "model-2.safetensors"]
        self.planted(place / "one", other, command)
        command = ("convert", "to-safetensors", place / "mt")
        assert ckpt(*command, place / "many", "--max-shard-size=50kB").exit_code == 0
        self.planted(
            place / "many", ["model-00001-of-00999.safetensors", "consolidated.safetensors"], command
        )
        # Without an index both series are read, as one; it is not known that they belong together.
        shutil.copytree(place / "hf", place / "series")
        (place / "series" / "model.safetensors").rename(place / "series" / "a-00001-of-00001.safetensors")
        shutil.copy(place / "shard", place / "series" / "b-00001-of-00001.safetensors")
        assert strangers_at(place / "series") == {"b-00001-of-00001.safetensors"}


KEYS = {
    "default": {"name": "default", "separator": "/"},
    "dots": {"name": "default", "separator": "."},
    "v2": {"name": "v2", "separator": "/"},
    "v2-dots": {"name": "v2", "separator": "."},
}


def strangers_at(top):
    where = parse(top)
    return strangers_in(where, open_tree(where))


def test_a_document_that_cannot_be_read_is_not_called_a_strangers(place, tmp_path, monkeypatch):
    """Which files belong to an array is not known then: exit code 5, as for any other error of the system."""
    words = ("convert", "to-zarr3", place / "hf", tmp_path / "zarr")
    assert ckpt(*words).exit_code == 0
    original = Files.read

    def failing(files, entry):
        if entry.file.startswith("model.norm"):
            raise StorageError(f"cannot read {entry.file}", got="Input/output error")
        return original(files, entry)

    directory = parse(tmp_path / "zarr")
    tree = open_tree(directory)
    monkeypatch.setattr(Files, "read", failing)
    with pytest.raises(StorageError, match="cannot read"):
        list(strangers_in(directory, tree))


class TestDirectoriesAbove:
    def test_they_are_made_and_it_is_said(self, place):
        """As transformers and Orbax do; `cp` refuses, so a slip of the pen should show."""
        words = ("convert", "to-safetensors", place / "hf", place / "new" / "er" / "out")
        planned, done = ckpt(*words, "--dry-run"), ckpt(*words)
        for result in (planned, done):
            assert "/newdoesnotexistandiscreated" in "".join(result.output.split())
        assert (place / "new" / "er" / "out" / "config.json").is_file()
        assert "does not exist" not in ckpt(*words, "--overwrite").output


class TestWhatMayBeReplaced:
    def test_a_dry_run_shows_the_plan_and_then_what_stops_it(self, place):
        """Whether to replace what is there is decided by the plan; the exit code is that of the work."""
        shutil.copytree(place / "hf", place / "there")
        words = ("convert", "to-safetensors", place / "hf", place / "there")
        done, planned = ckpt(*words), ckpt(*words, "--dry-run")
        replacing = ckpt(*words, "--dry-run", "--overwrite")
        assert done.exit_code == planned.exit_code != 0 == replacing.exit_code and not done.stdout
        assert "--overwrite" in done.stderr and done.stderr in planned.stderr
        assert planned.stdout == replacing.stdout and "memory" in planned.stdout

    def test_the_flag_is_suggested_and_does_it(self, place):
        for command, source in (
            ("convert maxtext-to-hf", "mt"),
            ("convert to-zarr3", "hf"),
            ("stack", "flat"),
        ):
            if source == "flat":
                assert ckpt("unstack", place / "mt", place / "flat").exit_code == 0
            arguments = (*command.split(), place / source, place / "out")
            shutil.rmtree(place / "out", ignore_errors=True)
            assert ckpt(*arguments).exit_code == 0
            refused(place, *arguments, words="out exists", suggests=True)
            result = ckpt(*arguments, "--overwrite", "--json")
            assert result.exit_code == 0, result.output
            assert json.loads(result.stdout)["destination"] == str(place / "out")

    def test_a_training_checkpoint_by_another(self, place):
        (place / "old").mkdir()
        shutil.copytree(place / "run/checkpoints/1", place / "old" / "1")
        result = ckpt("cast", place / "run/checkpoints/2", place / "old", "--dtype=bfloat16", "--overwrite")
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


def test_a_trial_that_was_killed_does_not_keep_the_weights(place):
    arguments = ["unstack", str(place / "mt"), str(place / "flat"), "--dry-run"]
    # A destination that is there already is left alone, also by a trial.
    (place / "flat").mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False).returncode == -9
    assert names(place / "flat") == []
    left = [name for name in names(place) if name.startswith(".ckpttools-trial-")]
    assert len(left) == 1
    (place / ".ckpttools-trial-notes").write_text("mine")
    assert ckpt(*arguments).exit_code == 0
    assert [name for name in names(place) if name.startswith(".")] == [".ckpttools-trial-notes"]
