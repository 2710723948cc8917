"""`ckpttools.load` of stores behind a network, onto eight devices: the bits, and no byte too many."""

from __future__ import annotations

import pytest
from support.locations import GOLDEN
from support.object_stores import files_in
from support.scripts import answers
from support.web_server import web_server

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"
MESH = {"rules": "maxtext", "mesh": "fsdp=4,tensor=2"}


@pytest.fixture
def results(gcs, tmp_path, monkeypatch):
    """By name of the store and by what is loaded; and what the web server has sent."""
    model, run = (str(gcs.filled(files_in(item))) for item in (SHARDED, MAXTEXT))
    with web_server() as web:
        web.add("llama", SHARDED)
        web.add("hub/org/llama", SHARDED)
        monkeypatch.setenv("HF_ENDPOINT", f"http://{web.address}")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        jobs = {
            ("gs", "model"): (model, SHARDED, {"to": "maxtext", **MESH}),
            ("gs", "run"): (run, MAXTEXT, MESH),
            ("http", "model"): (f"http://{web.address}/llama", SHARDED, {"to": "maxtext", **MESH}),
            ("hf", "model"): ("hf://org/llama", SHARDED, {"to": "maxtext", **MESH}),
            ("hf", "names"): ("hf://org/llama", SHARDED, MESH),
        }
        asked = [(location, str(local), options) for location, local, options in jobs.values()]
        declared = dict(zip(jobs, answers("remote_loads_script", asked, tmp_path), strict=True))
        return declared, web.nbytes


def test_remote_loads_are_exact_and_fetch_no_byte_twice(results):
    results, sent = results
    needed = 0
    for (scheme, what), declared in results.items():
        assert declared["scheme"] == scheme and declared["differing"] == [], (what, declared)
        fetched = sum(declared["fetched"].values())
        if what == "run":
            # Compressed, and small chunks have come with the index.
            assert 0 < fetched <= declared["planned"] < declared["needed"], (scheme, declared)
            continue
        assert declared["planned"] == declared["needed"] > 0, (scheme, what, declared)
        if scheme == "hf":
            needed += declared["needed"]
        else:
            assert fetched == declared["needed"], (scheme, what, declared)
    # What the hub and the other web server sent: headers, documents and lists beside it.
    needed += results["http", "model"]["needed"]
    assert needed <= sent < 1.2 * needed, (needed, sent)
