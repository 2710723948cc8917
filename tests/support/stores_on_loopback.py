"""The stores of the web as a new process has them, before a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.constants
import pytest

import ckpttools
from ckpttools.stores.web import client as attempting
from ckpttools.stores.web import http as plain
from ckpttools.stores.web import hub
from ckpttools.stores.web.client import Client
from support.hub_server import Hub
from support.web_server import COMMIT, WebServer, hub_name

PATIENCE = attempting.Patience(attempts=4, first_wait=0.001)


def ask_only(server: WebServer, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Stores that know nothing yet, a hub at this server, nobody logged in and an empty cache."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{server.address}")
    template = f"http://{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub_cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no_token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for module in (plain, hub):
        built = type(module.STORE)()
        built.client = Client(PATIENCE)
        monkeypatch.setattr(module, "STORE", built)
    ckpttools.stores.registry._store.cache_clear()
    server.log.clear()


def forget(server: WebServer, files: dict[str, bytes]) -> None:
    """A server without faults that has these files, and stores that are asked for anew."""
    server.files, server.faults, server.gated = files, [], set()
    server.stored, server.hub = {}, Hub()
    server.ranges = server.etags = server.versions = True
    server.signed = server.expired = server.delay = server.most_at_once = server.nbytes = 0
    ckpttools.stores.registry._store.cache_clear()


@contextmanager
def asked_by_writer(server: WebServer, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[None]:
    """As `ask_only`, with a token that may write; what tests put on the server is removed at the end."""
    files = dict(server.files)
    ask_only(server, monkeypatch, home)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    yield
    forget(server, files)


def cached(cache: Path, model: Path, *names: str) -> Path:
    """Files of a model as huggingface_hub keeps them; the directory of their names."""
    root = cache / "models--org--llama"
    (folder := root / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for name in names:
        blob = root / "blobs" / hub_name(name, content := (model / name).read_bytes())
        blob.write_bytes(content)
        (folder / name).symlink_to(f"../../blobs/{blob.name}")
    return folder
