"""What the hub answers where it gives nothing, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpttools.core.errors import StorageError


class AbsentError(StorageError):
    """There is no such repository or revision, as far as whoever asks may know."""


class Asked(NamedTuple):
    """What was asked for.

    Attributes:
        place: as users write it.
        repo: org/name.
        revision: as it was written.
        page: of the repository, for people.
        has_token: whether the hub was told who asks.
    """

    place: str
    repo: str
    revision: str
    page: str
    has_token: bool

    @property
    def login(self) -> str:
        """What comes before the rest of the next step for who has not logged in."""
        return "" if self.has_token else "log in with `hf auth login`, or set HF_TOKEN; "

    @property
    def identity(self) -> str:
        return "with a token" if self.has_token else "without a token"


class Answer(NamedTuple):
    """What the hub answered.

    Attributes:
        status: of HTTP.
        reason: as it is sent beside it.
        headers: where the hub says more; their names may be asked for in any case.
    """

    status: int
    reason: str
    headers: Mapping[str, str]

    @property
    def code(self) -> str:
        """What the hub calls the error."""
        return self.headers.get("X-Error-Code", "")

    @property
    def text(self) -> str:
        return " ".join(filter(None, (f"status {self.status}", self.reason)))


def refused(asked: Asked, answer: Answer) -> StorageError:
    """The error of an answer that brings nothing of what was to be read."""
    page, got = asked.page, f"{answer.text}, {asked.identity}"
    if answer.code == "GatedRepo":
        return StorageError(
            f"{asked.repo} is gated: it is read by those who have accepted its terms",
            place=asked.place,
            got=got,
            wanted="the token of an account that has accepted them",
            hint=f"{asked.login}accept the terms at {page}, then run the command again",
        )
    if answer.code == "RevisionNotFound":
        return AbsentError(
            f"{asked.repo} has no revision {asked.revision or 'main'}",
            place=asked.place,
            hint=f"its branches and commits are listed at {page}/commits/main",
        )
    if answer.code == "RepoNotFound" or answer.status in (401, 404):
        return AbsentError(
            f"there is no model {asked.repo}, or it is private",
            place=asked.place,
            got=got,
            hint=f"{asked.login}check the name at {page}",
        )
    return StorageError(
        f"{asked.place} may not be read",
        got=f"{answer.headers.get('X-Error-Message') or answer.text}, {asked.identity}",
        hint=f"see {page}",
    )
