"""Errors for unsuccessful responses of the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttools.core.errors import MissingPathError, NoSpaceError, StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.certificates import added_certificates, distrust, tls_context


class AbsentError(MissingPathError):
    """A repository or revision does not exist, or the user may not see it."""


class HubRequest(NamedTuple):
    """A request to the Hub.

    Attributes:
        location: URL of the request, as users write it.
        repo: org/name.
        revision: The revision in the URL.
        page: Web page of the repository.
        has_token: Whether a token was sent.
    """

    location: str
    repo: str
    revision: str
    page: str
    has_token: bool

    @property
    def hub(self) -> str:
        """Return the address of the Hub."""
        return self.page.rsplit("/", 2)[0]

    @property
    def login(self) -> str:
        """Return the first part of the hint for users who are not logged in."""
        return "" if self.has_token else "log in with `hf auth login`, or set HF_TOKEN; "

    @property
    def identity(self) -> str:
        return "with a token" if self.has_token else "without a token"


class Answer(NamedTuple):
    """A response of the Hub.

    Attributes:
        status: The HTTP status.
        reason: The reason phrase.
        headers: Headers with details; names are case-insensitive.
        body: The body as text.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    body: str = ""

    @property
    def code(self) -> str:
        """Return the Hub's error code."""
        return self.headers.get("X-Error-Code", "")

    @property
    def declared(self) -> str:
        """Return the status and the message of the Hub."""
        words = self.headers.get("X-Error-Message", "") or _error_message(self.body)
        return f"{words} ({self.text})" if words else self.text

    @property
    def text(self) -> str:
        return " ".join(filter(None, (f"status {self.status}", self.reason)))


_MAX_MESSAGE_CHARACTERS = 300


def _error_message(body: str) -> str:
    """Return the message in a body: {"error": "…"}, or XML from the storage."""
    try:
        document = json.loads(body)
        text = str(document.get("error", "")) if isinstance(document, dict) else ""
    except (ValueError, RecursionError):
        result = re.search("<Message>(.*?)</Message>", body, re.DOTALL)
        text = result[1] if result else "" if "<" in body else body
    return " ".join(text.split())[:_MAX_MESSAGE_CHARACTERS]


# The Hub's message about an invalid token; status 401 also means a private or missing repository.
_REJECTED = re.compile(
    r"(?i)invalid (credentials|username or password|user token)|token .*expired|expired.* token"
)


def _is_rejected(request: HubRequest, answer: Answer) -> bool:
    """Return whether the Hub rejects the token for any request."""
    is_about_token = request.has_token and answer.status == 401 and not answer.code
    return is_about_token and _REJECTED.search(answer.declared) is not None


def read_error(request: HubRequest, answer: Answer) -> StorageError:
    """Return the error for an unsuccessful read."""
    page, got = request.page, f"{answer.text}, {request.identity}"
    if _is_rejected(request, answer):
        return StorageError(
            f"{request.hub} does not accept the token",
            location=request.location,
            got=answer.declared,
            expected="a valid token: it may be expired, revoked or truncated",
            hint=f"create one at {request.hub}/settings/tokens, then `hf auth login`; or unset HF_TOKEN",
        )
    if answer.code == "GatedRepo":
        return StorageError(
            f"{request.repo} is gated: access requires acceptance of its terms",
            location=request.location,
            got=got,
            expected="a token of an account that has accepted them",
            hint=f"{request.login}accept the terms at {page}, then {retry_term()}",
        )
    if answer.code == "RevisionNotFound":
        return AbsentError(
            f"{request.repo} has no revision {request.revision or 'main'}",
            location=request.location,
            hint=f"its branches and commits are listed at {page}/commits/main",
        )
    if answer.code == "RepoNotFound" or answer.status in (401, 404):
        return AbsentError(
            f"model {request.repo} does not exist, or it is private",
            location=request.location,
            got=got,
            hint=f"{request.login}check the name at {page}",
        )
    return StorageError(
        f"access to {request.location} is denied",
        got=f"{answer.headers.get('X-Error-Message') or answer.text}, {request.identity}",
        hint=f"see {page}",
    )


class ConflictError(StorageError):
    """A revision has changed since the work began."""


_FULL = re.compile(r"(?i)storage|quota|space limit|too large|exceed")


def write_error(asked: HubRequest, answer: Answer, doing: str) -> StorageError | NoSpaceError:
    """Return the error for a request that failed before the commit was complete.

    Args:
        asked: The request.
        answer: The response.
        doing: The action, such as "upload".
    """
    got = f"{answer.declared or answer.text}, {asked.identity}"
    if doing == "look at" or answer.code in ("RevisionNotFound", "GatedRepo") or _is_rejected(asked, answer):
        return read_error(asked, answer)
    if answer.status in (409, 412):
        return ConflictError(
            f"{asked.repo} was changed during the upload: nothing was committed",
            location=asked.location,
            got=got,
            expected="the revision from the start of the command",
            hint=f"check the changes, then {retry_term()}: uploaded files are not sent again",
        )
    if answer.status in (413, 507) or (
        answer.status in (400, 402, 403, 422) and _FULL.search(answer.declared)
    ):
        return NoSpaceError(
            f"{asked.repo} has no space left",
            location=asked.location,
            got=got,
            expected="enough space",
            hint=f"free some space, or buy more: {asked.hub}/settings/billing; then run the "
            "same command again: uploaded files are not sent again",
        )
    if answer.status == 401 or answer.code == "RepoNotFound" or answer.status == 404:
        return StorageError(
            f"write access to {asked.repo} is denied",
            location=asked.location,
            got=got,
            expected="a token with write permission",
            hint=f"{asked.login}create one at {asked.hub}/settings/tokens, and give it to `hf auth login`",
        )
    if answer.status == 403:
        org = asked.repo.partition("/")[0]
        return StorageError(
            f"write access to {asked.repo} is denied",
            location=asked.location,
            got=got,
            expected=f"a token with write permission for {org}",
            hint=f"`hf auth whoami` shows your account: write below your own name, ask {org} for write "
            f"access, or create a token with it at {asked.hub}/settings/tokens",
        )
    hint = f"see {asked.page}, then {retry_term()}"
    return StorageError(f"cannot {doing} {asked.location}", got=got, hint=hint)


_FAILED = re.compile(r"CERTIFICATE_VERIFY_FAILED\] certificate verify failed: ([^(]*)")


def trust_certificates() -> None:
    """Make `huggingface_hub` trust the certificates that the environment adds.

    `huggingface_hub` honors `SSL_CERT_FILE` by itself. A client that the user's program has set is not
    changed.

    Raises:
        StorageError: A file named by the environment cannot be used.
    """
    from huggingface_hub.utils import _http

    default = getattr(_http, "default_client_factory", None)
    if not added_certificates() or default is None or _http._GLOBAL_CLIENT_FACTORY is not default:
        return
    _http.set_client_factory(_trusting_client)


def _trusting_client() -> Any:
    from huggingface_hub.utils import _http

    with _http.default_client_factory() as usual:
        return type(usual)(
            verify=tls_context(),
            event_hooks=usual.event_hooks,
            follow_redirects=usual.follow_redirects,
            timeout=usual.timeout,
        )


def refuse_untrusted(error: BaseException, location: str) -> None:
    """Raise StorageError if a request failed because of the server's certificate.

    Args:
        error: The error that `huggingface_hub` raised.
        location: The requested location, for the message.
    """
    result = _FAILED.search(f"{error} {error.__cause__} {error.__context__}")
    if result is not None:
        reason = distrust(result[1].strip())
        raise StorageError(
            "the certificate of the Hub is not trusted", location=location, got=reason.got, hint=reason.hint
        ) from error
