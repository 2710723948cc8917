"""The hub as more than a place to read from: what it says of its files, and copies of them."""

from __future__ import annotations

import json
import shutil

import huggingface_hub.constants
import pytest
from support.command_line import ckpt, ended, run
from support.internals import without_secrets
from support.locations import GOLDEN
from support.stores_on_loopback import ask_only, cached, forget
from support.web_server import COMMIT, cut, hub_name, stating, status, web_server

import ckpttools
from ckpttools import MemoryBudgetError, UsageError

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
HUB = "hf://org/llama"
AT_COMMIT = f"hf://org/llama@{COMMIT}"
SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture(scope="module")
def server():
    with web_server() as web:
        web.add("hub/org/llama", SHARDED)
        yield web


@pytest.fixture(autouse=True)
def fresh(server, monkeypatch, tmp_path):
    files = dict(server.files)
    ask_only(server, monkeypatch, tmp_path)
    yield
    forget(server, files)


def damaged(server, name: str, position: int = -1) -> None:
    """Storage that gives other bytes of a file than the hub lists."""
    content = bytearray(server.files[f"hub/org/llama/{name}"])
    content[position] ^= 1
    server.stored[f"org/llama/{name}"] = bytes(content)


class TestVerify:
    def test_hub_listing_matches_downloads(self, server):
        text = run("verify", HUB)
        total = sum(path.stat().st_size for path in SHARDED.iterdir())
        assert (
            AT_COMMIT in text and f"equal to the Hub's listing: {len(list(SHARDED.iterdir()))} files" in text
        )
        assert server.nbytes >= total

    def test_verify_lists_every_differing_file(self, server):
        damaged(server, SHARD)
        damaged(server, "config.json")
        server.files["hub/org/llama/short.safetensors"] = b"x" * 100
        server.fault("signed.*short", stating(Content_Range="bytes 0-99/50"), 9)
        server.files["hub/org/llama/gone.safetensors"] = b"x" * 100
        server.fault("resolve.*gone", status(404), 9)
        done = ended("verify", HUB, "--json", code=1)
        result = json.loads(done.stdout)
        assert {item["name"] for item in result["differences"]} == {
            SHARD,
            "config.json",
            "short.safetensors",
            "gone.safetensors",
        }
        by_name = {item["name"]: item for item in result["differences"]}
        assert (
            by_name[SHARD]["expected"].startswith("SHA-256 ")
            and by_name[SHARD]["got"] != by_name[SHARD]["expected"]
        )
        assert by_name["config.json"]["expected"].startswith("git's SHA-1 ")
        text = ended("verify", HUB, code=1).output
        assert f"differs from the Hub's listing: 4 of {result['files']} files" in text and SHARD in text

    def test_verify_compares_the_cached_copy(self, server, tmp_path):
        folder = cached(tmp_path / "hub_cache", SHARDED, SHARD)
        copy = (folder / SHARD).resolve()
        copy.write_bytes(b"x" * copy.stat().st_size)
        text = ended("verify", HUB, code=1).output
        assert f"remove {copy}" in text.replace("\n", "")

    def test_verify_accepts_one_file_or_directory(self, server):
        server.files["hub/org/llama/sub/a.bin"] = b"abc"
        result = ckpttools.verify_files(f"{HUB}/sub")
        assert (result.files, result.nbytes, result.equal) == (1, 3, True)
        server.stored[f"org/llama/{SHARD}"] = b"x" * len(server.files[f"hub/org/llama/{SHARD}"])
        assert [difference.name for difference in ckpttools.verify_files(f"{HUB}/{SHARD}").differences] == [
            SHARD
        ]

    def test_verify_reads_blocks_and_resumes_broken_bodies(self, server):
        server.files["hub/org/llama/large.safetensors"] = bytes(range(256)) * (9 << 12)
        server.fault("signed.*large", cut(1 << 20), 2)
        seen = []
        result = ckpttools.verify_files(
            f"{HUB}/large.safetensors",
            memory="256MiB",
            observe=lambda done, total: seen.append((done, total)),
        )
        assert result.equal and seen[0] == (0, 9 << 20) and seen[-1] == (9 << 20, 9 << 20)

    def test_network_error_is_not_a_difference(self, server):
        server.fault(f"signed.*{SHARD}", status(503), 99)
        assert ckpt("verify", HUB, "--no-progress").exit_code == 5

    def test_invalid_hub_options_are_refused(self, server, tmp_path):
        done = ended("verify", HUB, "--cast", "--per-layer", code=2)
        assert "--cast does not apply when files" in done.output and "--against" in done.output
        with pytest.raises(UsageError, match="does not list digests of its files"):
            ckpttools.verify_files(tmp_path)
        with pytest.raises(UsageError) as caught:
            ckpttools.verify(HUB)
        assert "verify_files" in caught.value.hint
        with pytest.raises(MemoryBudgetError):
            ckpttools.verify_files(HUB, memory="100MiB")
        assert "does not exist" in ended("verify", f"{HUB}/nothing", code=2).output


def blobs(home) -> set[str]:
    return {path.name for path in home.glob("hub_cache/*/blobs/*")}


class TestDownload:
    def test_download_is_cached_for_later_commands(self, server, tmp_path):
        server.files["hub/org/llama/pytorch_model.bin"] = b"x" * 5000
        run("convert", "hf-to-maxtext", HUB, tmp_path / "out", "--download")
        assert len(server.asked(f"^GET .*signed.*{SHARD}")) == 2  # its header, and all of it
        assert not server.asked("pytorch_model")
        copies = tmp_path / "hub_cache" / "models--org--llama" / "snapshots" / COMMIT
        assert {path.name for path in copies.iterdir()} == {path.name for path in SHARDED.iterdir()}
        assert all((copies / path.name).read_bytes() == path.read_bytes() for path in SHARDED.iterdir())
        run("verify", tmp_path / "out", "--against", SHARDED)
        server.log.clear()
        run("convert", "hf-to-maxtext", HUB, tmp_path / "again", "--download")
        assert not server.asked("resolve|signed")

    def test_download_fetches_only_needed_files(self, server, tmp_path):
        run("select", HUB, tmp_path / "out", "--keep", "model.embed_tokens.weight", "--download")
        fetched = {name for name in blobs(tmp_path) if len(name) == 64}
        assert len(fetched) == 1

    def test_dry_run_downloads_nothing(self, server, tmp_path):
        run("convert", "hf-to-maxtext", HUB, tmp_path / "out", "--download", "--dry-run")
        assert blobs(tmp_path) == set()

    @pytest.mark.parametrize("words", [("hash",), ("inspect", "stats"), ("verify", "--against", SHARDED)])
    def test_read_commands_use_cached_copies(self, server, tmp_path, words):
        run(
            *words[:1],
            *([HUB] if len(words) != 2 else [words[1], HUB]),
            *words[1 if len(words) == 3 else 2 :],
            "--download",
        )
        assert len(blobs(tmp_path)) >= 4

    def test_corrupted_download_is_refused_and_removed(self, server, tmp_path):
        damaged(server, SHARD)
        done = ended("convert", "hf-to-maxtext", HUB, tmp_path / "out", "--download", code=3)
        assert SHARD in done.output and "instead of" in done.output and "00001-of" not in done.output
        assert hub_name(SHARD, (SHARDED / SHARD).read_bytes()) not in blobs(tmp_path)
        assert not (tmp_path / "out").exists() and len(blobs(tmp_path)) >= 3
        server.stored = {}
        server.log.clear()
        run("convert", "hf-to-maxtext", HUB, tmp_path / "out", "--download")
        assert not server.asked("signed.*00003-of") and len(server.asked(f"^GET.*signed.*{SHARD}")) == 1

    def test_truncated_copy_is_downloaded_again(self, server, tmp_path):
        copy = (cached(tmp_path / "hub_cache", SHARDED, SHARD) / SHARD).resolve()
        copy.write_bytes(copy.read_bytes()[:-1])
        run("hash", HUB, "--download")
        assert copy.read_bytes() == (SHARDED / SHARD).read_bytes()

    def test_failed_download_stops_other_downloads(self, server, tmp_path):
        server.fault(f"HEAD .*{SHARD}", status(403), 99)
        done = ended("hash", HUB, "--download", code=5)
        assert SHARD in done.output and "access to" in done.output and "403" in done.output

    def test_broken_connection_resumes(self, server):
        server.fault(f"GET .*signed.*{SHARD}$", cut(1000), 1)
        run("hash", HUB, "--download")
        assert run("hash", HUB) == run("hash", HUB, "--download")

    def test_gated_model_error_explains_access(self, server, tmp_path):
        server.gated = {"org/llama"}
        done = ended("hash", HUB, "--download", code=5)
        assert "is gated" in done.output

    def test_download_progress_reaches_the_total(self, server, tmp_path):
        seen = []
        ckpttools.hash(HUB, download=True, observe=lambda done, total: seen.append((done, total)))
        total = seen[0][1]
        assert (total, total) in seen and total > sum(
            path.stat().st_size for path in SHARDED.glob("*.safetensors")
        )
        assert seen[-1][0] == seen[-1][1]

    def test_offline_mode_reads_only_cached_copies(self, server, tmp_path, monkeypatch):
        cached(tmp_path / "hub_cache", SHARDED, *(path.name for path in SHARDED.iterdir()))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        run("hash", HUB, "--download")
        assert server.log == []
        done = ended("hash", "hf://org/other", "--download", code=5)
        assert "HF_HUB_OFFLINE is set" in done.output

    def test_download_is_refused_for_other_stores(self, server, tmp_path):
        done = ended("hash", SHARDED, "--download", code=2)
        assert "--download applies only to models on the Hub" in done.output
        run("diff", HUB, SHARDED, "--download")

    def test_download_checks_free_space_first(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
        done = ended("hash", HUB, "--download", code=4)
        assert "too little space" in done.output and blobs(tmp_path) == set()


def test_conversion_reports_source_commit(server, tmp_path):
    assert f"from {AT_COMMIT}\n" in run("convert", "hf-to-maxtext", HUB, tmp_path / "out")
    for number, address in enumerate((HUB, f"{HUB}@main")):
        receipt = ended("convert", "to-safetensors", address, tmp_path / f"out-{number}", "--json").stdout
        assert json.loads(receipt)["source"] == AT_COMMIT
    local = ckpttools.convert(SHARDED, tmp_path / "local", format="safetensors")
    assert local.source == str(SHARDED) and ", from" not in run(
        "cast", SHARDED, tmp_path / "cast", "--dtype", "float32"
    )


class TestNames:
    """`ckpt convert` takes the name that a model's page has."""

    def test_hub_model_name_is_accepted_without_scheme(self, server, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        done = ended("convert", "hf-to-maxtext", "org/llama", "out", "--json", code=0)
        assert "org/llama is not a local directory; using hf://org/llama" in done.stderr
        assert json.loads(done.stdout)["source"] == AT_COMMIT

    def test_local_directory_wins_over_hub_name(self, server, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(SHARDED, "org/llama")
        assert "taken for" not in ended("convert", "hf-to-maxtext", "org/llama", "out", code=0).stderr
        done = ended("convert", "hf-to-maxtext", "org/lama", "out2", code=2)
        assert "org/lama does not exist" in done.stderr and "taken for" not in done.stderr

    @pytest.mark.parametrize("name", ["llama", "a/b/c", "../llama", "org/.git", "datasets/x", "/org/llama"])
    def test_invalid_hub_name_is_a_path(self, server, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        assert "taken for" not in ended("convert", "to-zarr3", name, "out", code=2).stderr
        assert not server.log


def test_cached_models_are_found_offline(server, tmp_path, monkeypatch):
    run("hash", HUB, "--download")
    forget(server, dict(server.files))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server.log.clear()
    assert run("hash", HUB).split()[0] == run("hash", SHARDED).split()[0]
    assert not server.log


def test_login_of_the_endpoint_is_not_printed(server, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://me:word@{server.address}")
    done = ckpt("hash", "hf://org/absent", "-v")
    assert done.exit_code == 2 and f"http://…@{server.address}/" in done.stderr
    assert "word" not in done.output
    assert without_secrets("https://me:word@mirror/https://hub/a?b") == "https://…@mirror/https://hub/a"
