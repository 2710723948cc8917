"""Checkpoints written to the hub: what is sent, what shows, what is not sent again, and what goes wrong."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import huggingface_hub.constants
import pytest
from support.command_line import ckpt, ended, run, succeed
from support.hf_models import write_llama
from support.internals import parse
from support.locations import GOLDEN
from support.object_stores import files_in
from support.stores_on_loopback import asked_by_writer
from support.web_server import COMMIT, Fault, status, web_server

import ckpttools
from ckpttools import CheckpointError, NoSpaceError, SourceChangedError, StorageError
from ckpttools.stores.web import hub_data_files
from ckpttools.stores.web.hub_data_files import KEPT_BYTES, HubDataFiles

HF = GOLDEN / "llama3.1" / "hf"
LARGE = random.Random(0).randbytes(KEPT_BYTES + 1_234_567)


@pytest.fixture(scope="module")
def server():
    with web_server() as web:
        web.add("hub/org/llama", HF)
        yield web


@pytest.fixture(autouse=True)
def fresh(server, monkeypatch, tmp_path):
    with asked_by_writer(server, monkeypatch, tmp_path):
        yield


def sent(server) -> list[str]:
    """What went to storage."""
    return server.asked("^PUT /storage")


def hang_up(handler) -> None:
    """Close the connection in the middle of a body."""
    handler.rfile.read(2_000_000)
    handler.connection.close()
    raise ConnectionAbortedError


class TestDataFiles:
    """What sends files while they are made, without a plan."""

    @pytest.fixture
    def files(self, server):
        server.hub.private["me/new"] = True
        staging = parse("hf://me/new").store.staging("me/new", False, lambda: None)
        head = {"a.safetensors": b"head"}
        return HubDataFiles(staging.repository, "", {"a.safetensors": len(LARGE) + 100}, head)

    def built(self, files, content=LARGE, again=None, piece=700_000) -> list[bool]:
        """Writes a group as a worker does; whether each pass was a rehearsal, as it says at its end."""
        result = []
        with closing(files.write_passes(0)) as sinks:
            for number, sink in enumerate(sinks):
                now = content if not number or again is None else again
                for start in range(0, len(now), piece):
                    sink.write("a.safetensors", 10 + start, memoryview(now)[start : start + piece], 0)
                result.append(sink.is_dry_pass)
        return result

    @property
    def whole(self) -> bytes:
        return b"head" + b"\0" * 6 + LARGE + b"\0" * 90

    @pytest.mark.parametrize("chunk", [None, 1 << 20, len(LARGE) + 100])
    def test_upload_reads_bytes_for_digest_and_for_transfer(self, server, files, chunk):
        server.hub.chunk = chunk
        assert self.built(files) == [True, False]
        assert list(server.hub.objects.values()) == [self.whole]
        assert len(sent(server)) == (1 if chunk is None else -(-len(self.whole) // chunk))
        assert files.large["a.safetensors"].size == len(self.whole) and not files.small

    def test_stored_objects_are_not_sent_again(self, server, files):
        self.built(files)
        server.log.clear()
        assert self.built(files) == [True] and not sent(server)

    def test_small_files_are_built_once_and_kept(self, server, files):
        files.sizes, files.heads = {}, {}
        assert self.built(files, LARGE[:1000]) == [True]
        assert list(server.hub.objects.values()) == [b"\0" * 10 + LARGE[:1000]]
        with closing(files.write_passes(1)) as sinks:
            for sink in sinks:
                sink.write_whole("chunk/0.0", b"abc")
                assert sink.append("d/x", 10**9, b"de") == ("d/x-00001", 0)
                assert sink.append("d/x", 10**9, b"f") == ("d/x-00001", 2)
        assert files.small == {"chunk/0.0": b"abc", "d/x-00001": b"def"}

    @pytest.mark.parametrize(
        ("act", "chunk"), [(status(500), None), (status(503), 1 << 20), (status(429), None)]
    )
    def test_rejected_upload_is_sent_again(self, server, files, act, chunk):
        server.hub.chunk = chunk
        server.fault("PUT /storage", act, 2)
        passes = self.built(files)
        assert len(passes) > 2 and all(passes[2:]), "what watches sees nothing twice"
        assert list(server.hub.objects.values()) == [self.whole]

    def test_upload_survives_broken_connection(self, server, files):
        server.fault("PUT /storage", hang_up, 1)
        assert len(self.built(files)) == 3
        assert list(server.hub.objects.values()) == [self.whole]

    def test_upload_fails_after_three_tries(self, server, files):
        server.fault("PUT /storage", status(500), 99)
        with pytest.raises(StorageError, match=r"cannot upload hf://me/new/a\.safetensors") as caught:
            self.built(files)
        assert "500" in caught.value.got and caught.value.got.endswith(", tried 3 times")
        assert "not sent again" in caught.value.hint
        assert len(sent(server)) == 3

    @pytest.mark.parametrize("act", [hang_up, status(408), status(429), status(503)])
    def test_upload_errors_name_number_of_tries(self, server, files, act):
        server.fault("PUT /storage", act, 99)
        with pytest.raises(StorageError, match="cannot upload") as caught:
            self.built(files)
        assert caught.value.got.endswith(", tried 3 times"), caught.value

    def test_upload_refuses_content_that_changed(self, server, files):
        with pytest.raises(SourceChangedError, match="content changed when it was produced"):
            self.built(files, again=LARGE[:-1] + b"x")
        assert server.hub.objects == {}

    def test_full_hub_storage_is_reported_immediately(self, server, files):
        server.hub.full = 1000
        with pytest.raises(NoSpaceError, match="has no space left") as caught:
            self.built(files)
        assert "storage limit reached" in caught.value.got and not sent(server)

    def test_abandoned_upload_leaves_nothing(self, server, files):
        with pytest.raises(KeyError), closing(files.write_passes(0)) as sinks:
            for sink in sinks:
                sink.write("a.safetensors", 10, memoryview(LARGE), 0)
                if not sink.is_dry_pass:
                    raise KeyError
        assert server.hub.objects == {}

    def test_files_without_tasks_have_only_a_header(self, server, files):
        files.sizes = {"b.safetensors": 6}
        files.heads = {"b.safetensors": b"hhhh"}
        files.write_heads()
        assert list(server.hub.objects.values()) == [b"hhhh\0\0"]

    @pytest.mark.parametrize("body", [b"not JSON", b"{}", b'{"objects": [{"actions": {"upload": {}}}]}'])
    def test_invalid_hub_answer_is_reported(self, server, files, body):
        server.fault("objects/batch", lambda handler: (200, {}, body))
        with pytest.raises(CheckpointError, match="cannot upload") as caught:
            self.built(files)
        assert "HF_ENDPOINT" in caught.value.hint


ITEM = GOLDEN / "llama3.1" / "maxtext_scanned"
NEW = "hf://me/new"


def names(server, repo: str = "me/new") -> set[str]:
    start = f"hub/{repo}/"
    return {name.removeprefix(start) for name in server.files if name.startswith(start)}


def contents(server, directory, repo: str = "me/new") -> None:
    """The repository has what the directory has."""
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert names(server, repo) - {".gitattributes", "README.md"} == there
    assert all(server.files[f"hub/{repo}/{name}"] == (directory / name).read_bytes() for name in there)


@pytest.fixture
def streamed(monkeypatch):
    """Files of a few kilobytes are sent as those of gigabytes are."""
    monkeypatch.setattr(hub_data_files, "KEPT_BYTES", 1000)


@pytest.mark.usefixtures("streamed")
class TestCommands:
    def test_uploaded_model_equals_local_output(self, server, tmp_path):
        options = "--like", HF, "--max-shard-size", "100kB"
        run("convert", "maxtext-to-hf", ITEM, tmp_path / "local", *options)
        text = run("convert", "maxtext-to-hf", ITEM, NEW, *options)
        assert NEW in text and server.hub.private["me/new"] is True
        contents(server, tmp_path / "local")
        assert len(server.hub.commits["me/new"]) == 1 and len(sent(server)) >= 4
        assert run("verify", NEW)
        run("verify", NEW, "--against", tmp_path / "local")

    @pytest.mark.parametrize("to", ["safetensors", "orbax", "zarr3"])
    def test_every_format_can_be_uploaded(self, server, tmp_path, to):
        run("convert", f"to-{to}", HF, tmp_path / "local")
        run("convert", f"to-{to}", HF, NEW)
        assert run("hash", NEW).split()[0] == run("hash", tmp_path / "local").split()[0]
        run("convert", f"to-{to}", HF, f"{NEW}/below", "--overwrite")
        assert run("hash", f"{NEW}/below").split()[0] == run("hash", tmp_path / "local").split()[0]

    def test_too_many_small_files_are_refused(self, server, monkeypatch):
        monkeypatch.setattr(hub_data_files, "_MAX_SMALL_BYTES", 1_000)
        result = ckpt("convert", "to-zarr3", HF, NEW, "--no-progress")
        assert result.exit_code == 2, result.output
        assert "small files" in result.output and "safetensors" in result.output
        assert not server.hub.commits.get("me/new")
        run("convert", "to-safetensors", HF, NEW)

    def test_upload_writes_nothing_to_disk(self, server, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run("convert", "to-safetensors", "hf://org/llama", NEW)
        assert not list(tmp_path.rglob("*.safetensors*"))

    def test_public_option_creates_public_repository(self, server):
        run("convert", "to-safetensors", HF, NEW, "--public")
        assert server.hub.private["me/new"] is False
        assert "README.md" not in names(server)

    def test_model_card_names_base_model(self, server):
        run("convert", "to-safetensors", "hf://org/llama", NEW, "--model-card")
        card = server.files["hub/me/new/README.md"].decode()
        assert "base_model: org/llama" in card and "# new" in card and "org/llama@c0ffee" in card
        run("convert", "to-safetensors", HF, "hf://me/other", "--model-card")
        assert str(HF) not in server.files["hub/me/other/README.md"].decode()

    def test_model_card_names_the_like_model(self, server, tmp_path):
        where = run("convert", "maxtext-to-hf", ITEM, NEW, "--like", "hf://org/llama", "--model-card")
        card = server.files["hub/me/new/README.md"].decode()
        assert "base_model: org/llama\n" in card and "Converted by ckpttools.\n" in card
        commit = server.hub.head("me/new")
        assert f"http://{server.address}/me/new: private, commit {commit}" in where

    @pytest.mark.parametrize("command", [("copy", HF), ("convert", "to-safetensors", HF)])
    def test_output_reports_repository_url_and_commit(self, server, command):
        told = ended(*command, NEW, "--public", "--json").stdout
        page = {"url": f"http://{server.address}/me/new", "is_private": False}
        assert json.loads(told)["published"] == {**page, "commit": server.hub.head("me/new")}
        assert "public, commit" in run(*command, "hf://me/other", "--public")

    @pytest.mark.parametrize("to", ["hf-to-maxtext", "to-safetensors", "to-orbax", "to-zarr3"])
    def test_output_records_source_commit(self, server, tmp_path, to):
        """The same bytes wherever and whenever, and the same arrays as of a model on a disk."""
        for name in ("first", "second"):
            run("convert", to, "hf://org/llama", tmp_path / name)
        first, second = (
            {path: re.sub(rb'_nsecs": [0-9]+', b"", item) for path, item in files_in(tmp_path / name).items()}
            for name in ("first", "second")
        )
        assert first == second
        declared = succeed("inspect", "tree", tmp_path / "first").output
        assert re.search(f"made of +hf://org/llama@{COMMIT}\n", declared)
        run("convert", to, HF, tmp_path / "local")
        assert run("hash", tmp_path / "local").split()[0] == run("hash", tmp_path / "first").split()[0]
        assert "made of" not in succeed("inspect", "tree", tmp_path / "local").output

    def test_source_commit_survives_later_commands(self, server, tmp_path):
        run("convert", "hf-to-maxtext", "hf://org/llama", tmp_path / "made")
        run("unstack", tmp_path / "made", tmp_path / "changed")
        assert f"hf://org/llama@{COMMIT}" in succeed("inspect", "tree", tmp_path / "changed").output

    def test_python_calls_accept_hub_names(self, server, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert ckpttools.hf_to_maxtext("org/llama", "made").source == f"hf://org/llama@{COMMIT}"
        assert ckpttools.maxtext_to_hf(ITEM, "back", like="org/llama").arrays
        assert ckpttools.convert("org/llama", "any", format="zarr3").source == f"hf://org/llama@{COMMIT}"
        declared = run("convert", "maxtext-to-hf", ITEM, "again", "--like", "org/llama")
        assert "org/llama is not a local directory; using hf://org/llama" in declared
        with pytest.raises(StorageError, match="org/llama does not exist"):
            ckpttools.convert(Path("org/llama"), "no", format="zarr3")

    def test_existing_repository_is_replaced_only_with_overwrite(self, server, tmp_path):
        run("convert", "to-safetensors", HF, NEW, "--max-shard-size", "100kB")
        before = dict(server.files)
        done = ended("convert", "to-safetensors", HF, NEW, "--dtype", "float32", code=2)
        assert "already has files" in done.output and "--overwrite" in done.output
        assert server.files == before
        server.files["hub/me/new/README.md"] = b"mine"
        run("convert", "to-safetensors", HF, NEW, "--dtype", "float32", "--overwrite")
        run("convert", "to-safetensors", HF, tmp_path / "local", "--dtype", "float32")
        contents(server, tmp_path / "local")
        assert server.files["hub/me/new/README.md"] == b"mine"

    def test_dry_run_writes_nothing_to_the_hub(self, server):
        assert NEW in run("convert", "to-safetensors", HF, NEW, "--dry-run")
        assert not server.asked("^(POST|PUT)")

    def test_upload_refuses_invalid_revision(self, server):
        run("convert", "to-safetensors", HF, NEW)
        for revision, code in (("v9", 2), ("c0ffee" + "0" * 34, 2), ("refs/pr/1", 2)):
            done = ended("convert", "to-safetensors", HF, f"{NEW}@{revision}", "--overwrite", code=code)
            assert revision in done.output


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub's own requests
def test_test_server_accepts_huggingface_hub_requests(server):
    """What these tests prove is worth as much as that server is like the hub."""
    api = huggingface_hub.HfApi(endpoint=f"http://{server.address}")
    api.create_repo("me/new", private=True)
    files = {"config.json": b"{}", "model.safetensors": LARGE}

    def commit(parent):
        adds = [huggingface_hub.CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit("me/new", adds, commit_message="x", parent_commit=parent)

    for chunk in (None, 1 << 20):
        server.hub.chunk = chunk
        parent = api.repo_info("me/new", revision="main").sha
        commit(parent)
        assert run("verify", NEW)
        server.hub.objects.clear()
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="412"):
        commit(parent)


@pytest.mark.usefixtures("streamed")
class TestStopped:
    def test_uploaded_files_are_not_sent_again(self, server, tmp_path):
        words = "convert", "to-safetensors", HF, NEW, "--max-shard-size", "100kB", "--jobs", "1"
        server.fault("PUT /storage", lambda handler: None, 2)
        server.fault("PUT /storage", status(403), 1)
        ended(*words, code=5)
        assert names(server) == {".gitattributes"} and not server.hub.commits
        before = set(server.hub.objects)
        assert len(before) == 2
        server.log.clear()
        run(*words)
        assert not [line for line in sent(server) if any(oid in line for oid in before)]
        run("convert", "to-safetensors", HF, tmp_path / "local", "--max-shard-size", "100kB")
        contents(server, tmp_path / "local")

    def test_rerun_after_commit_sends_nothing(self, server):
        words = "convert", "to-safetensors", HF, NEW
        run(*words)
        server.log.clear()
        assert "were done before" in run(*words)
        assert not server.asked("^(POST|PUT)") and len(server.hub.commits["me/new"]) == 1

    def test_commit_survives_lost_response(self, server):
        def lose(handler):
            handler.answer()
            return 502, {}, b""

        server.fault("POST .*/commit/", lose, 1)
        run("convert", "to-safetensors", HF, NEW)
        assert len(server.hub.commits["me/new"]) == 1

    def test_upload_refuses_commit_after_another_writer(self, server):
        def write_first(handler):
            if not server.hub.commits:
                server.hub.commits["me/new"] = [("d" * 40, "other", "")]

        server.fault("POST .*/commit/", write_first, 1)
        done = ended("convert", "to-safetensors", HF, NEW, code=5)
        assert "was changed during the upload: nothing was committed" in done.output
        assert names(server) == {".gitattributes"}

    def test_refused_commit_is_reported_if_history_is_unreadable(self, server):
        def write_first(handler):
            server.hub.commits["me/new"] = [("d" * 40, "other", "")]
            server.fault("GET .*/commits/", status(403), 9)

        server.fault("POST .*/commit/", write_first, 1)
        done = ended("convert", "to-safetensors", HF, NEW, code=5)
        assert "was changed during the upload: nothing was committed" in done.output

    def test_manifest_includes_files_not_sent_again(self, server, tmp_path):
        words = "convert", "to-safetensors", HF, NEW, "--max-shard-size", "100kB", "--manifest"
        run(*words, tmp_path / "first.json")
        server.hub.commits.clear()
        for name in names(server):
            del server.files[f"hub/me/new/{name}"]
        run(*words, tmp_path / "second.json")
        assert (tmp_path / "first.json").read_text() == (tmp_path / "second.json").read_text()
        run("verify", NEW, "--manifest", tmp_path / "second.json")

    def test_resent_arrays_are_in_the_manifest_once(self, server, tmp_path):
        write_llama(tmp_path / "model", vocab_size=40_000)
        server.hub.chunk = 1 << 20
        server.fault("PUT /storage/.*/2$", status(500), 1)
        words = "--jobs", "16", "--max-shard-size", "5MB", "--manifest", tmp_path / "out.json"
        run("convert", "to-safetensors", tmp_path / "model", NEW, *words)
        run("hash", tmp_path / "model", "--manifest", tmp_path / "expected.json")
        out, expected = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("out", "expected"))
        assert out["digest"] == expected["digest"]
        run("verify", NEW, "--manifest", tmp_path / "out.json")

    def test_killed_upload_leaves_repository_unchanged(self, server, tmp_path):
        write_llama(tmp_path / "model", vocab_size=40_000)
        words = "convert", "to-safetensors", tmp_path / "model", NEW, "--max-shard-size", "6MB", "--jobs", "1"
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://{server.address}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpttools", *map(str, words)], env=environment, stderr=subprocess.DEVNULL
        )
        server.fault("PUT /storage", lambda handler: None, 1)
        server.fault("PUT /storage", lambda handler: process.kill(), 1)
        assert process.wait() == -signal.SIGKILL
        assert names(server) == {".gitattributes"} and len(server.hub.objects) >= 1
        (first, *_) = server.hub.objects
        server.log.clear()
        run(*words)
        assert not [line for line in sent(server) if first in line]
        run("verify", NEW, "--against", tmp_path / "model")


class TestRefusals:
    @pytest.mark.parametrize(
        ("prepare", "code", "told"),
        [
            (lambda web, set: set(""), 5, ["no token", "settings/tokens", "hf auth login"]),
            (lambda web, set: set("hf_other"), 5, ["does not accept the token", "401", "settings/tokens"]),
            (lambda web, set: web.hub.tokens.update(hf_write="you/"), 5, ["write access to", "403", "me"]),
            (
                lambda web, set: setattr(web.hub, "full", 1000),
                4,
                ["has no space left", "storage limit", "not sent again"],
            ),
            (lambda web, set: web.fault("repos/create", status(500), 99), 5, ["cannot create", "500"]),
            (lambda web, set: web.fault("/preupload/", status(500), 99), 5, ["cannot upload", "500"]),
        ],
        ids=["no token", "bad token", "not mine", "full", "down", "down later"],
    )
    def test_upload_failures_are_explained(self, server, monkeypatch, prepare, code, told):
        prepare(server, lambda token: monkeypatch.setenv("HF_TOKEN", token))
        done = ended("convert", "to-safetensors", HF, NEW, code=code)
        assert all(item in done.output for item in told), done.output
        assert not server.hub.commits and not server.hub.objects

    def test_missing_write_permission_is_refused_before_reading(self, server):
        server.hub.tokens["hf_write"] = "you/"
        server.hub.private["me/new"] = True
        done = ended("convert", "to-safetensors", HF, NEW, code=5)
        assert "403" in done.output and not server.asked("batch|PUT")

    def test_repository_visibility_is_not_changed(self, server):
        server.hub.private |= {"me/new": False, "me/private": True}
        done = ended("convert", "to-safetensors", HF, NEW, code=2)
        assert "is already public" in done.output and "--public" in done.output
        done = ended("convert", "to-safetensors", HF, "hf://me/private", "--public", code=2)
        assert "is already private" in done.output and "settings" in done.output
        run("convert", "to-safetensors", HF, NEW, "--public")

    def test_public_upload_refuses_gated_repository(self, server):
        server.gated = {"org/llama"}
        done = ended("convert", "to-safetensors", HF, "hf://org/llama", "--public", "--overwrite", code=5)
        assert "is gated" in done.output

    def test_upload_refuses_source_as_destination(self, server):
        for option in ((), ("--public",)):
            done = ended(
                "cast",
                "hf://org/llama",
                "hf://org/llama",
                "--dtype",
                "float32",
                "--overwrite",
                *option,
                code=2,
            )
            assert "DST is SRC itself" in done.output

    def test_invalid_names_are_refused(self, server, tmp_path):
        assert "does not name a model" in ended("convert", "to-safetensors", HF, "hf://new", code=2).output
        for option in ("--public", "--model-card"):
            done = ended("convert", "to-safetensors", HF, tmp_path / "out", option, code=2)
            assert f"{option} applies only to repositories on the Hub" in done.output

    def test_offline_upload_sends_no_request(self, server, monkeypatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        done = ended("convert", "to-safetensors", HF, NEW, code=5)
        assert "HF_HUB_OFFLINE" in done.output and server.log == []

    def test_existing_model_card_is_not_replaced(self, server):
        server.hub.private["me/new"] = True
        server.files["hub/me/new/README.md"] = b"mine"
        done = ended("convert", "to-safetensors", HF, NEW, "--model-card", code=2)
        assert "already has a README.md" in done.output


class TestCopies:
    @pytest.mark.parametrize("verify", [False, True])
    def test_model_copy_is_one_commit(self, server, tmp_path, verify):
        model = tmp_path / "model"
        write_llama(model, vocab_size=40_000)
        done = []
        report = ckpttools.copy(model, NEW, verify=verify, observe=lambda nbytes, total: done.append(nbytes))
        assert done == sorted(done) and done[-1] == report.bytes
        assert names(server) == {".gitattributes", *(item.name for item in model.iterdir())}
        (part,) = report.parts
        assert part.bytes_verified == (part.bytes if verify else 0)
        run("verify", NEW, "--against", model)
        assert ckpttools.copy(model, NEW).files == 0 and len(server.hub.commits["me/new"]) == 1

    def test_copy_warns_about_public_repository(self, server):
        server.hub.private["me/new"] = False
        server.files["hub/me/new/README.md"] = b"mine"
        assert "add --public" in ended("copy", HF, NEW, code=2).output
        run("copy", HF, NEW, "--public")
        assert server.files["hub/me/new/README.md"] == b"mine"
        assert "applies only to" in ended("copy", HF, "out", "--public", code=2).output

    def test_run_copy_has_one_commit_per_step(self, server, tmp_path):
        run("convert", "hf-to-maxtext", HF, tmp_path / "run")
        assert [part.name for part in ckpttools.copy(tmp_path / "run", NEW).parts] == ["0"]
        assert ckpttools.copy(NEW, tmp_path / "back").files
        run("verify", tmp_path / "back", "--against", tmp_path / "run")

    def test_single_files_of_a_run_are_refused_before_uploading(self, server, tmp_path):
        run("convert", "hf-to-maxtext", HF, tmp_path / "run")
        (tmp_path / "run" / "config.yml").write_text("steps: 1")
        done = ended("copy", tmp_path / "run", NEW, code=2)
        assert "config.yml" in done.output and not sent(server) and "me/new" not in server.hub.commits


class TestNames:
    """Of a listing, such as git cannot have."""

    @pytest.mark.parametrize("name", ["./config.json", "a//config.json", "d/."])
    def test_misspelled_hub_files_are_reported_missing(self, server, tmp_path, name):
        server.files[f"hub/org/llama/{name}"] = b"evil"
        run("copy", "hf://org/llama", tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(HF)

    def test_copy_accepts_names_the_cache_refuses(self, server, tmp_path):
        server.files["hub/org/llama/a\\..\\b"] = b"fine"
        run("copy", "hf://org/llama", tmp_path / "out")
        assert (tmp_path / "out" / "a\\..\\b").read_bytes() == b"fine"
        assert "3 files" in run("verify", "hf://org/llama")

    def test_invalid_listing_is_not_treated_as_empty(self, server):
        body = b'{"error": "try again later"}'
        server.faults = [Fault("tree/", lambda handler: (200, {}, body))]
        done = ckpt("convert", "to-safetensors", HF, "hf://org/llama")
        assert done.exit_code == 5 and "not a listing" in done.output, done.output
