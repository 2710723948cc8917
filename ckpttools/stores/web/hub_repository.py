"""Write to a repository on the Hub: checks, uploads of large files to its storage, and one commit.

The storage identifies large files by their SHA-256. Files are not in any repository until a commit refers to
them, and uploaded files do not need to be sent again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import StorageError, first_line
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.web.client import (
    FAILURES,
    LONGEST_STORING,
    Client,
    describe_failure,
    release_connection,
    without_secrets,
)
from ckpttools.stores.web.hub_errors import (
    AbsentError,
    Answer,
    HubRequest,
    read_error,
    refuse_untrusted,
    trust_certificates,
    write_error,
)

_LARGEST_ANSWER = 64 << 20
SAMPLE_BYTES = 512
"""Size of the sample by which the Hub detects text files, in bytes."""
_FILES_PER_REQUEST = 256
# Number of checks whether a commit was made despite an error.
_MAX_COMMIT_CHECKS = 3
_LFS = {"Accept": "application/vnd.git-lfs+json", "Content-Type": "application/vnd.git-lfs+json"}
_JSON = {"Content-Type": "application/json"}


class BusyError(StorageError):
    """The storage is busy and may accept the file later."""


class RepositoryHead(NamedTuple):
    """The state of a revision.

    Attributes:
        commit: The commit hash.
        is_private: Whether the repository is private.
    """

    commit: str
    is_private: bool


class Blob(NamedTuple):
    """A file to write.

    Attributes:
        size: Size in bytes.
        sha256: SHA-256 digest in hexadecimal digits.
        sample: The first bytes.
        content: The complete content of a small file.
    """

    size: int
    sha256: str
    sample: bytes
    content: bytes | None = None

    @classmethod
    def of(cls, content: bytes) -> Blob:
        return cls(len(content), hashlib.sha256(content).hexdigest(), content[:SAMPLE_BYTES], content)


class CommitTarget(NamedTuple):
    """The upload addresses of a large file.

    Attributes:
        parts: URL and size in bytes of each part, in order.
        headers: Headers of the upload requests.
        complete: URL to call after the last part; "" for a single part, which needs no call.
        verify: URL to verify the upload; "" if none is needed.
    """

    parts: tuple[tuple[str, int], ...]
    headers: Mapping[str, str]
    complete: str
    verify: str


@dataclass(frozen=True)
class Repository:
    """A repository that one process writes to.

    Attributes:
        client: Sends requests.
        endpoint: Address of the Hub.
        repo: org/name.
        revision: Name of a branch.
        headers: Returns the authorization headers for a URL.
        location: Name of the repository in messages.
    """

    client: Client
    endpoint: str
    repo: str
    revision: str
    headers: Callable[[str], Mapping[str, str]]
    location: str

    @property
    def page(self) -> str:
        return f"{without_secrets(self.endpoint)}/{self.repo}"

    # -- state of the repository

    def head(self) -> RepositoryHead | None:
        """Return the state of the revision; None if the repository does not exist or is hidden from the user.

        Raises:
            StorageError: The Hub does not respond, or the revision does not exist.
        """
        try:
            response = self._request_json("GET", f"{self._api}/revision/{self._revision}", activity="look at")
        except AbsentError as error:
            if "revision" in error.raw.message:
                raise
            return None
        return RepositoryHead(str(response.get("sha", "")), bool(response.get("private")))

    def latest(self) -> str:
        """Return the message of the last commit; "" if there is none."""
        response = self._request_json(
            "GET", f"{self._api}/commits/{self._revision}?limit=1", activity="look at"
        )
        last = (
            response[0] if isinstance(response, list) and response and isinstance(response[0], dict) else {}
        )
        return f"{last.get('title', '')}\n{last.get('message', '')}"

    @property
    def missing_revision_error(self) -> StorageError:
        """Return the error for a branch that does not exist."""
        return read_error(self._new_request, Answer(404, "", {"X-Error-Code": "RevisionNotFound"}))

    # -- before the commit

    def check_writable(self) -> None:
        """Raise StorageError if the user may not write; uses the request that comes first anyway."""
        self.are_large({"config.json": Blob.of(b"{}")})

    def create(self, *, private: bool) -> None:
        """Create the repository, unless it has been created in the meantime.

        Raises:
            StorageError: The repository cannot be created.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        trust_certificates()
        try:
            HfApi(endpoint=self.endpoint).create_repo(self.repo, private=private, exist_ok=False)
        except HfHubHTTPError as error:
            response = error.response
            if response.status_code != 409:
                text = error.server_message or ""
                reply = Answer(response.status_code, response.reason_phrase, response.headers, text)
                raise write_error(self._new_request, reply, "create") from error
        except Exception as error:  # The HTTP library of `huggingface_hub` can raise anything.
            refuse_untrusted(error, self.location)
            raise StorageError(f"cannot create {self.location}", got=first_line(error)) from error

    def are_large(self, files: Mapping[str, Blob]) -> Mapping[str, bool]:
        """Return which files belong in the storage for large files rather than in the commit.

        Args:
            files: Blobs by path. Blobs without `content` are always large.

        Raises:
            StorageError: The Hub does not respond, or the user may not write.
        """
        result: dict[str, bool] = {}
        names = list(files)
        for start in range(0, len(names), _FILES_PER_REQUEST):
            requests = [
                _preupload_request(name, files[name]) for name in names[start : start + _FILES_PER_REQUEST]
            ]
            response = self._request_json(
                "POST", f"{self._api}/preupload/{self._revision}", {"files": requests}
            )
            for item in response.get("files", ()):
                result[str(item.get("path"))] = item.get("uploadMode") == "lfs"
        return {
            name: blob.content is None or (blob.size > 0 and result.get(name, False))
            for name, blob in files.items()
        }

    def target(self, path: str, blob: Blob) -> CommitTarget | None:
        """Return the upload addresses of a large file; None if the storage already has it.

        Raises:
            StorageError, NoSpaceError: The file is refused.
        """
        question = {
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": [{"oid": blob.sha256, "size": blob.size}],
            "hash_algo": "sha256",
            "ref": {"name": self.revision},
        }
        url = f"{self.endpoint}/{self.repo}.git/info/lfs/objects/batch"
        response = self._request_json("POST", url, question, _LFS, subject=path)
        try:
            (result,) = response["objects"]
            if error := result.get("error"):
                reply = Answer(int(error.get("code", 422)), "", {}, str(error.get("message", "")))
                raise write_error(
                    self._new_request._replace(location=f"{self.location}/{path}"), reply, "upload"
                )
            actions = result.get("actions") or {}
            return _target(actions, blob.size) if "upload" in actions else None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._not_understood(path) from error

    def put(self, path: str, blob: Blob) -> None:
        """Upload a large file from memory if the storage lacks it; same errors as `target`."""
        target = self.target(path, blob)
        if target is None:
            return
        assert blob.content is not None
        attempts, tags, position = self.client.attempts(f"{self.location}/{path}", "upload"), [], 0
        for url, nbytes in target.parts:
            part = blob.content[position : position + nbytes]
            response = self.client.request("PUT", url, target.headers, attempts, part)
            tags.append(self.checked(path, response))
            position += nbytes
        self.complete(path, blob, target, tags)

    def checked(self, path: str, response: Any) -> str:
        """Check the response to an uploaded part and return its ETag.

        Raises:
            BusyError: The storage is busy.
            StorageError, NoSpaceError: The part was refused.
        """
        text = _text(response)
        if response.status >= 500 or response.status in (408, 429):
            got = Answer(response.status, response.reason or "", response.headers, text).declared
            hint = f"{retry_term()} later: uploaded files are not sent again"
            raise BusyError(f"cannot upload {self.location}/{path}", got=got, hint=hint)
        if response.status not in (200, 201, 204):
            reply = Answer(response.status, response.reason or "", response.headers, text)
            raise write_error(self._new_request._replace(location=f"{self.location}/{path}"), reply, "upload")
        return str(response.headers.get("ETag", ""))

    def complete(self, path: str, blob: Blob, target: CommitTarget, tags: Iterable[str]) -> None:
        """Complete the upload of a large file after all parts; same errors as `target`."""
        if target.complete:
            parts = [{"partNumber": number, "etag": tag} for number, tag in enumerate(tags, 1)]
            self._request_json("POST", target.complete, {"oid": blob.sha256, "parts": parts}, _LFS, path)
        if target.verify:
            self._request_json("POST", target.verify, {"oid": blob.sha256, "size": blob.size}, subject=path)

    # -- the commit

    def commit(
        self,
        parent: str,
        title: str,
        text: str,
        *,
        small: Mapping[str, bytes],
        large: Mapping[str, Blob],
        deleted: Collection[str],
    ) -> str:
        """Commit all files at once, if the revision is unchanged.

        Args:
            parent: The expected commit of the revision.
            title, text: Title and text of the commit message; the text must be unique.
            small, large, deleted: Files by path.

        Returns:
            The commit hash; "" if the Hub did not return it.

        Raises:
            ConflictError: The revision has changed.
            StorageError, NoSpaceError: There is no commit.
        """
        header = {"summary": title, "description": text, "parentCommit": parent}
        lines: list[dict[str, object]] = [{"key": "header", "value": header}]
        lines += [{"key": "deletedFile", "value": {"path": path}} for path in sorted(deleted)]
        lines += [
            {
                "key": "file",
                "value": {"path": path, "content": base64.b64encode(data).decode(), "encoding": "base64"},
            }
            for path, data in sorted(small.items())
        ]
        lines += [
            {
                "key": "lfsFile",
                "value": {"path": path, "algo": "sha256", "oid": item.sha256, "size": item.size},
            }
            for path, item in sorted(large.items())
        ]
        body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        url = f"{self._api}/commit/{self._revision}"
        try:
            response = self._request_json(
                "POST", url, body, {"Content-Type": "application/x-ndjson"}, activity="commit to"
            )
        except StorageError:
            # The commit may exist although its response was lost, or it may appear a little later.
            if not self._was_committed(text):
                raise
            response = {}
        return str(response.get("commitOid") or "")

    def _was_committed(self, text: str) -> bool:
        """Return whether the last commit has this text, as far as the Hub responds."""
        for attempt in range(_MAX_COMMIT_CHECKS):
            time.sleep(attempt * 4 * self.client.patience.first_wait)
            with suppress(StorageError):
                if text in self.latest():
                    return True
        return False

    # -- requests

    @property
    def _api(self) -> str:
        return f"{self.endpoint}/api/models/{self.repo}"

    @property
    def _revision(self) -> str:
        return quote(self.revision, safe="")

    @property
    def _new_request(self) -> HubRequest:
        has_token = bool(self.headers(self.endpoint))
        return HubRequest(self.location, self.repo, self.revision, self.page, has_token)

    def _request_json(
        self,
        method: str,
        url: str,
        question: object = None,
        headers: Mapping[str, str] = _JSON,
        subject: str = "",
        activity: str = "upload",
    ) -> Any:
        """Send a request and return the JSON response; {} if it is empty."""
        body = (
            question if isinstance(question, bytes) else json.dumps(question).encode() if question else None
        )
        location = f"{self.location}/{subject}" if subject else self.location
        attempts = self.client.attempts(location, activity)
        while True:
            heads = {**headers, **self.headers(url)}
            response = self.client.request(method, url, heads, attempts, body, stall=LONGEST_STORING)
            try:
                text = _text(response)
                break
            except FAILURES as error:
                attempts.failed(describe_failure(error, self.client.patience))
        if not 200 <= response.status < 300:
            reply = Answer(response.status, response.reason or "", response.headers, text)
            raise write_error(self._new_request._replace(location=location), reply, activity)
        try:
            return json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            if activity in ("upload", "commit to"):
                return {}
            raise self._not_understood(subject) from error

    def _not_understood(self, subject: str) -> StorageError:
        return StorageError(
            f"cannot upload {self.location}/{subject}",
            got="a malformed response",
            hint="check HF_ENDPOINT",
        )


def _preupload_request(path: str, blob: Blob) -> dict[str, object]:
    return {"path": path, "sample": base64.b64encode(blob.sample).decode(), "size": blob.size}


def _target(actions: Mapping[str, Any], size: int) -> CommitTarget:
    """Parse the upload addresses in the response to a batch request; raises parsing errors."""
    upload, verify = actions["upload"], actions.get("verify") or {}
    headers, url = upload.get("header") or {}, str(upload["href"])
    checked = str(verify.get("href", ""))
    if "chunk_size" not in headers:
        return CommitTarget(((url, size),), {name: str(text) for name, text in headers.items()}, "", checked)
    length = int(headers["chunk_size"])
    addresses = [str(headers[number]) for number in sorted(filter(str.isdigit, headers), key=int)]
    sizes = [min(length, size - start) for start in range(0, size, length)]
    return CommitTarget(tuple(zip(addresses, sizes, strict=True)), {}, url, checked)


def _text(response: Any) -> str:
    with release_connection(response):
        body: bytes = response.read(_LARGEST_ANSWER)
        return body.decode(errors="replace")
