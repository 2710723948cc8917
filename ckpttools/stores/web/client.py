"""HTTP requests with a connection pool, retries, timeouts and consistent errors."""

from __future__ import annotations

import base64
import netrc
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import cached_property
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions as failures
from urllib3.response import BaseHTTPResponse

from ckpttools.core.dataclass import dataclass
from ckpttools.core.details import log_detail
from ckpttools.core.errors import StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.certificates import distrust, tls_context
from ckpttools.stores.concurrency import MAX_CONCURRENCY
from ckpttools.stores.costs import Meter
from ckpttools.stores.reads import ReadPool

Headers = Callable[[str], Mapping[str, str]]
"""Function that returns the authorization headers for a URL, which depend on the host."""

_RETRIED_STATUSES = frozenset((408, 429, 500, 502, 503, 504))
_TOO_MANY = frozenset((429, 503))
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_REDIRECTS = 10
# Number of connections to keep per host.
CONNECTIONS = MAX_CONCURRENCY
# Maximum bytes to read of an unexpected response, so that its connection can be reused.
_SMALL = 64 << 10
# A server that does not exist will not appear a moment later.
_ABSENT = 2
# The storage confirms 5 GB some time after the last byte.
LONGEST_STORING = 180
_ALWAYS = {"User-Agent": "ckpttools", "Accept-Encoding": "identity"}
_NOT_TLS = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST"))
FAILURES = (failures.HTTPError, OSError)


class Client:
    """A thread-safe connection pool with timeouts and retries.

    Attributes:
        meter: Counts requests (with retries and redirects) and the bytes of bodies that were read.
        reads: Pool of file reads, which slows down when a server reports too many requests.
    """

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.meter = Meter()
        self.reads = ReadPool()
        self._budget = Budget(self.patience.failures)
        self._pools: dict[tuple[str, bool], urllib3.PoolManager] = {}

    def attempts(self, location: str, activity: str = "read") -> Attempts:
        """Return a counter for the attempts of one read or write."""
        return Attempts(location, self.patience, self._budget, activity)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        attempts: Attempts,
        body: bytes | None = None,
        stall: float | None = None,
    ) -> BaseHTTPResponse:
        """Send a request and return the response with an unread body and any status, without redirects.

        Args:
            method, url, headers, attempts, body: The request.
            stall: Seconds to wait for each byte; None for the client's default.

        Raises:
            StorageError: Every attempt failed or got the response of a busy or broken server.
        """
        patience = self.patience
        timeout = urllib3.Timeout(connect=patience.connect, read=stall or patience.stall)
        while True:
            self.meter.add(requests=1)
            try:
                response = self._send(method, url, headers, timeout, body)
            except FAILURES as error:
                got, hint = describe_failure(error, patience), _failure_hint(error)
                attempts.failed(got, limit=_attempts_worth(error), hint=hint)
                continue
            log_detail("%s %s: %s", method, without_secrets(url), response.status)
            if response.status not in _RETRIED_STATUSES:
                attempts.succeeded()
                return response
            if response.status in _TOO_MANY:
                self.reads.pace.slow_down()
            retry_after = parse_retry_after(response.headers.get("Retry-After"))
            discard(response)
            attempts.failed(status_text(response), retry_after)

    def send(self, url: str, headers: Mapping[str, str], body: Iterable[bytes]) -> BaseHTTPResponse:
        """Send a PUT with a generated body, which cannot be repeated.

        Args:
            url: The URL; redirects are not followed.
            headers: The headers, with `Content-Length`.
            body: The bytes to send.

        Raises:
            urllib3.exceptions.HTTPError, OSError: There is no response.
        """
        self.meter.add(requests=1)
        timeout = urllib3.Timeout(connect=self.patience.connect, read=LONGEST_STORING)
        return self._send("PUT", url, headers, timeout, body)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        timeout: urllib3.Timeout,
        body: bytes | Iterable[bytes] | None,
    ) -> BaseHTTPResponse:
        return self._pool(url).request(
            method,
            url,
            headers={**_ALWAYS, **headers},
            body=body,
            timeout=timeout,
            redirect=False,
            retries=False,
            preload_content=False,
            decode_content=False,
        )

    def follow(
        self,
        method: str,
        url: str,
        headers: Headers,
        attempts: Attempts,
        check: Callable[[BaseHTTPResponse], None] = lambda response: None,
    ) -> tuple[BaseHTTPResponse, str]:
        """Send a request, follow redirects, and return the last response and its URL; raises as `request`.

        Args:
            method, url, attempts: As for `request`.
            headers: Returns the headers for each URL.
            check: Called with each response; raises an error to reject it.

        Raises:
            StorageError: There are too many redirects, or one leads from https to http.
        """
        _check_address(url, attempts.location)
        for _ in range(_MAX_REDIRECTS):
            response = self.request(method, url, headers(url), attempts)
            check(response)
            target = response.headers.get("Location")
            if response.status not in _REDIRECTS or not target:
                return response, url
            discard(response)
            target = resolve_redirect(url, target, attempts.location)
            if urlsplit(target).scheme not in ("https", urlsplit(url).scheme):
                got = f"a redirect to {urlsplit(target).scheme}://{urlsplit(target).hostname or ''}"
                raise StorageError(
                    f"cannot read {attempts.location}", got=got, expected="a redirect to https"
                )
            url = target
        raise StorageError(f"cannot read {attempts.location}", got=f"more than {_MAX_REDIRECTS} redirects")

    def whole(
        self, url: str, headers: Headers, attempts: Attempts, limit: int
    ) -> tuple[BaseHTTPResponse, str, bytes]:
        """Send a GET like `follow`; return the response, its URL, and up to `limit` bytes of its body."""
        while True:
            response, result = self.follow("GET", url, headers, attempts)
            try:
                with release_connection(response):
                    body = response.read(limit + 1)
                self.meter.add(nbytes=len(body))
            except FAILURES as error:
                attempts.failed(describe_failure(error, self.patience))
                continue
            if len(body) > limit:
                raise StorageError(
                    f"cannot read {attempts.location}", got=f"a response of more than {limit} bytes"
                )
            return response, result, body

    def start_of(self, response: BaseHTTPResponse, limit: int) -> bytes:
        """Read up to `limit` bytes of a body; return nothing if it is truncated."""
        try:
            with release_connection(response):
                body = response.read(limit)
        except FAILURES:
            return b""
        self.meter.add(nbytes=len(body))
        return body

    def _pool(self, url: str) -> urllib3.PoolManager:
        """Return the connection pool for a URL, using the proxy that the environment configures."""
        address = urlsplit(url)
        proxy = getproxies().get(address.scheme, "")
        proxy = f"http://{proxy}" if proxy and "://" not in proxy else proxy
        if proxy and proxy_bypass(address.netloc):
            proxy = ""
        is_encrypted = address.scheme == "https" or proxy.startswith("https:")
        pool = self._pools.get((proxy, is_encrypted))
        if pool is None:
            context = tls_context() if is_encrypted else None
            pool = _proxy_manager(proxy, context) if proxy else _direct(context)
            self._pools[proxy, is_encrypted] = pool
        return pool


def without_secrets(url: str) -> str:
    """Return a URL for messages, without its login and its query."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    scheme, rest = (scheme, rest) if separator else ("", scheme)
    host, slash, path = rest.partition("/")
    login, _, host = host.rpartition("@")
    return f"{scheme}{separator}{'…@' * bool(login)}{host}{slash}{path}"


def _check_address(url: str, location: str) -> None:
    """Raise StorageError if an address is malformed."""
    try:
        urlsplit(url)
    except ValueError as error:
        raise StorageError(
            f"cannot read {location}", got="a malformed address", hint="check the address"
        ) from error


def resolve_redirect(url: str, target: str, location: str) -> str:
    """Return the target of a redirect; raise StorageError if it is malformed."""
    try:
        address = urljoin(url, target)
        urlsplit(address)
    except ValueError as error:
        raise StorageError(f"cannot read {location}", got="a redirect to a malformed address") from error
    return address


def _direct(context: ssl.SSLContext | None) -> urllib3.PoolManager:
    return urllib3.PoolManager(maxsize=CONNECTIONS, ssl_context=context)


def _proxy_manager(proxy: str, context: ssl.SSLContext | None) -> urllib3.PoolManager:
    try:
        login = urlsplit(proxy)
    except ValueError as error:
        raise _no_proxy("a malformed address") from error
    if login.scheme not in ("http", "https"):
        raise _no_proxy(f"{login.scheme}://…")
    headers = None
    if login.username:
        words = f"{unquote(login.username)}:{unquote(login.password or '')}"
        headers = {"proxy-authorization": _basic(words)}
    return urllib3.ProxyManager(
        proxy,
        proxy_headers=headers,
        maxsize=CONNECTIONS,
        ssl_context=context,
        proxy_ssl_context=context,
    )


def _no_proxy(got: str) -> StorageError:
    return StorageError(
        "the proxy in the environment cannot be used",
        got=got,
        expected="http://HOST:PORT",
        hint="correct HTTPS_PROXY and HTTP_PROXY, or name the host in NO_PROXY",
    )


def _basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


class Logins:
    """Credentials by host from `~/.netrc` or the file in NETRC."""

    @cached_property
    def _file(self) -> netrc.netrc | None:
        try:
            return netrc.netrc(os.environ.get("NETRC"))
        except FileNotFoundError:
            return None
        # The error message may contain part of a password.
        except netrc.NetrcParseError as error:
            raise _no_logins(f"line {error.lineno} is malformed") from error
        except UnicodeDecodeError as error:
            raise _no_logins("bytes that are not UTF-8") from error
        except OSError as error:
            raise _no_logins(error) from error

    def __call__(self, url: str) -> Mapping[str, str]:
        """Return the authorization header; empty without credentials for the host."""
        host = urlsplit(url).hostname or ""
        result = self._login(host)
        return {"Authorization": _basic(f"{result[0]}:{result[2]}")} if result else {}

    def name(self, url: str) -> str:
        """Return the user's name at a host, "" if there is none; same errors as the header."""
        result = self._login(urlsplit(url).hostname or "")
        return result[0] if result else ""

    def _login(self, host: str) -> tuple[str, str | None, str | None] | None:
        # The `default` entry would also be sent to hosts that a server redirects to.
        return self._file.hosts.get(host) if self._file else None


def _no_logins(got: object) -> StorageError:
    expected = "lines such as: machine HOST login NAME password WORD"
    return StorageError("cannot read the logins in ~/.netrc", got=got, expected=expected)


@contextmanager
def release_connection(response: BaseHTTPResponse) -> Iterator[None]:
    """Return the connection to the pool if the body was read completely; otherwise close it."""
    try:
        yield
    finally:
        if not response.closed:
            response.close()
        response.release_conn()


def discard(response: BaseHTTPResponse) -> None:
    """Discard the body of a response."""
    try:
        if (response.length_remaining or 0) <= _SMALL:
            response.read(_SMALL)
    except FAILURES:
        response.close()
    with release_connection(response):
        return


def status_text(response: BaseHTTPResponse) -> str:
    """Format the status of a response with the server's reason."""
    return " ".join(filter(None, (f"status {response.status}", response.reason)))


def describe_failure(error: Exception, patience: Patience) -> str:
    """Describe a failed request without addresses, which may contain signatures."""
    if isinstance(error, failures.ProxyError) and error.original_error is not None:
        return f"at the proxy: {describe_failure(error.original_error, patience)}"
    if isinstance(error, failures.NameResolutionError):
        return "the host does not exist"
    # In urllib3, the class of refused connections is derived from that of timeouts.
    if isinstance(error, failures.TimeoutError | TimeoutError) and not _is_absent(error):
        if isinstance(error, failures.ConnectTimeoutError):
            return f"no connection in {patience.connect:g} s"
        return f"no data for {patience.stall:g} s"
    if isinstance(error, failures.IncompleteRead):
        return "a truncated response"
    if isinstance(error, failures.LocationValueError):
        return "a malformed address"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return distrust(cause.verify_message).got
        if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS:
            return "a response without TLS"
        if isinstance(cause, failures.IncompleteRead):
            return "a truncated response"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower() if cause.strerror[1:2].islower() else cause.strerror
    return "a broken connection" if isinstance(error, failures.ProtocolError) else type(error).__name__


def _failure_hint(error: Exception) -> str:
    """Return a hint for a failure; "" if there is none."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return distrust(cause.verify_message).hint
        if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS:
            return "write http:// if the server does not support TLS, or check the proxy (HTTPS_PROXY)"
    return ""


def _causes(error: Exception) -> tuple[object, ...]:
    return (error, error.__cause__, *error.args)


def _attempts_worth(error: Exception) -> int | None:
    if isinstance(error, failures.LocationValueError):
        return 1
    if _failure_hint(error):
        return 1
    return _ABSENT if _is_absent(error) else None


def _is_absent(error: Exception) -> bool:
    return isinstance(error, failures.NewConnectionError)


# Minimum bytes of a truncated body that count as progress.
_PROGRESS = 1 << 20


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and limits of retries.

    Attributes:
        connect: Seconds to establish a connection.
        stall: Seconds to wait for the first byte and for each further byte.
        attempts: Maximum number of attempts without progress for one read.
        first_wait: Maximum seconds before the second attempt; doubled before each further attempt.
        longest_wait: Maximum seconds that a server may request with `Retry-After`.
        failures: Failed attempts that the process may have in addition to one per ten successful ones.
    """

    connect: float = 10
    stall: float = 30
    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 120
    failures: int = 100


class Budget:
    """Counts the attempts of a process, so that retries stop if most of them fail."""

    def __init__(self, failures: int) -> None:
        self._lock = threading.Lock()
        self._failures = failures
        self.failed = self.answered = 0

    def succeeded(self) -> None:
        with self._lock:
            self.answered += 1

    def may_retry(self) -> bool:
        """Count a failed attempt, and return whether another one may follow."""
        with self._lock:
            self.failed += 1
            return self.failed <= self._failures + self.answered // 10


class Attempts:
    """The attempts of one read.

    Args:
        location: The location that is read, for messages.
        patience: The limits.
        budget: The budget of the process.
        activity: The action, for messages.
    """

    def __init__(self, location: str, patience: Patience, budget: Budget, activity: str = "read") -> None:
        self.location, self.activity = location, activity
        self.patience = patience
        self._budget = budget
        self._made = 0

    def succeeded(self) -> None:
        self._budget.succeeded()

    def cut(self, received: int, got: str) -> None:
        """Count a truncated response as failed, unless it brought enough progress; see `failed`."""
        if received < _PROGRESS:
            self.failed(got)

    def failed(
        self, got: str, retry_after: float | None = None, limit: int | None = None, hint: str = ""
    ) -> None:
        """Wait until another attempt may start.

        Args:
            got: Description of the failed attempt.
            retry_after: Seconds that the server asks to wait.
            limit: Useful number of attempts after this failure, if smaller than usual.
            hint: Hint for the error; "" for the general one.

        Raises:
            StorageError: No more attempts are allowed.
        """
        self._made += 1
        limit = min(limit or self.patience.attempts, self.patience.attempts)
        if retry_after is not None and retry_after > self.patience.longest_wait:
            got = f"{got}, and a request to wait {retry_after:,.0f} s"
            raise self._error(got + attempts_suffix(self._made), "run the command again after that time")
        if self._made >= limit:
            hint = hint or f"check the address and the network, then {retry_term()}"
            raise self._error(got + attempts_suffix(self._made), hint)
        if not self._budget.may_retry():
            budget = self._budget
            got += attempts_suffix(self._made)
            got = f"{got}; {budget.failed} requests failed and {budget.answered} succeeded"
            raise self._error(got, "the server or the network is unreliable: run the command again later")
        backoff = self.patience.first_wait * 2 ** (self._made - 1) * random.uniform(0.5, 1)
        seconds = max(retry_after or 0, backoff)
        failed = "attempt %s to %s %s failed (%s); the next is in %.1f s"
        log_detail(failed, self._made, self.activity, self.location, got, seconds)
        time.sleep(seconds)

    def _error(self, got: str, hint: str) -> StorageError:
        return StorageError(f"cannot {self.activity} {self.location}", got=got, hint=hint)


def attempts_suffix(attempts: int) -> str:
    """Format the number of attempts for the end of a message; "" for one attempt."""
    return f", tried {attempts} times" if attempts > 1 else ""


def parse_retry_after(text: str | None) -> float | None:
    """Parse `Retry-After`, which has seconds or a date; return None if it is invalid."""
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
