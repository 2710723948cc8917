"""The JSON API of the small Google Cloud Storage, as far as tensorstore asks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from support.gcs_server import Object, Server

_OBJECTS = re.compile(r"(?:upload/|download/)?storage/v1/b/([^/]+)/o(?:/([^/]+))?")


def is_asked(path: str) -> bool:
    """Whether a path, still quoted, is one of this API."""
    return _OBJECTS.fullmatch(path.lstrip("/")) is not None


def answer(
    server: Server, method: str, path: str, query: Mapping[str, str], body: bytes, content_range: str = ""
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers; of an object's content all of it, from which the server cuts ranges.

    Args:
        server: what has the objects.
        method, path, query, body: of the request; the path still quoted, since keys have slashes.
        content_range: which bytes of an upload in pieces these are.
    """
    match = _OBJECTS.fullmatch(path.lstrip("/"))
    assert match is not None
    bucket = unquote(match[1])
    key = unquote(match[2] or query.get("name", "")) or _said_name(query, body)
    objects = server.buckets.get(bucket)
    if objects is None:
        return _refused(404, "The specified bucket does not exist.")
    if method == "GET" and not match[2]:
        return _json(_listed(bucket, objects, query, server.page))
    if query.get("uploadType") == "resumable":
        return _sent(server, bucket, key, query, body, content_range)
    with server.writing:
        result = objects.get(key)
        expected = query.get("ifGenerationMatch")
        if expected is not None and int(expected) != (result.generation if result else 0):
            return _refused(412, "At least one of the pre-conditions did not hold.")
        if method == "POST":
            return _json(_resource(bucket, key, server.put(bucket, key, body)))
        if result is None:
            return _refused(404, "No such object.")
        if method == "DELETE":
            del objects[key]
            return 204, b"", {}
    if query.get("ifGenerationNotMatch") == str(result.generation):
        return 304, b"", {}
    if query.get("alt") == "media":
        headers = {"x-goog-generation": str(result.generation), "ETag": result.etag}
        return 200, result.content, {**headers, "Content-Type": "application/octet-stream"}
    return _json(_resource(bucket, key, result))


def _said_name(query: Mapping[str, str], body: bytes) -> str:
    """The key of an upload in pieces, which its first request may have in its body."""
    return json.loads(body)["name"] if query.get("uploadType") == "resumable" and body else ""


def _sent(
    server: Server, bucket: str, key: str, query: Mapping[str, str], body: bytes, content_range: str
) -> tuple[int, bytes, dict[str, str]]:
    """An upload in pieces: its first request says where the others go, its last one makes the object."""
    if "upload_id" not in query:
        there = (
            f"{server.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id=1&name={quote(key)}"
        )
        return 200, b"", {"Location": there}
    pieces = server.pieces.setdefault((bucket, key), bytearray())
    pieces += body
    whole = content_range.rpartition("/")[2]
    if whole == "*" or (whole and len(pieces) < int(whole)):
        return 308, b"", {"Range": f"bytes=0-{len(pieces) - 1}"}
    with server.writing:
        return _json(_resource(bucket, key, server.put(bucket, key, bytes(server.pieces.pop((bucket, key))))))


def _listed(
    bucket: str, objects: Mapping[str, Object], query: Mapping[str, str], limit: int
) -> Mapping[str, Any]:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    first, last = query.get("pageToken") or query.get("startOffset", ""), query.get("endOffset")
    keys = sorted(
        key for key in objects if key.startswith(prefix) and first <= key and (last is None or key < last)
    )
    page, rest = keys[:limit], keys[limit:]
    below = {key: key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "") for key in page}
    return {
        "kind": "storage#objects",
        "items": [_resource(bucket, key, objects[key]) for key, (_, cut, _) in below.items() if not cut],
        "prefixes": sorted({f"{prefix}{name}{cut}" for name, cut, _ in below.values() if cut}),
        **({"nextPageToken": rest[0]} if rest else {}),
    }


def _resource(bucket: str, key: str, result: Object) -> Mapping[str, Any]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": key,
        "size": str(len(result.content)),
        "generation": str(result.generation),
        "etag": result.etag,
        "metadata": dict(result.meta),
    }


def _json(content: Mapping[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}


def _refused(status: int, message: str) -> tuple[int, bytes, dict[str, str]]:
    _, body, headers = _json({"error": {"code": status, "message": message}})
    return status, body, headers
