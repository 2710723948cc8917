"""Staging on the Hub: large files are uploaded to its storage, then everything is committed at once.

    the repository                 its commit is recorded; a new repository is created, private
    large files                    uploaded to the storage, which keeps them for a while
    small files                    kept in memory
    publish                        one commit, which fails if the repository has changed
    the same command after a kill  computes the digests again; uploaded files are not sent again

Nothing is written to disk, and the repository does not change before the commit. The commit names the plan,
so that a command that was killed right after the commit has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, StorageError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import first_names
from ckpttools.stores.location import Location
from ckpttools.stores.objects.write_buffer import PendingFiles
from ckpttools.stores.publishing import JobInfo, Published, Record
from ckpttools.stores.sharing import RepositoryOptions
from ckpttools.stores.web.client import without_secrets
from ckpttools.stores.web.hub_data_files import HubDataFiles
from ckpttools.stores.web.hub_name import COMMIT, HubName
from ckpttools.stores.web.hub_repository import Blob, Repository, RepositoryHead

if TYPE_CHECKING:
    from ckpttools.stores.web.hub import HubStore


@dataclass(frozen=True)
class HubStaging:
    """A destination on the Hub; see `ckpttools.stores.publishing.Staging`.

    Attributes:
        store: The store of the destination.
        key: Key of the destination.
        name: The parsed key.
        repository: The repository.
        overwrite, check_replaced: As for `SupportsPublishing.staging`.
        sharing: The user's options for the repository.
    """

    store: HubStore
    key: str
    name: HubName
    repository: Repository
    overwrite: bool
    check_replaced: Callable[[], None]
    sharing: RepositoryOptions

    @property
    def taken(self) -> tuple[Location, Location]:
        location = Location(self.store, self.key)
        return location, location

    def check(self, plan: str, nbytes: int) -> None:
        self._inspect_repository(plan)

    def mark(self, plan: str) -> str:
        """Return the line of a commit message that names the plan and its directory."""
        return f"ckpttools-plan: /{self.name.path} {plan}"

    def _inspect_repository(self, plan: str) -> tuple[RepositoryHead | None, bool]:
        """Return the state of the repository, and whether its last commit is from the plan."""
        self._check_options()
        head = self.repository.head()
        if head is None:
            if self.name.revision not in ("", "main"):
                raise self.repository.missing_revision_error
            return None, False
        self._check_visibility(head)
        if self.mark(plan) in self.repository.latest():
            return head, True
        self._check_card(head)
        existing = self.files(head)
        if existing:
            self.check_replaced()
            if not self.overwrite:
                raise DestinationExistsError(
                    f"{self.repository.location} already has files",
                    got=first_names(existing, 3),
                    expected="an empty repository, or a new one",
                    hint="choose another destination, or allow their replacement with "
                    f"{option('overwrite', True)}: the history keeps them",
                )
        return head, False

    def _check_options(self) -> None:
        """Raise errors that do not depend on the state of the repository."""
        if COMMIT.fullmatch(self.name.revision) or self.name.revision.startswith("refs/"):
            raise UsageError(
                f"{self.repository.location} cannot be a destination",
                got=self.name.revision,
                expected="a branch: hf://org/name@branch, or hf://org/name for main",
            )
        if self.store.is_offline:
            raise StorageError(
                f"{self.repository.location} cannot be written",
                got="HF_HUB_OFFLINE is set, so no request was sent",
                hint="unset it",
            )
        if not self.repository.headers(self.repository.endpoint):
            raise StorageError(
                f"{self.repository.location} cannot be written",
                got="no token",
                expected="a token with write permission",
                hint=f"create one at {without_secrets(self.repository.endpoint)}/settings/tokens, "
                "then `hf auth login`, or set HF_TOKEN",
            )

    def _check_visibility(self, head: RepositoryHead) -> None:
        if self.sharing.public == (not head.is_private):
            return
        public = option("public", True)
        if head.is_private:
            raise UsageError(
                f"{self.name.repo} is already private",
                got=public,
                hint=f"leave out {public}; change its visibility at {self.repository.page}/settings",
            )
        raise UsageError(
            f"{self.name.repo} is already public",
            expected=f"{public}, because everyone can read it",
            hint=f"add {public}, or choose another destination",
        )

    def _check_card(self, head: RepositoryHead) -> None:
        is_there = CARD in self.store.files_at(self.name.repo, head.commit)
        if self.sharing.model_card and is_there and not self.overwrite:
            raise DestinationExistsError(
                f"{self.name.repo} already has a {CARD}",
                hint=f"leave out {option('model_card', True)}, or allow its replacement with "
                f"{option('overwrite', True)}",
            )

    def files(self, head: RepositoryHead) -> list[str]:
        """Return the sorted paths in the repository that would be part of a checkpoint at the destination."""
        start = f"{self.name.path}/" if self.name.path else ""
        result = self.store.files_at(self.name.repo, head.commit)
        below = [path for path in result if path.startswith(start) or path == self.name.path]
        return sorted(path for path in below if not self.store.is_of_repository(path))

    @contextmanager
    def opened(self, purpose: JobInfo, nbytes: int = 0) -> Iterator[HubWork]:
        try:
            head, is_complete = self._inspect_repository(purpose.plan)
            if head is None:
                self.repository.create(private=not self.sharing.public)
                head = self.repository.head()
                if head is None:
                    raise StorageError(f"{self.repository.location} was created, but does not exist")
                self._check_visibility(head)
            if not is_complete:
                self.repository.check_writable()
            yield HubWork(self, head, purpose, is_complete)
        finally:
            self.store.forget_repository(self.name.repo)


@dataclass
class HubWork:
    """A destination on the Hub with the files to commit; see `Work`.

    Attributes:
        staging: The destination.
        head: State of the repository at the time when the work began.
        purpose: The conversion.
        is_complete: Whether an earlier run has committed everything.
    """

    staging: HubStaging
    head: RepositoryHead
    purpose: JobInfo
    is_complete: bool
    pending: PendingFiles = field(init=False)
    files: HubDataFiles | None = None

    def __post_init__(self) -> None:
        self.pending = PendingFiles(self.staging.store, lambda key: None)

    @property
    def content(self) -> Location:
        return Location(self.pending, self.staging.key)

    @property
    def records(self) -> Sequence[Record]:
        """Return no records, because the storage knows the finished work."""
        return ()

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> HubDataFiles:
        self.files = HubDataFiles(self.staging.repository, self.staging.name.path, sizes, heads)
        return self.files

    def record(self, records: Iterable[Record]) -> None:
        """Do nothing, because the storage knows the finished work."""

    def discard(self) -> None:
        """Do nothing, because the storage drops files that are not in a commit."""

    def publish(self) -> None:
        staging, files = self.staging, self.files
        assert files is not None
        contents: dict[str, bytes] = {}
        self.pending.put_all(contents.__setitem__)
        result = {
            files.path(key.removeprefix(f"{staging.key}/")): Blob.of(content)
            for key, content in contents.items()
        }
        if staging.sharing.model_card:
            base = staging.sharing.base
            result[CARD] = Blob.of(model_card(staging.name.repo, self.purpose.source, result, base))
        files.take(result)
        names = {*files.small, *files.large}
        old = staging.files(self.head) if staging.overwrite else []
        commit = staging.repository.commit(
            self.head.commit,
            f"Add a checkpoint with {len(names)} files",
            f"Created by ckpttools{_source_text(self.purpose.source)}\n\n{staging.mark(self.purpose.plan)}",
            small=files.small,
            large=files.large,
            deleted=set(old) - names,
        )
        self.head = self.head._replace(commit=commit) if commit else staging.repository.head() or self.head

    @property
    def published(self) -> Published:
        """See `SupportsPublished`: the state before or after the commit."""
        repository = self.staging.repository
        branch = "" if repository.revision == "main" else f"/tree/{repository.revision}"
        return Published(f"{repository.page}{branch}", self.head.is_private, self.head.commit)

    def finalize(self) -> None:
        """Do nothing, because only the commit remains."""


def _source_text(source: str) -> str:
    return f" of {source}" if source.startswith("hf://") else ""


CARD = "README.md"


def model_card(repo: str, source: str, files: Container[str], base: str = "") -> bytes:
    """Return the text of a model card.

    Args:
        repo: Repository as org/name.
        source: The converted source; mentioned only if it is on the Hub.
        files: Names of the files next to the weights.
        base: The base model that the user named; mentioned only if it is on the Hub.
    """
    named = next((item for item in (base, source) if item.startswith("hf://")), "")
    model = "/".join(named.removeprefix("hf://").partition("@")[0].split("/")[:2])
    facts = [
        *(["library_name: transformers"] if "config.json" in files else []),
        *([f"base_model: {model}"] if model else []),
    ]
    head = "\n".join(["---", *facts, "---", ""]) if facts else ""
    result = (
        f"Converted by ckpttools from `{source}`."
        if source.startswith("hf://")
        else "Converted by ckpttools."
    )
    return f"{head}\n# {repo.partition('/')[2]}\n\n{result}\n".lstrip("\n").encode()
