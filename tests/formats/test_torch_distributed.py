"""Distributed checkpoints of PyTorch, as 4 processes of torch 2.13 wrote them: put together to the bit."""

import itertools
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt, run
from support.internals import Constant, Decoded, ReadOptions, dotted, open_tree, parse, window
from support.torch_files import View, archived, save
from support.torch_files import whole as whole_tensor
from support.trees import lazy

import ckpttools
from ckpttools import DTYPES, FormatError, Region
from ckpttools.array.nodes import Concat
from ckpttools.formats.pieced import Piece, assemble_boxes
from ckpttools.formats.torch.archive import open_saved_file
from ckpttools.formats.torch.dcp import SavedTensor
from ckpttools.formats.torch.replica_check import ProcessFile, ends_of, refuse_copies

FIXTURES = Path(__file__).parents[2] / "fixtures/torch"
DCP, SHARDS, RANKS = (FIXTURES / name for name in ("dcp", "dcp-safetensors", "ranks"))
FSDP = FIXTURES / "trainers/fsdp/pytorch_model_fsdp_0"
# Bytes of a tensor that says which ranks a mesh is of.
MESH = 16
# What rank 0 gathered: "model." and the name, and one of the moments.
WHOLE = {dotted(path): array for path, array in open_tree(FIXTURES / "dcp.safetensors").arrays.items()}


def copied(source, target):
    shutil.copytree(source, target)
    return target


class TestMetadataAndFiles:
    def test_tensors_equal_those_gathered_by_processes(self):
        """Cut by rows (7 on 4), columns, twice on one axis, both axes; replicated; plain; transposed."""
        tree = open_tree(DCP)
        for name, array in WHOLE.items():
            path = ("model", name.removeprefix("model."))
            if name == "optim.exp_avg":
                path = ("optim", "state", "layers.0.weight", "exp_avg")
            result = tree.arrays[path]
            assert (result.shape, result.dtype) == (array.shape, array.dtype), name
            assert result.read().tobytes() == array.read().tobytes(), name
        numbers = {
            path: array.read().item() for path, array in tree.arrays.items() if path in tree.metadata.scalars
        }
        assert numbers["epoch",] == 3 and numbers["optim", "param_groups", 0, "lr"] == 1e-3
        assert str(tree["note"].value) == "hello"

    def test_commands_accept_distributed_checkpoints(self, tmp_path):
        run("select", DCP, tmp_path / "out", "--keep", "model", "--to", "safetensors")
        told = ckpt("diff", tmp_path / "out", FIXTURES / "dcp.safetensors").output
        assert "8 arrays equal" in told and "optim.exp_avg" in told
        assert "structure and configuration OK" in ckpt("doctor", DCP).output
        assert "float32[10,9]" in ckpt("inspect", "tree", DCP).output

    def test_missing_process_file_is_reported(self, tmp_path):
        part = copied(DCP, tmp_path / "c")
        (part / "__2_0.distcp").unlink()
        told = run("hash", part, code=3)
        assert "__2_0.distcp" in told and "the 4 files that .metadata names" in told
        (part / ".metadata").unlink()
        assert "the save is unfinished" in run("hash", part, code=3)

    def test_truncated_file_is_reported(self, tmp_path):
        part = copied(DCP, tmp_path / "c")
        file = part / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
        assert "__1_0.distcp: 17,407 bytes of 17,408" in run("hash", part, code=3)

    def test_file_of_another_save_is_reported(self, tmp_path):
        """As long, and with other tensors in it: whoever reads one sees that it is another."""
        part = copied(DCP, tmp_path / "c")
        first, second = (part / f"__{rank}_0.distcp" for rank in (1, 3))
        long, short = first.read_bytes(), second.read_bytes()
        first.write_bytes(short + bytes(len(long) - len(short)))
        assert ckpt("hash", part).exit_code == 3

    def test_copied_file_is_reported(self, tmp_path):
        """Files of processes that have the same parts by shape: only numbers tell them apart."""
        part = copied(FSDP, tmp_path / "c")
        first, second = (part / f"__{rank}_0.distcp" for rank in (0, 1))
        assert first.stat().st_size == second.stat().st_size
        shutil.copy(first, second)
        assert "__0_0.distcp = __1_0.distcp" in run("hash", part, code=3)

    @pytest.mark.parametrize("kind", ("replicated", "experts"))
    def test_identical_experts_are_accepted(self, kind):
        """A model that begins as one of a dense model: each process has some of the experts."""
        tree = open_tree(FIXTURES / "upcycled" / kind)
        experts = tree["model/layers.0.gate_up"].read()
        assert experts.shape == (6, 8, 8) and (experts == experts[0]).all() and len({*experts[0].flat}) == 64

    def test_differing_shards_do_not_count_as_copies(self, tmp_path):
        """Files of two processes or three: alike where they are looked at first, of what and in what else."""

        def refused(rows, *contents, processes=2, **spans):
            files = {}
            for number, content in enumerate(contents * processes if len(contents) == 1 else contents):
                (tmp_path / str(number)).write_bytes(content)
                file, within = parse(tmp_path / str(number)).open(), spans.get(f"of_{number}", {(0, 8)})
                part = {"x": lazy(np.stack(rows))}
                files[str(number)] = ProcessFile(part, file, lambda within=within: within)
            return are_refused(files)

        row, other = np.arange(64, dtype="f4"), np.arange(1, 65, dtype="f4")
        assert refused([row, other], b"a" * 8)
        assert not refused([row, row], b"a" * 8)
        # Moments that are new: what has one number alone may be alike everywhere.
        assert not refused([0 * row], b"a" * 8) and not refused([0 * row + 7], b"a" * 8)
        assert refused([row], b"a" * 8)
        assert not refused([row, other], b"a" * 8, b"b" * 8)
        assert refused([row, other], b"a" * 8, b"b" * 8, b"a" * 8)
        assert not refused([row, other], b"a" * 16, of_0={(0, 8)}, of_1={(8, 8)})
        assert refused([row, other], b"a" * 16, of_0={(0, 8)}, of_1={(0, 8), (8, 8)})
        expert = [row.reshape(8, 8)]
        assert refused(expert, b"a" * 8) and not refused(expert, b"a" * 8, processes=3)

    def test_experts_may_belong_to_some_processes(self, tmp_path):
        """With pipelines each process has layers of its own, and of those all have alike experts."""
        (tmp_path / "file").write_bytes(b"a" * 8)
        file = parse(tmp_path / "file").open()

        def refused(*held):
            arrays = ({what: lazy(np.full((1, 8, 8), 0.5) + np.eye(8) * n)} for what, n in held)
            return are_refused(
                {str(k): ProcessFile(item, file, lambda: {(0, 8)}) for k, item in enumerate(arrays)}
            )

        first, second = ("layers.0", 1), ("layers.1", 2)
        assert not refused(*[first] * 3, *[second] * 3)
        # A file under another's name: of the same layer, where experts are no copies, or of another one.
        assert refused(first, first, ("layers.0", 2)) and refused(*[first] * 3, ("layers.0", 2))
        assert refused(*[first] * 3, *[second] * 3, ("layers.1", 1))
        assert refused(*[first] * 3, *[("layers.1", 1)] * 3)


def are_refused(files):
    try:
        refuse_copies(files, parse("/x"), "")
    except FormatError:
        return True
    return False


def resay(file, change, only_last=False):
    """Where the tensors of a file begin in the whole is changed; only of the last one, if said."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    declared = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    for item in list(declared.values())[-1 if only_last else 0 :]:
        item["saved_offsets"] = change(item["saved_offsets"])
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(declared)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


class TestSafetensors:
    def test_tensors_equal_those_gathered_by_processes(self):
        tree = open_tree(SHARDS)
        assert {f"model.{dotted(path)}" for path in tree.arrays} == WHOLE.keys() - {"optim.exp_avg"}
        # What is transposed was saved as another: this writer of torch takes contiguous tensors only.
        for path, array in [item for item in tree.arrays.items() if item[0] != ("tr",)]:
            assert array.read().tobytes() == WHOLE[f"model.{dotted(path)}"].read().tobytes(), path
        assert "4 processes" in tree.metadata.notes.remarks[0] and not tree.metadata.custom.get("DCP_VERSION")

    def test_missing_shard_is_named(self, tmp_path):
        part = copied(SHARDS, tmp_path / "c")
        (part / "shard-00002-model-00001-of-00002.safetensors").unlink()
        assert "shard-00002-model-00001-of-00002.safetensors" in run("hash", part, code=3)
        (part / "shard-00002-model-00002-of-00002.safetensors").unlink()
        assert "shard-00002-…" in run("hash", part, code=3)
        one = part / "shard-00001-model-00001-of-00002.safetensors"
        assert "one process's part" in run("hash", one, code=3)

    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_missing_files_of_a_process_are_listed(self, tmp_path, rank):
        part = copied(SHARDS, tmp_path / "c")
        for file in part.glob(f"shard-{rank:05d}-*"):
            file.unlink()
        assert f"some processes are missing:\n    shard-{rank:05d}-…\n" in run("hash", part, code=3)

    def test_pipeline_stages_have_separate_files(self, tmp_path):
        """Of a file a process writes no part where it has nothing of it."""
        whole = {"first": np.arange(6.0), "second": np.arange(8.0), "third": np.arange(4.0)}
        cut = {"first": (1, 1, 2), "second": (2, 3, 2), "third": (3, 3, 2)}
        names = {}
        for name, (number, rank, count) in cut.items():
            for nth, part in enumerate(np.split(whole[name], count)):
                declared = {name: {"saved_offsets": [nth * len(part)]}}
                file = tmp_path / f"shard-{rank + nth:05d}-model-{number:05d}-of-00003.safetensors"
                metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(declared)}
                save_file({name: part}, file, metadata)
                names[name, nth] = file
        tree = open_tree(tmp_path)
        assert {name: array.read().tolist() for (name,), array in tree.arrays.items()} == {
            name: array.tolist() for name, array in whole.items()
        }
        assert not ckpt("doctor", tmp_path).exit_code
        lost = names["third", 1]
        lost.unlink()
        assert lost.name in run("hash", tmp_path, code=3)
        assert lost.name in ckpt("doctor", tmp_path).output
        for file in tmp_path.glob("*-00003-of-00003.safetensors"):
            file.unlink()
        assert "shard-…-model-00003-of-00003.safetensors" in run("hash", tmp_path, code=3)

    def test_overlapping_parts_are_refused(self, tmp_path):
        part = copied(SHARDS, tmp_path / "c")
        for file in part.glob("*-00001-of-*"):
            resay(file, lambda offsets: [max(0, at - 1) for at in offsets])
        assert "two of its parts contain element" in run("hash", part, code=3)

    @pytest.mark.parametrize("wrong", [-1, 1 << 62, 0.0, None, "1"])
    def test_invalid_offsets_are_refused(self, tmp_path, wrong):
        part = copied(SHARDS, tmp_path / "c")
        file = part / "shard-00001-model-00001-of-00002.safetensors"
        resay(file, lambda offsets: [*offsets[:-1], wrong], only_last=True)
        assert "offsets that are not lists of indices" in run("hash", part, code=3)

    def test_file_of_another_save_is_reported(self, tmp_path):
        """Of as many processes and more: what they had is there twice."""
        part = copied(SHARDS, tmp_path / "c")
        for file in sorted(part.glob("shard-00001-*")):
            shutil.copy(file, part / file.name.replace("shard-00001", "shard-00005"))
        assert "two files have the same part of it" in run("hash", part, code=3)

    def test_doctor_recognizes_distributed_shards(self):
        told = ckpt("doctor", SHARDS).output
        assert "files of single processes of a PyTorch distributed checkpoint" in told and "--fix" not in told


class TestRankFiles:
    """`model_world_size_4_rank_0.pt` and so on, of DTensors on meshes of 4 and of 2 by 2."""

    def test_tensors_equal_those_gathered_by_processes(self):
        tree = open_tree(RANKS)
        assert {f"model.{dotted(path)}" for path in tree.arrays} == WHOLE.keys() - {"optim.exp_avg"}
        for path, array in tree.arrays.items():
            assert array.read().tobytes() == WHOLE[f"model.{dotted(path)}"].read().tobytes(), path

    @pytest.mark.parametrize("rank", range(4))
    def test_missing_rank_is_reported(self, rank, tmp_path):
        part = copied(RANKS, tmp_path / "c")
        (part / f"model_world_size_4_rank_{rank}.pt").unlink()
        told = run("hash", part, code=3)
        assert f"4 processes saved, and of their files that of rank {rank} is missing: " in told
        assert " tensors cannot be assembled\n" in told and "layers.0.weight" not in told
        (part / f"model_world_size_4_rank_{(rank + 1) % 4}.pt").unlink()
        assert "of their files those of ranks " in run("hash", part, code=3)
        assert "are missing: " in " ".join(ckpt("doctor", part).output.split())

    def test_files_of_another_save_are_reported(self, tmp_path):
        part = copied(RANKS, tmp_path / "c")
        shutil.copy(part / "model_world_size_4_rank_1.pt", part / "model_world_size_8_rank_5.pt")
        assert "world sizes 4, 8" in run("hash", part, code=3)
        (part / "model_world_size_8_rank_5.pt").unlink()
        shutil.copy(part / "model_world_size_4_rank_1.pt", part / "model_world_size_4_rank_2.pt")
        assert "two of its parts" in run("hash", part, code=3) or "elements out" in run("hash", part, code=3)

    def test_copied_or_empty_file_is_reported(self, tmp_path):
        part = copied(RANKS, tmp_path / "c")
        other = part / "model_world_size_4_rank_1.pt"
        shutil.copy(part / "model_world_size_4_rank_0.pt", other)
        assert "those of ranks 0 and 1 have the same parts:" in run("hash", part, code=3)
        other.write_bytes(b"")
        assert "got      an empty file" in run("hash", part, code=3)

    def test_replicated_tensors_are_compared(self, tmp_path):
        """Other numbers of any tensor of any process are refused or read, never left out."""
        told, truth = 0, {path: array.read().tobytes() for path, array in open_tree(RANKS).arrays.items()}
        for rank in (0, 3):
            part = copied(RANKS, tmp_path / str(rank))
            location = part / f"model_world_size_4_rank_{rank}.pt"
            raw = location.read_bytes()
            spans = open_saved_file(parse(location), ReadOptions()).storages.values()
            for span in (item for item in spans if item.nbytes != MESH):
                changed = bytes(byte ^ 0x55 for byte in raw[span.start : span.start + span.nbytes])
                location.write_bytes(raw[: span.start] + changed + raw[span.start + span.nbytes :])
                try:
                    tree = open_tree(part)
                except FormatError as error:
                    assert "has other values than rank" in str(error) and "prefer_rank=0" in str(error)
                    others = tuple(item for item in range(4) if item != rank)
                    tree = open_tree(part, ReadOptions(prefer_rank=others))
                    assert {path: array.read().tobytes() for path, array in tree.arrays.items()} == truth
                    assert "was preferred: its values of 1 tensor" in " ".join(tree.metadata.notes.remarks)
                    told += 1
                else:
                    assert {path: array.read().tobytes() for path, array in tree.arrays.items()} != truth
        assert told

    def test_preferred_process_provides_the_values(self, tmp_path):
        """Buffers that each process has for itself: none is taken unasked, and whose it is is told."""
        part = copied(RANKS, tmp_path / "c")
        for rank in range(4):
            location = part / f"model_world_size_4_rank_{rank}.pt"
            raw, spans = (
                location.read_bytes(),
                open_saved_file(parse(location), ReadOptions()).storages.values(),
            )
            # "plain", which no process has a part of.
            (span,) = (item for item in spans if item.nbytes == 4 * WHOLE["model.plain"].size)
            location.write_bytes(
                raw[: span.start] + bytes([rank]) * span.nbytes + raw[span.start + span.nbytes :]
            )
        assert "--prefer-rank 0 uses its values" in run("hash", part, code=3)
        told = run(
            "convert", "to-safetensors", part, tmp_path / "out", "--prefer-rank", 2, "--prefer-rank", 1
        )
        assert "process 2 was preferred: its values of 1 tensor" in told and "plain" in told
        assert {*open_tree(tmp_path / "out")["plain"].read().tobytes()} == {2}
        assert ckpt("diff", part, tmp_path / "out", "--prefer-rank", 2).exit_code == 0
        assert "one of " in run("hash", part, "--prefer-rank", 4, code=2)

    def test_hint_prefers_a_process_with_the_tensor(self, tmp_path):
        """Of the first stage of a pipeline there may be no tensor of its own."""
        part = copied(RANKS, tmp_path / "c")
        for rank in (2, 3):
            location = part / f"model_world_size_4_rank_{rank}.pt"
            with zipfile.ZipFile(location) as archive:
                files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
            storages = {
                name.removeprefix("data/"): raw for name, raw in files.items() if name.startswith("data/")
            }
            (plain,) = (key for key, raw in storages.items() if len(raw) == WHOLE["model.plain"].nbytes)
            storages[plain] = bytes([rank]) * len(storages[plain])
            archived(location, files["data.pkl"].replace(b"plain", b"stage"), storages)
        assert "--prefer-rank 2 uses its values" in run("hash", part, code=3)
        run("convert", "to-safetensors", part, tmp_path / "out", "--prefer-rank", 2)
        assert {*open_tree(tmp_path / "out")["stage"].read().tobytes()} == {2}

    def test_preference_without_process_files_is_refused(self, tmp_path):
        one, other = FIXTURES / "pytorch_model.bin", FIXTURES / "pytorch_model.safetensors"
        for call in (("hash", DCP), ("diff", one, other), ("average", one, other, tmp_path / "out")):
            told = run(*call, "--prefer-rank", 0, code=2)
            assert "files of each process" in told and "files model_world_size_N_rank_R.pt" in told
        # Of two checkpoints one is enough, whichever it is.
        for pair in itertools.permutations((RANKS, other)):
            assert "only in A" in ckpt("diff", *pair, "--prefer-rank", 0).output
        assert ckpt("inspect", "tree", other, "--against", RANKS, "--prefer-rank", 0).exit_code == 1

    def test_different_recorded_steps_are_refused(self, tmp_path):
        part = copied(RANKS, tmp_path / "c")
        for rank in range(4):
            save(part / f"extra_state_world_size_4_rank_{rank}.pt", {"lr_scheduler": {"last_epoch": 7}})
        save(part / "extra_state_world_size_4_rank_1.pt", {"rng": {"cpu": 1}})
        assert open_tree(part).arrays.keys() == open_tree(RANKS).arrays.keys()
        save(part / "extra_state_world_size_4_rank_2.pt", {"lr_scheduler": {"last_epoch": 8}})
        told = run("hash", part, code=3)
        assert "several steps" in told and "rank_2.pt: step 8" in told

    def test_only_plain_tensors_are_refused(self, tmp_path):
        for rank in range(2):
            save(tmp_path / f"model_world_size_2_rank_{rank}.pt", {"x": whole_tensor(np.ones(3, "f4"))})
        assert "no tensor in these files records" in run("hash", tmp_path, code=3)

    def test_configuration_is_copied(self, tmp_path):
        part = copied(RANKS, tmp_path / "c")
        (part / "huggingface").mkdir()
        (part / "huggingface/config.json").write_text('{"model_type": "tiny"}')
        assert ckpttools.inspect(part).sidecars == ("huggingface/config.json",)
        run("convert", "to-safetensors", part, tmp_path / "out")
        assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "tiny"}
        assert "structure and configuration OK" in ckpt("doctor", part).output


# ---- arrays of boxes


@st.composite
def cuts(draw):
    """A shape, and for each axis where it is cut."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    return shape, [sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else [] for n in shape]


def boxes_of(shape, inner):
    ends = [list(itertools.pairwise([0, *item, n])) for item, n in zip(inner, shape, strict=True)]
    return [Region(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in itertools.product(*ends)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.data(),
    st.sampled_from(("uint8", "float32", "int64")),
)
def test_separately_saved_tensor_may_have_any_axis_order(tmp_path_factory, shape, data, dtype):
    """As torch saves a transposed one: its storage whole, and strides that fall in another order."""
    order = data.draw(st.permutations(range(len(shape))))
    stored = np.arange(np.prod(shape)).astype(dtype).reshape([shape[axis] for axis in order])
    expected = stored.transpose(np.argsort(order))
    strides = tuple(step // expected.itemsize for step in expected.strides)
    path = save(
        tmp_path_factory.mktemp("saved") / "one.pt", View(stored.reshape(-1), 0, tuple(shape), strides)
    )
    with parse(str(path)).open() as file:
        one = SavedTensor(file, 0, file.size, tuple(shape), DTYPES[dtype])
        assert (Decoded(tuple(shape), DTYPES[dtype], one).read() == expected).all()


def test_separately_saved_tensor_with_gaps_is_refused(tmp_path):
    path = save(tmp_path / "one.pt", View(np.arange(400, dtype="float32"), 0, (7, 3, 5), (50, 13, 2)))
    with parse(str(path)).open() as file:
        one = SavedTensor(file, 0, file.size, (7, 3, 5), DTYPES["float32"])
        with pytest.raises(FormatError, match="are not contiguous"):
            Decoded((7, 3, 5), DTYPES["float32"], one).read()


@given(cuts(), st.randoms(), st.data())
def test_regions_of_boxes_match_the_complete_array(cut, chosen, data):
    shape, inner = cut
    truth = np.arange(int(np.prod(shape)), dtype="f4").reshape(shape)
    whole = lazy(truth)
    pieces = [Piece(box, window(whole, box.start, box.shape)) for box in boxes_of(shape, inner)]
    chosen.shuffle(pieces)
    array = assemble_boxes(shape, DTYPES["float32"], pieces)
    start = [data.draw(st.integers(0, n)) for n in shape]
    stop = [data.draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)]
    region = Region(tuple(start), tuple(stop))
    assert np.array_equal(array.read(region), truth[region.slices])
    if len(pieces) > 1:
        with pytest.raises(ValueError, match=r"out|part"):
            assemble_boxes(shape, DTYPES["float32"], pieces[1:])
        with pytest.raises(ValueError, match=r"two of its parts|out"):
            assemble_boxes(shape, DTYPES["float32"], [*pieces, Piece(Region.whole(shape), whole)])


def test_damaged_metadata_is_refused_or_read(tmp_path):
    part = copied(DCP, tmp_path / "c")
    whole = (part / ".metadata").read_bytes()
    for at in range(0, len(whole), 97):
        (part / ".metadata").write_bytes(whole[:at] + bytes((whole[at] ^ 0x55,)) + whole[at + 1 :])
        try:
            tree = open_tree(part)
        except FormatError:
            continue
        for array in tree.arrays.values():
            try:
                array.read()
            except FormatError:
                break


def test_two_names_with_one_path_are_refused(tmp_path):
    part = copied(DCP, tmp_path / "c")
    whole = (part / ".metadata").read_bytes()
    # The key that a tensor has in the saved tree: a text of pickle's protocol 4, after its length.
    (part / ".metadata").write_bytes(whole.replace(b"\x8c\x03tp2", b"\x8c\x02tp"))
    with pytest.raises(FormatError, match=r"model\.tp and model\.tp2: both have the same path"):
        open_tree(part)


def test_uneven_parts_are_not_split_by_row():
    """A vocabulary on a mesh of two axes: 151,937 rows that end at odd places."""
    rows, ends = 151_937, (0, 50_646, 75_969, 101_292, 151_937)
    whole = Constant((rows, 3), DTYPES["float32"], bytes(4))
    pieces = [
        Piece(Region((a, 0), (b, 3)), window(whole, (a, 0), (b - a, 3))) for a, b in itertools.pairwise(ends)
    ]
    array = assemble_boxes((rows, 3), DTYPES["float32"], pieces)
    assert isinstance(array, Concat) and array.shape == (rows, 3) and len(array.parts) == len(pieces)
    with pytest.raises(ValueError, match="two of its parts"):
        assemble_boxes(
            (rows, 3),
            DTYPES["float32"],
            [*pieces, Piece(Region((7, 0), (9, 3)), window(whole, (7, 0), (2, 3)))],
        )


@pytest.mark.parametrize("location", [0, -1])
def test_replicas_are_compared_at_both_ends(location):
    one = np.zeros(1 << 20, np.float32)
    other = one.copy()
    other[location] = 1
    assert ends_of(lazy(one)) != ends_of(lazy(other))
