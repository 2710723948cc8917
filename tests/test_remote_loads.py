"""`ckpttools.load` of stores behind a network, onto eight devices: the bits, and no byte too many."""

from __future__ import annotations

import pytest
from support.object_stores import files_in
from support.places import GOLDEN
from support.scripts import answers
from support.web_server import web_server

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"
MESH = {"rules": "maxtext", "mesh": "fsdp=4,tensor=2"}


@pytest.fixture
def results(gcs, tmp_path, monkeypatch):
    """By name of the store and by what is loaded; and what the web server has sent."""
    model, run = (str(gcs.filled(files_in(each))) for each in (SHARDED, MAXTEXT))
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
        asked = [(place, str(local), options) for place, local, options in jobs.values()]
        said = dict(zip(jobs, answers("remote_loads_script", asked, tmp_path), strict=True))
        return said, web.nbytes


def test_bits_are_the_same_and_no_byte_is_fetched_twice(results):
    results, sent = results
    needed = 0
    for (scheme, what), said in results.items():
        assert said["scheme"] == scheme and said["differing"] == [], (what, said)
        fetched = sum(said["fetched"].values())
        if what == "run":
            # Compressed, and small chunks have come with the index.
            assert 0 < fetched <= said["planned"] < said["needed"], (scheme, said)
            continue
        assert said["planned"] == said["needed"] > 0, (scheme, what, said)
        if scheme == "hf":
            needed += said["needed"]
        else:
            assert fetched == said["needed"], (scheme, what, said)
    # What the hub and the other web server sent: headers, documents and lists beside it.
    needed += results["http", "model"]["needed"]
    assert needed <= sent < 1.2 * needed, (needed, sent)
