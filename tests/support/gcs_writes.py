"""What the small object server takes: whole objects on conditions, uploads in parts, copies, deletions.

As Google Cloud Storage has it in its XML API; and, below `/azure`, as Azure Blob Storage does.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from support.gcs_server import Server

_UPLOADS = count(1)
_META = re.compile(r"x-(?:goog|ms)-meta-(.+)", re.IGNORECASE)


@dataclass
class Upload:
    """An upload in parts that is not complete."""

    bucket: str
    key: str
    meta: Mapping[str, str]
    parts: dict[str, bytes] = field(default_factory=dict)
    begun: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Answer:
    """A status, headers and a body."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""


def written(server: Server, handler: Any, bucket: str, key: str, query: Mapping[str, str]) -> Answer:
    """Does what a PUT, POST or DELETE asks for."""
    length = int(handler.headers.get("Content-Length") or 0)
    body = handler.rfile.read(length)
    if len(body) < length:
        raise ConnectionError("the client is gone")
    meta = {match[1]: value for name, value in handler.headers.items() if (match := _META.fullmatch(name))}
    with server.writing:
        return _Asked(server, bucket, key, query, handler.headers, body, meta).answer(handler.command)


@dataclass(frozen=True)
class _Asked:
    server: Server
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    meta: Mapping[str, str]

    def answer(self, method: str) -> Answer:
        if self.bucket not in self.server.buckets:
            return Answer(404, body="<Error><Code>NoSuchBucket</Code></Error>")
        if method == "DELETE":
            return self._deleted()
        if self.query.get("comp") == "batch":
            return self._batch()
        if method == "POST":
            return self._completed() if "uploadId" in self.query else self._begun()
        if "partNumber" in self.query:
            return self._part(self.query["uploadId"], self.query["partNumber"].zfill(6))
        if self.query.get("comp") == "block":
            upload = f"{self.bucket}/{self.key}"
            self.server.uploads.setdefault(upload, Upload(self.bucket, self.key, {}))
            return self._part(upload, self.query["blockid"])
        if "x-ms-version" in self.headers and not all(map(str.isidentifier, self.meta)):
            return Answer(400, body="<Error><Code>InvalidMetadata</Code></Error>")
        if not self._allowed():
            return Answer(412, body="<Error><Code>ConditionNotMet</Code></Error>")
        if self.query.get("comp") == "blocklist":
            return self._listed()
        source = self.headers.get("x-goog-copy-source") or self.headers.get("x-ms-copy-source")
        if source is None:
            return self._put(self.body, self.meta)
        bucket, _, key = unquote(urlsplit(source).path).removeprefix("/azure").strip("/").partition("/")
        result = self.server.buckets.get(bucket, {}).get(key)
        if result is None:
            return Answer(404, body="<Error><Code>NoSuchKey</Code></Error>")
        done = self._put(result.content, result.meta)
        return Answer(202 if "x-ms-copy-source" in self.headers else 200, done.headers, "<CopyObjectResult/>")

    def _allowed(self) -> bool:
        result = self.server.buckets[self.bucket].get(self.key)
        generation = self.headers.get("x-goog-if-generation-match")
        if generation is not None and int(generation) != (result.generation if result else 0):
            return False
        if self.headers.get("If-None-Match") == "*" and result:
            return False
        etag = self.headers.get("If-Match")
        return etag is None or (result is not None and result.etag == etag)

    def _put(self, content: bytes, meta: Mapping[str, str]) -> Answer:
        built = self.server.put(self.bucket, self.key, content, meta)
        date = "Mon, 01 Jan 2024 00:00:00 GMT"
        headers = {"ETag": built.etag, "x-goog-generation": str(built.generation), "Last-Modified": date}
        return Answer(201 if self.query or "x-ms-version" in self.headers else 200, headers)

    def _begun(self) -> Answer:
        name = f"upload{next(_UPLOADS)}"
        self.server.uploads[name] = Upload(self.bucket, self.key, self.meta)
        body = (
            f"<InitiateMultipartUploadResult><Bucket>{self.bucket}</Bucket><Key>{self.key}</Key>"
            f"<UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        )
        return Answer(body=body)

    def _part(self, upload: str, number: str) -> Answer:
        if upload not in self.server.uploads:
            return Answer(404, body="<Error><Code>NoSuchUpload</Code></Error>")
        self.server.uploads[upload].parts[number] = self.body
        return Answer(201 if "comp" in self.query else 200, {"ETag": f'"{number}"'})

    def _completed(self) -> Answer:
        upload = self.server.uploads.pop(self.query["uploadId"], None)
        if upload is None:
            return Answer(404, body="<Error><Code>NoSuchUpload</Code></Error>")
        content = b"".join(upload.parts[number] for number in sorted(upload.parts))
        built = self.server.put(self.bucket, self.key, content, upload.meta)
        body = (
            f"<CompleteMultipartUploadResult><Bucket>{self.bucket}</Bucket><Key>{self.key}</Key>"
            f"<ETag>{built.etag}</ETag></CompleteMultipartUploadResult>"
        )
        return Answer(headers={"x-goog-generation": str(built.generation)}, body=body)

    def _listed(self) -> Answer:
        upload = self.server.uploads.pop(f"{self.bucket}/{self.key}", None)
        names = re.findall(r"<(?:Uncommitted|Latest)>(.*?)</", self.body.decode())
        parts = upload.parts if upload else {}
        content = b"".join(parts[name] if name in parts else parts[_encoded(name)] for name in names)
        return self._put(content, self.meta)

    def _deleted(self) -> Answer:
        if "uploadId" in self.query:
            self.server.uploads.pop(self.query["uploadId"], None)
            return Answer(204)
        result = self.server.buckets[self.bucket].pop(self.key, None)
        is_azure = "x-ms-version" in self.headers
        if result is None:
            return Answer(404, body="<Error><Code>NoSuchKey</Code></Error>")
        return Answer(202 if is_azure else 204)

    def _batch(self) -> Answer:
        """Several deletions, as Azure has them: parts of one request, and of the answer."""
        numbers = re.findall(r"Content-ID: (\d+)", self.body.decode(), re.IGNORECASE)
        paths = re.findall(r"^DELETE (\S+) HTTP", self.body.decode(), re.MULTILINE)
        parts = ""
        for number, path in zip(numbers, paths, strict=True):
            key = unquote(urlsplit(path).path).removeprefix("/azure").strip("/").partition("/")[2]
            result = self.server.buckets[self.bucket].pop(key, None)
            status = "202 Accepted" if result else "404 The specified blob does not exist."
            parts += (
                f"--batch\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status}\r\nx-ms-version: 2023-11-03\r\n\r\n"
            )
        return Answer(202, {"Content-Type": "multipart/mixed; boundary=batch"}, f"{parts}--batch--\r\n")


def _encoded(name: str) -> str:
    return base64.b64encode(name.encode()).decode()
