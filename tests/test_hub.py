"""The hub as more than a place to read from: what it says of its files, and copies of them."""

from __future__ import annotations

import json

import pytest
from support.command_line import ckpt, ended, run
from support.places import GOLDEN
from support.stores_on_loopback import ask_only, cached, forget
from support.web_server import COMMIT, cut, stating, status, web_server

import ckpttools
from ckpttools.core.errors import MemoryBudgetError, UsageError

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
    def test_what_the_hub_lists_is_what_it_sends(self, server):
        text = run("verify", HUB)
        total = sum(path.stat().st_size for path in SHARDED.iterdir())
        assert (
            AT_COMMIT in text and f"equal to what the hub lists: {len(list(SHARDED.iterdir()))} files" in text
        )
        assert server.nbytes >= total

    def test_every_file_that_differs_is_listed(self, server):
        damaged(server, SHARD)
        damaged(server, "config.json")
        server.files["hub/org/llama/short.safetensors"] = b"x" * 100
        server.fault("signed.*short", stating(Content_Range="bytes 0-99/50"), 9)
        server.files["hub/org/llama/gone.safetensors"] = b"x" * 100
        server.fault("resolve.*gone", status(404), 9)
        done = ended("verify", HUB, "--json", code=1)
        found = json.loads(done.output)
        assert {each["name"] for each in found["differences"]} == {
            SHARD,
            "config.json",
            "short.safetensors",
            "gone.safetensors",
        }
        by_name = {each["name"]: each for each in found["differences"]}
        assert (
            by_name[SHARD]["wanted"].startswith("SHA-256 ")
            and by_name[SHARD]["got"] != by_name[SHARD]["wanted"]
        )
        assert by_name["config.json"]["wanted"].startswith("git's SHA-1 ")
        text = ended("verify", HUB, code=1).output
        assert f"differs from what the hub lists: 4 of {found['files']} files" in text and SHARD in text

    def test_of_what_was_copied_the_copy_is_compared(self, server, tmp_path):
        folder = cached(tmp_path / "hub_cache", SHARDED, SHARD)
        copy = (folder / SHARD).resolve()
        copy.write_bytes(b"x" * copy.stat().st_size)
        text = ended("verify", HUB, code=1).output
        assert f"remove {copy}" in text.replace("\n", "")

    def test_one_file_or_directory_can_be_meant(self, server):
        server.files["hub/org/llama/sub/a.bin"] = b"abc"
        found = ckpttools.verify_files(f"{HUB}/sub")
        assert (found.files, found.nbytes, found.equal) == (1, 3, True)
        server.stored[f"org/llama/{SHARD}"] = b"x" * len(server.files[f"hub/org/llama/{SHARD}"])
        assert [each.name for each in ckpttools.verify_files(f"{HUB}/{SHARD}").differences] == [SHARD]

    def test_large_files_are_read_in_blocks_and_bodies_that_break_off_go_on(self, server):
        server.files["hub/org/llama/large.safetensors"] = bytes(range(256)) * (9 << 12)
        server.fault("signed.*large", cut(1 << 20), 2)
        seen = []
        found = ckpttools.verify_files(
            f"{HUB}/large.safetensors",
            memory="200MiB",
            observe=lambda done, total: seen.append((done, total)),
        )
        assert found.equal and seen[0] == (0, 9 << 20) and seen[-1] == (9 << 20, 9 << 20)

    def test_an_error_of_the_network_is_no_difference(self, server):
        server.fault(f"signed.*{SHARD}", status(503), 99)
        assert ckpt("verify", HUB, "--no-progress").exit_code == 5

    def test_what_cannot_be_meant_is_refused(self, server, tmp_path):
        done = ended("verify", HUB, "--cast", "--per-layer", code=2)
        assert "--cast is about arrays" in done.output and "--against" in done.output
        with pytest.raises(UsageError, match="does not say what its files hold"):
            ckpttools.verify_files(tmp_path)
        with pytest.raises(UsageError) as caught:
            ckpttools.verify(HUB)
        assert "verify_files" in caught.value.hint
        with pytest.raises(MemoryBudgetError):
            ckpttools.verify_files(HUB, memory="100MiB")
        assert "is not there" in ended("verify", f"{HUB}/nothing", code=5).output
