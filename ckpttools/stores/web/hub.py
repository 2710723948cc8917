"""Models on the Hugging Face Hub: hf://org/name[@revision][/path].

A process resolves a revision to a commit once and uses this commit until it ends, so later pushes cannot lead
to a mix of two versions.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, urlsplit

from urllib3.response import BaseHTTPResponse

from ckpttools.core.errors import CheckpointError, FormatError, MissingPathError, StorageError, UsageError
from ckpttools.core.text import matches_any
from ckpttools.stores.base import DirEntry, File, Status, is_inside
from ckpttools.stores.contents import Content, Contents
from ckpttools.stores.costs import Streams
from ckpttools.stores.fetching import Observe
from ckpttools.stores.sharing import RepositoryOptions
from ckpttools.stores.web.client import resolve_redirect, without_secrets
from ckpttools.stores.web.file import WebFile, WebStore
from ckpttools.stores.web.hub_cache import (
    CachedFile,
    Entry,
    ExpectedFile,
    Snapshot,
    cached_file,
    cached_snapshot,
    fetch,
    note_revision,
)
from ckpttools.stores.web.hub_data_files import MEMORY
from ckpttools.stores.web.hub_errors import AbsentError, Answer, HubRequest, read_error
from ckpttools.stores.web.hub_name import COMMIT, HubName
from ckpttools.stores.web.hub_repository import Repository
from ckpttools.stores.web.listing import is_plain, is_text

if TYPE_CHECKING:
    from types import ModuleType

    from typing_extensions import Buffer

    from ckpttools.stores.web.hub_staging import HubStaging

_LARGEST_ANSWER = 64 << 20
_MAX_PAGES = 1000
# Weights are fetched explicitly; the other files that a command reads are small.
_WEIGHTS = ".safetensors"
_REPOSITORY_FILES = (".*", "README.md", "LICENSE*", "NOTICE*")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubFile(WebFile):
    """A file on the Hub, read from its local copy once it has been fetched."""

    __slots__ = ()
    store: HubStore

    @property
    def local_copy(self) -> str:
        copy = self.store.cached.get(self.key)
        return copy.local_copy if copy else ""

    def read_into(self, offset: int, out: Buffer) -> None:
        copy = self.store.cached.get(self.key)
        if copy is None:
            super().read_into(offset, out)
        else:
            copy.read_into(offset, out)

    def check_unchanged(self) -> None:
        copy = self.store.cached.get(self.key)
        if copy is not None:
            copy.check_unchanged()


class HubStore(WebStore):
    """Repositories on the Hub, using `huggingface_hub`'s endpoint, token, cache and offline mode.

    Attributes:
        cached: Files that this process has fetched into the cache, by key.
    """

    scheme: ClassVar[str] = "hf"
    is_named_by_content: ClassVar[bool] = True
    # After an interruption, a file is produced and sent again from its start.
    streams: ClassVar[Streams | None] = Streams(MEMORY, file_bytes=400 << 20, files=5, is_readable=False)

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[str, CachedFile] = {}
        self._decode_fault: set[str] = set()
        self._sharing = RepositoryOptions()
        self._lock = threading.Lock()
        self._snapshots: dict[tuple[str, str], Snapshot] = {}

    # -- Store

    def stat(self, key: str) -> Status | None:
        try:
            name = HubName.of(key)
            return self._snapshot(name).status(name.path)
        # The search for the run of a step also looks at the parents of a repository.
        except (UsageError, AbsentError):
            return None

    def absence_reason(self, key: str) -> CheckpointError:
        """Return the error for a missing repository, revision or file, with the page that lists files."""
        try:
            name = HubName.of(key)
            hint = f"its files are listed at {self._page(name)}/tree/{self._snapshot(name).commit}"
        except CheckpointError as error:
            return error
        return MissingPathError(f"{self.uri(key)} does not exist", hint=hint)

    def write_alternative(self, key: str) -> str:
        return f"write to a local file, then: hf upload {'/'.join(key.split('/')[:2])} FILE"

    def list(self, key: str) -> Iterable[DirEntry]:
        name = HubName.of(key)
        result = self._snapshot(name).names.get(name.path)
        if result is None:
            got = "a file" if name.path in self._snapshot(name).files else "it does not exist"
            raise StorageError(f"cannot list {self.uri(key)}", got=got)
        return [DirEntry(item, kind) for item, kind in result.items()]

    def walk(self, key: str) -> Iterator[tuple[str, Status]]:
        """See `SupportsWalk`. The listing contains all names."""
        return ((path, entry.status) for path, entry in self._iter_below(key))

    def _iter_below(self, key: str) -> Iterator[tuple[str, Entry]]:
        self.list(key)
        name = HubName.of(key)
        start = f"{name.path}/" if name.path else ""
        for path, entry in self._snapshot(name).files.items():
            if path.startswith(start):
                yield path[len(start) :], entry

    def contents(self, key: str) -> Contents:
        """See `SupportsContents`. Large files have a SHA-256, others a git blob ID."""
        name = HubName.of(key)
        snapshot = self._snapshot(name)
        file = snapshot.files.get(name.path)
        if name.path not in (*snapshot.files, *snapshot.names):
            raise self.absence_reason(key)
        files = {"": file} if file else dict(self._iter_below(key))
        unnamed = next((path for path, item in files.items() if not _DIGEST.fullmatch(item.version)), None)
        if unnamed is not None:
            raise StorageError(
                f"the content of {self.uri(key)} is not declared",
                location=unnamed,
                got="HF_HUB_OFFLINE is set, and the cache has files without digests",
                hint="unset it",
            )
        declared = "the cache's listing" if _constants().HF_HUB_OFFLINE else "the Hub's listing"
        return Contents(declared, {path: Content(item.size, item.version) for path, item in files.items()})

    def open(self, key: str, status: Status | None = None) -> File:
        name = HubName.of(key)
        snapshot = self._snapshot(name)
        entry = snapshot.files.get(name.path)
        if entry is None:
            got = "a directory" if name.path in snapshot.names else "it does not exist"
            hint = f"its files are listed at {self._page(name)}/tree/{snapshot.commit}"
            raise FormatError(f"cannot inspect {self.uri(key)}", got=got, hint=hint)
        copy = self._copy(key, entry)
        if copy is None and not name.path.endswith(_WEIGHTS):
            self._decode_fault.add(key)
        return copy or HubFile(self, key, entry.size, entry.version)

    def _copy(self, key: str, entry: Entry) -> CachedFile | None:
        name = HubName.of(key)
        return cached_file(self.uri(key), name.repo, name.path, self._snapshot(name).commit, entry)

    def fetch(self, files: Sequence[File], observe: Observe) -> None:
        """See `SupportsFetch`. Fills the `huggingface_hub` cache, also with other files except weights."""
        read = {file.key for file in files if isinstance(file, HubFile)}
        repos = {HubName.of(key).repo for key in read}
        keys = read | {key for key in self._decode_fault if HubName.of(key).repo in repos}
        self._find_copies(keys)
        expected = [self._expected_file(key) for key in sorted(keys - self.cached.keys())]
        if expected and _constants().HF_HUB_OFFLINE:
            raise StorageError(
                f"{expected[0].location} is not in the cache",
                got="HF_HUB_OFFLINE is set, so no request was sent",
                hint="unset it",
            )
        if expected:
            fetch(
                expected,
                self._endpoint,
                lambda item, answer: read_error(self._new_request(item.key), answer),
                observe,
            )
            self._find_copies(keys)
        for name in {HubName.of(key)._replace(path="") for key in keys}:
            if not COMMIT.fullmatch(name.revision) and not _constants().HF_HUB_OFFLINE:
                note_revision(name.repo, name.revision or "main", self._snapshot(name).commit)

    def _find_copies(self, keys: Iterable[str]) -> None:
        result = {key: self._copy(key, self._entry(key)) for key in keys if key not in self.cached}
        self.cached |= {key: copy for key, copy in result.items() if copy}

    def _entry(self, key: str) -> Entry:
        name = HubName.of(key)
        return self._snapshot(name).files[name.path]

    def _expected_file(self, key: str) -> ExpectedFile:
        name, entry = HubName.of(key), self._entry(key)
        commit = self._snapshot(name).commit
        return ExpectedFile(
            key, self.uri(key), name.repo, name.path, commit, Content(entry.size, entry.version)
        )

    def absolute(self, key: str) -> str:
        """Return the key with its revision's commit, which unfinished conversions record as their source."""
        try:
            name = HubName.of(key)
            at = f"{name.repo}@{self._snapshot(name).commit}"
        except (UsageError, AbsentError):
            return key
        return f"{at}/{name.path}" if name.path else at

    def pinned_uri(self, key: str) -> str | None:
        """See `SupportsPinning`."""
        result = self.absolute(key)
        return None if result == key and not COMMIT.fullmatch(HubName.of(key).revision) else self.uri(result)

    # -- WebStore

    def url(self, key: str) -> str:
        name = HubName.of(key)
        commit = self._snapshot(name).commit
        return f"{self._endpoint}/{name.repo}/resolve/{commit}/{quote(name.path)}"

    def headers(self, url: str) -> Mapping[str, str]:
        """Return the token only for the Hub: signed addresses elsewhere contain their own authorization."""
        hub, target = urlsplit(self._endpoint), urlsplit(url)
        token = _token() if (hub.scheme, hub.netloc) == (target.scheme, target.netloc) else None
        return {"Authorization": f"Bearer {token}"} if token else {}

    def check_response(self, file: WebFile, response: BaseHTTPResponse) -> None:
        linked = response.headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"')
        if linked and linked != file.version:
            raise file.changed(linked)

    def refusal(self, key: str, response: BaseHTTPResponse) -> CheckpointError:
        return read_error(
            self._new_request(key), Answer(response.status, response.reason or "", response.headers)
        )

    def _new_request(self, key: str) -> HubRequest:
        name = HubName.of(key)
        page = self._page(name)
        return HubRequest(self.uri(key), name.repo, name.revision, page, bool(self.headers(self._endpoint)))

    # -- writing

    def shared(self, sharing: RepositoryOptions) -> HubStore:
        """See `SupportsSharing`."""
        result = copy(self)
        result._sharing = sharing
        return result

    def staging(self, key: str, overwrite: bool, check_replaced: Callable[[], None]) -> HubStaging:
        """See `SupportsPublishing`."""
        from ckpttools.stores.web.hub_staging import HubStaging

        name = HubName.of(key)
        repository = Repository(
            self.client, self._endpoint, name.repo, name.revision or "main", self.headers, self.uri(key)
        )
        return HubStaging(self, key, name, repository, overwrite, check_replaced, self._sharing)

    def is_of_repository(self, path: str) -> bool:
        """See `SupportsSharing`."""
        name = path.rpartition("/")[2]
        return matches_any(name, _REPOSITORY_FILES)

    def unfinished(self, key: str) -> None:
        """See `SupportsPublishing`. Nothing is visible before it is complete."""

    def find_unfinished(self, key: str) -> None:
        """See `SupportsPublishing`. Parts uploaded by an interrupted conversion are not in any repository."""

    @property
    def is_offline(self) -> bool:
        return bool(_constants().HF_HUB_OFFLINE)

    def files_at(self, repo: str, commit: str) -> Iterable[str]:
        """Return the paths of all files in a repository at a commit; same errors as `list`."""
        return self._snapshot(HubName(repo, commit, "")).files

    def forget_repository(self, repo: str) -> None:
        """Discard the cached commits of a repository after a new commit."""
        with self._lock:
            for snapshot in [known for known in self._snapshots if known[0] == repo]:
                del self._snapshots[snapshot]

    # -- snapshots

    def _snapshot(self, name: HubName) -> Snapshot:
        """Return all files of a revision, pinned to its commit.

        Raises:
            StorageError: The repository or revision does not exist, or the Hub does not respond.
        """
        known = name.repo, name.revision
        with self._lock:
            if known not in self._snapshots:
                result = self._find_snapshot(name)
                self._snapshots[known] = self._snapshots[name.repo, result.commit] = result
            return self._snapshots[known]

    def _find_snapshot(self, name: HubName) -> Snapshot:
        if _constants().HF_HUB_OFFLINE:
            return cached_snapshot(name.repo, name.revision or "main")
        commit = name.revision
        if not COMMIT.fullmatch(commit):
            revision = quote(name.revision or "main", safe="")
            declared, _ = self._request_json(
                name, f"{self._endpoint}/api/models/{name.repo}/revision/{revision}"
            )
            commit = str(declared.get("sha")) if isinstance(declared, dict) else ""
        url: str | None = f"{self._endpoint}/api/models/{name.repo}/tree/{commit}?recursive=true"
        files: dict[str, Entry] = {}
        for _ in range(_MAX_PAGES):
            if url is None:
                return Snapshot(commit, files)
            declared, url = self._request_json(name, url)
            if not isinstance(declared, list):
                raise StorageError(
                    f"cannot list {self.uri(name.repo)}",
                    got="a response that is not a listing",
                    hint="check HF_ENDPOINT",
                )
            for item in declared:
                path = str(item.get("path")) if isinstance(item, dict) else ""
                if is_inside(path) and is_plain(path) and is_text(path) and item.get("type") == "file":
                    files[path] = _entry(item)
        raise StorageError(f"cannot list {self.uri(name.repo)}", got=f"more than {_MAX_PAGES} pages")

    def _request_json(self, name: HubName, url: str) -> tuple[Any, str | None]:
        """Request JSON from the Hub's API; return it with the URL of the next page."""
        location = self._page(name)
        response, _, body = self.client.whole(
            url, self.headers, self.client.attempts(location), limit=_LARGEST_ANSWER
        )
        if response.status != 200:
            at = f"@{name.revision}" if name.revision else ""
            raise self.refusal(name.repo + at, response)
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise StorageError(
                f"cannot read {location}", got="a response that is not JSON", hint="check HF_ENDPOINT"
            ) from error
        return document, _next_page(url, response)

    def _page(self, name: HubName) -> str:
        return f"{without_secrets(self._endpoint)}/{name.repo}"

    @property
    def _endpoint(self) -> str:
        return str(_constants().ENDPOINT)


def _constants() -> ModuleType:
    """Import the settings of `huggingface_hub`, which are read from the environment."""
    from huggingface_hub import constants

    return constants


def _token() -> str | None:
    """Return the user's token as found by `huggingface_hub`; None if there is none to send.

    Raises:
        StorageError: The token cannot be obtained.
    """
    from huggingface_hub import get_token

    try:
        return None if _constants().HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    except Exception as error:  # Renewing a token can fail in any way.
        raise StorageError("cannot get the token for the Hub", got=error, hint="`hf auth login`") from error


def _entry(declared: Mapping[str, Any]) -> Entry:
    """Parse a listed file: large files have a SHA-256, others a git blob ID."""
    large = declared.get("lfs")
    of = large if isinstance(large, dict) else declared
    size = of.get("size")
    return Entry(size if isinstance(size, int) else 0, str(of.get("oid", "")))


def _next_page(url: str, response: BaseHTTPResponse) -> str | None:
    """Return the URL in the response header `Link: <…>; rel="next"`."""
    for link in response.headers.get("Link", "").split(","):
        address, _, relation = link.partition(";")
        if 'rel="next"' in relation:
            return resolve_redirect(url, address.strip().strip("<>"), url)
    return None


STORE = HubStore()
