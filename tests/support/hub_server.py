"""The part of the hub on loopback that takes uploads: repositories, storage for large files, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[int, dict[str, str], bytes]
FIRST = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What repositories are beside their files, and what storage has.

    Attributes:
        private: those that are, by name; whoever is not in here is public, or not there if it has no files.
        commits: those after the first, the latest last: name, title, text.
        objects: large files, by their SHA-256.
        large: files by path on the server, which are such.
        tokens: those that may write, and where: to names that begin so.
        chunk: bytes of a part; None for files in one part.
        full: bytes that storage takes; None for any number.
        parts: of large files that come in several, by digest and number.
        put: bytes that came to storage.
    """

    private: dict[str, bool] = field(default_factory=dict)
    commits: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    tokens: dict[str, str] = field(default_factory=lambda: {"hf_write": ""})
    chunk: int | None = None
    full: int | None = None
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    put: int = 0

    def head(self, repo: str) -> str:
        return self.commits[repo][-1][0] if self.commits.get(repo) else FIRST

    def names(self, repo: str) -> set[str]:
        """All that revisions of it may be called."""
        return {FIRST, "main", "refs/pr/1", *(name for name, _, _ in self.commits.get(repo, ()))}


def error(status: int, text: str, code: str = "") -> Answer:
    return status, {"X-Error-Code": code} if code else {}, json.dumps({"error": text}).encode()


def taken(web: Any, method: str, path: str, headers: Any, body: bytes) -> Answer:
    """The answer to what is no GET."""
    hub: Hub = web.hub
    if match := re.fullmatch(r"storage/([0-9a-f]{64})(?:/(\d+))?", path):
        assert "Authorization" not in headers, "a token is for the hub alone"
        return stored(hub, match[1], match[2], body)
    if match := re.fullmatch(r"complete/([0-9a-f]{64})", path):
        return completed(hub, match[1], json.loads(body))
    where = hub.tokens.get(headers.get("Authorization", "").removeprefix("Bearer "))
    if where is None:
        return error(401, "Invalid credentials")
    if path == "api/repos/create":
        return created(web, json.loads(body), where)
    if match := re.fullmatch(r"verify/([0-9a-f]{64})", path):
        return (200, {}, b"{}") if match[1] in hub.objects else error(404, "no such object")
    match = re.fullmatch(
        r"(?:api/models/)?([^/]+/[^/]+?)(?:\.git)?/(preupload|commit|info/lfs/objects)/(.+)", path
    )
    if not match:
        return error(404, "Not here")
    repo, question, _ = match.groups()
    if repo not in hub.private and not web.names(f"hub/{repo}"):
        return error(404, "Repository not found", "RepoNotFound")
    if not repo.startswith(where):
        return error(403, "Forbidden: pass a token with write access to this repository")
    if question == "preupload":
        files = [
            {"path": load["path"], "uploadMode": mode(load), "shouldIgnore": False}
            for load in json.loads(body)["files"]
        ]
        return 200, {}, json.dumps({"files": files}).encode()
    if question == "commit":
        return committed(web, repo, body)
    return batch(web, json.loads(body))


def mode(file: dict[str, Any]) -> str:
    return "lfs" if file["path"].endswith(".safetensors") or file["size"] > 100_000 else "regular"


def created(web: Any, declared: dict[str, Any], where: str) -> Answer:
    repo = f"{declared['organization']}/{declared['name']}"
    if not repo.startswith(where):
        return error(403, "You don't have the rights to create a model under this namespace")
    if repo in web.hub.private or web.names(f"hub/{repo}"):
        return error(409, "You already created this model repo")
    web.hub.private[repo] = declared.get("visibility") == "private" or bool(declared.get("private"))
    web.files[f"hub/{repo}/.gitattributes"] = b"*.safetensors filter=lfs\n"
    return 200, {}, json.dumps({"url": f"http://{web.address}/{repo}", "id": "x"}).encode()


def batch(web: Any, declared: dict[str, Any]) -> Answer:
    hub: Hub = web.hub
    port = web.address.partition(":")[2]
    result = []
    for item in declared["objects"]:
        oid, size = item["oid"], item["size"]
        if oid in hub.objects:
            result.append(item)
            continue
        if hub.full is not None and hub.put + size > hub.full:
            result.append(
                {**item, "error": {"code": 403, "message": "Private repository storage limit reached"}}
            )
            continue
        upload: dict[str, Any] = {"href": f"http://localhost:{port}/storage/{oid}"}
        if hub.chunk:
            count = -(-size // hub.chunk)
            parts = {
                f"{number:05}": f"http://localhost:{port}/storage/{oid}/{number}"
                for number in range(1, count + 1)
            }
            upload = {
                "href": f"http://{web.address}/complete/{oid}",
                "header": {"chunk_size": str(hub.chunk), **parts},
            }
        actions = {"upload": upload, "verify": {"href": f"http://{web.address}/verify/{oid}"}}
        result.append({**item, "authenticated": True, "actions": actions})
    return 200, {}, json.dumps({"transfer": "basic", "objects": result}).encode()


def stored(hub: Hub, oid: str, number: str | None, body: bytes) -> Answer:
    hub.put += len(body)
    if number is not None:
        hub.parts[oid, int(number)] = body
        return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
    assert hashlib.sha256(body).hexdigest() == oid, "storage got other bytes than were said"
    hub.objects[oid] = body
    return 200, {}, b""


def completed(hub: Hub, oid: str, declared: dict[str, Any]) -> Answer:
    parts = [hub.parts.pop((oid, item["partNumber"])) for item in declared["parts"]]
    tags = [f'"{hashlib.md5(part).hexdigest()}"' for part in parts]
    assert tags == [item["etag"] for item in declared["parts"]]
    hub.objects[oid] = b"".join(parts)
    assert hashlib.sha256(hub.objects[oid]).hexdigest() == oid
    return 200, {}, b"{}"


def committed(web: Any, repo: str, body: bytes) -> Answer:
    hub: Hub = web.hub
    lines = [json.loads(line) for line in body.splitlines()]
    header = lines[0]["value"]
    if header.get("parentCommit") not in (None, hub.head(repo)):
        return error(412, "A commit has happened since. Please refresh and try again.")
    for line in lines[1:]:
        value = line["value"]
        file = f"hub/{repo}/{value['path']}"
        hub.large.discard(file)
        if line["key"] == "deletedFile":
            del web.files[file]
        elif line["key"] == "file":
            web.files[file] = base64.b64decode(value["content"])
        else:
            hub.large.add(file)
            web.files[file] = hub.objects[value["oid"]]
    name = hashlib.sha1(body + hub.head(repo).encode()).hexdigest()
    hub.commits.setdefault(repo, []).append((name, header["summary"], header.get("description", "")))
    declared = {"commitOid": name, "commitUrl": f"http://{web.address}/{repo}/commit/{name}", "success": True}
    return 200, {}, json.dumps(declared).encode()
