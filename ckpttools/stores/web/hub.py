"""Models on the Hugging Face Hub: hf://org/name[@revision][/path].

A revision is the commit that it names when a process first looks at it, until that process ends: whatever
is pushed meanwhile, nothing is read of two states.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from urllib3.response import BaseHTTPResponse

from ckpttools.core.errors import CheckpointError, FormatError, StorageError, UsageError
from ckpttools.stores.base import DirEntry, File, Status, is_inside
from ckpttools.stores.contents import Content, Contents
from ckpttools.stores.web.client import joined, status_text
from ckpttools.stores.web.file import WebFile, WebStore
from ckpttools.stores.web.hub_cache import cached_file, cached_snapshot
from ckpttools.stores.web.listing import is_text
from ckpttools.stores.web.snapshot import Entry, Snapshot

if TYPE_CHECKING:
    from types import ModuleType

_LARGEST_ANSWER = 64 << 20
_MOST_PAGES = 1000
_COMMIT_DIGITS = frozenset("0123456789abcdef")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# What the hub takes for a name of an organisation or model.
_HUB_NAME = re.compile(r"(?!.*(?:--|\.\.|\.git$))\w(?:[\w.-]{0,94}\w)?", re.ASCII)
# What hf:// names elsewhere and is no model.
_OTHERS = frozenset(("datasets", "spaces", "buckets", "kernels", "models"))


class _Name(NamedTuple):
    """The parts of a key.

    Attributes:
        repo: org/name.
        revision: as it was written; "" where none was.
        path: in the repository; "" for all of it.
    """

    repo: str
    revision: str
    path: str

    @classmethod
    def of(cls, key: str) -> _Name:
        """
        Raises:
            UsageError: it names no repository.
        """
        org, _, rest = key.partition("/")
        named, _, path = rest.partition("/")
        name, at, revision = named.partition("@")
        is_named = _HUB_NAME.fullmatch(org) and _HUB_NAME.fullmatch(name) and org not in _OTHERS
        if not is_named or (at and not revision):
            raise UsageError(
                f"hf://{key} names no model",
                got=f"something else of the hub: {org}" if org in _OTHERS else None,
                wanted="hf://org/name, hf://org/name@revision or hf://org/name/path",
                hint="look up the model's name on its page",
            )
        if revision == "refs" and path.count("/") >= 1:
            kind, number, *below = path.split("/", 2)
            revision, path = f"refs/{kind}/{number}", "".join(below)
        return cls(f"{org}/{name}", unquote(revision), path)


class _AbsentError(StorageError):
    """There is no such repository or revision, as far as whoever asks may know."""


class HubStore(WebStore):
    """Repositories of the hub; endpoint, token, cache and offline mode are those of `huggingface_hub`."""

    scheme: ClassVar[str] = "hf"
    is_named_by_content: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._snapshots: dict[tuple[str, str], Snapshot] = {}

    # -- the store

    def stat(self, key: str) -> Status | None:
        try:
            name = _Name.of(key)
            return self._snapshot(name).status(name.path)
        # What is above a repository is looked at as well by who looks for the run that a step is of.
        except (UsageError, _AbsentError):
            return None

    def why_absent(self, key: str) -> CheckpointError:
        """That there is no such repository or revision, or where its files are listed."""
        try:
            name = _Name.of(key)
            hint = f"its files are listed at {self._page(name)}/tree/{self._snapshot(name).commit}"
        except CheckpointError as error:
            return error
        return StorageError(f"{self.spelled(key)} is not there", hint=hint)

    def instead_of_writing(self, key: str) -> str:
        return f"write to a local directory, then: hf upload {'/'.join(key.split('/')[:2])} DIRECTORY"

    def list(self, key: str) -> Iterable[DirEntry]:
        name = _Name.of(key)
        found = self._snapshot(name).names.get(name.path)
        if found is None:
            got = "a file" if name.path in self._snapshot(name).files else "nothing of this name"
            raise StorageError(f"cannot list {self.spelled(key)}", got=got)
        return [DirEntry(each, kind) for each, kind in found.items()]

    def walk(self, key: str) -> Iterator[tuple[str, Status]]:
        """See `Walks`: the listing has all names."""
        return ((path, entry.status) for path, entry in self._below(key))

    def _below(self, key: str) -> Iterator[tuple[str, Entry]]:
        self.list(key)
        name = _Name.of(key)
        start = f"{name.path}/" if name.path else ""
        for path, entry in self._snapshot(name).files.items():
            if path.startswith(start):
                yield path[len(start) :], entry

    def contents(self, key: str) -> Contents:
        """See `ListsContents`: large files are listed by their SHA-256, others as git names them."""
        name = _Name.of(key)
        snapshot = self._snapshot(name)
        alone = snapshot.files.get(name.path)
        if name.path not in (*snapshot.files, *snapshot.names):
            raise self.why_absent(key)
        files = {"": alone} if alone else dict(self._below(key))
        unnamed = next((path for path, each in files.items() if not _DIGEST.fullmatch(each.version)), None)
        if unnamed is not None:
            raise StorageError(
                f"nothing says what {self.spelled(key)} has to hold",
                place=unnamed,
                got="HF_HUB_OFFLINE is set, and a cache that keeps files without their digests",
                hint="unset it",
            )
        said = "what the cache says of itself" if _constants().HF_HUB_OFFLINE else "what the hub lists"
        return Contents(said, {path: Content(each.size, each.version) for path, each in files.items()})

    def open(self, key: str, found: Status | None = None) -> File:
        name = _Name.of(key)
        snapshot = self._snapshot(name)
        entry = snapshot.files.get(name.path)
        if entry is None:
            got = "a directory" if name.path in snapshot.names else "nothing of this name"
            hint = f"its files are listed at {self._page(name)}/tree/{snapshot.commit}"
            raise FormatError(f"cannot look at {self.spelled(key)}", got=got, hint=hint)
        cached = cached_file(self.spelled(key), name.repo, name.path, snapshot.commit, entry)
        return cached or WebFile(self, key, entry.size, entry.version)

    def absolute(self, key: str) -> str:
        """With the commit that the revision is: what an unfinished conversion notes as its source."""
        try:
            name = _Name.of(key)
        except UsageError:
            return key
        at = f"{name.repo}@{self._snapshot(name).commit}"
        return f"{at}/{name.path}" if name.path else at

    # -- requests for files

    def url(self, key: str) -> str:
        name = _Name.of(key)
        commit = self._snapshot(name).commit
        return f"{self._endpoint}/{name.repo}/resolve/{commit}/{quote(name.path)}"

    def headers(self, url: str) -> Mapping[str, str]:
        """The token, to the hub alone: signed addresses elsewhere say themselves who may read."""
        hub, asked = urlsplit(self._endpoint), urlsplit(url)
        token = _token() if (hub.scheme, hub.netloc) == (asked.scheme, asked.netloc) else None
        return {"Authorization": f"Bearer {token}"} if token else {}

    def check_answer(self, file: WebFile, response: BaseHTTPResponse) -> None:
        linked = response.headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"')
        if linked and linked != file.version:
            raise file.changed(linked)

    def refusal(self, key: str, response: BaseHTTPResponse) -> CheckpointError:
        name = _Name.of(key)
        code, page = response.headers.get("X-Error-Code", ""), self._page(name)
        has_token = bool(self.headers(page))
        login = "" if has_token else "log in with `hf auth login`, or set HF_TOKEN; "
        token = "with a token" if has_token else "without a token"
        if code == "GatedRepo":
            return StorageError(
                f"{name.repo} is gated: it is read by those who have accepted its terms",
                place=self.spelled(key),
                got=f"{status_text(response)}, {token}",
                wanted="the token of an account that has accepted them",
                hint=f"{login}accept the terms at {page}, then run the command again",
            )
        if code == "RevisionNotFound":
            return _AbsentError(
                f"{name.repo} has no revision {name.revision or 'main'}",
                place=self.spelled(key),
                hint=f"its branches and commits are listed at {page}/commits/main",
            )
        if code == "RepoNotFound" or response.status in (401, 404):
            return _AbsentError(
                f"there is no model {name.repo}, or it is private",
                place=self.spelled(key),
                got=f"{status_text(response)}, {token}",
                hint=f"{login}check the name at {page}",
            )
        return StorageError(
            f"{self.spelled(key)} may not be read",
            got=f"{response.headers.get('X-Error-Message') or status_text(response)}, {token}",
            hint=f"see {page}",
        )

    # -- what is in a repository

    def _snapshot(self, name: _Name) -> Snapshot:
        """All files of a revision, pinned to its commit.

        Raises:
            StorageError: there is no such repository or revision, or the hub does not tell.
        """
        known = name.repo, name.revision
        with self._lock:
            if known not in self._snapshots:
                found = self._found(name)
                self._snapshots[known] = self._snapshots[name.repo, found.commit] = found
            return self._snapshots[known]

    def _found(self, name: _Name) -> Snapshot:
        if _constants().HF_HUB_OFFLINE:
            return cached_snapshot(name.repo, name.revision or "main")
        commit = name.revision
        if len(commit) != 40 or not _COMMIT_DIGITS.issuperset(commit):
            revision = quote(name.revision or "main", safe="")
            said, _ = self._said(name, f"{self._endpoint}/api/models/{name.repo}/revision/{revision}")
            commit = str(said.get("sha")) if isinstance(said, dict) else ""
        url: str | None = f"{self._endpoint}/api/models/{name.repo}/tree/{commit}?recursive=true"
        files: dict[str, Entry] = {}
        for _ in range(_MOST_PAGES):
            if url is None:
                return Snapshot(commit, files)
            said, url = self._said(name, url)
            for each in said if isinstance(said, list) else ():
                path = str(each.get("path")) if isinstance(each, dict) else ""
                if is_inside(path) and is_text(path) and each.get("type") == "file":
                    files[path] = _entry(each)
        raise StorageError(f"cannot list {self.spelled(name.repo)}", got=f"more than {_MOST_PAGES} pages")

    def _said(self, name: _Name, url: str) -> tuple[Any, str | None]:
        """What the hub's API says, and where it says more."""
        place = self._page(name)
        response, _, body = self.client.whole(
            url, self.headers, self.client.attempts(place), most=_LARGEST_ANSWER
        )
        if response.status != 200:
            at = f"@{name.revision}" if name.revision else ""
            raise self.refusal(name.repo + at, response)
        try:
            said = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise StorageError(
                f"cannot read {place}", got="an answer that is no JSON", hint="is HF_ENDPOINT a hub?"
            ) from error
        return said, _next_page(url, response)

    def _page(self, name: _Name) -> str:
        return f"{self._endpoint}/{name.repo}"

    @property
    def _endpoint(self) -> str:
        return str(_constants().ENDPOINT)


def _constants() -> ModuleType:
    """What `huggingface_hub` has read from the environment; imported when it is needed."""
    from huggingface_hub import constants

    return constants


def _token() -> str | None:
    """The token of the user, wherever `huggingface_hub` finds it; None where there is none to be sent.

    Raises:
        StorageError: it cannot be had.
    """
    from huggingface_hub import get_token

    try:
        return None if _constants().HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    except Exception as error:  # whatever it takes to renew one
        raise StorageError("cannot get the token for the hub", got=error, hint="`hf auth login`") from error


def _entry(said: Mapping[str, Any]) -> Entry:
    """A file as the hub lists it: large ones are named by their SHA-256, others as git names them."""
    large = said.get("lfs")
    of = large if isinstance(large, dict) else said
    size = of.get("size")
    return Entry(size if isinstance(size, int) else 0, str(of.get("oid", "")))


def _next_page(url: str, response: BaseHTTPResponse) -> str | None:
    """The address in `Link: <…>; rel="next"` of the answer from another."""
    for link in response.headers.get("Link", "").split(","):
        address, _, relation = link.partition(";")
        if 'rel="next"' in relation:
            return joined(url, address.strip().strip("<>"), url)
    return None


STORE = HubStore()
