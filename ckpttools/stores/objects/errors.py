"""Errors of clouds, with location, response, identity, missing permission and hint."""

from __future__ import annotations

import re

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MissingPathError, StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.certificates import distrust

_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_MESSAGE = re.compile(r"<(?:Message|Details)>(.*?)</(?:Message|Details)>", re.DOTALL)
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
# Error codes for rejected credentials.
_AUTHENTICATION = frozenset(
    (
        "AuthFailure",
        "AuthenticationFailed",
        "AuthenticationRequired",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidAuthenticationInfo",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidToken",
        "KeyBasedAuthenticationNotPermitted",
        "MissingAuthenticationToken",
        "NoAuthenticationInformation",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
    )
)
_CLOCK = frozenset(("RequestExpired", "RequestTimeTooSkewed"))
_EXPIRED = frozenset(("ExpiredToken", "TokenRefreshRequired"))
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(.*?)\s*,?\s*\)\s*,\s*\}", re.DOTALL)
_NOT_TLS = re.compile(r"InvalidContentType|InvalidMessage|corrupt message")
# Responses of servers with another API, such as emulators that support only Google's JSON API.
_WRONG_API_PATTERN = re.compile(
    "(?i)invalid list response|Unable to extract metadata from headers|Header missing from response"
)
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|specified bucket does not exist")
# Azure's response to anonymous requests, with status 409.
_NOT_PUBLIC = "Public access is not permitted"
_UNREACHABLE_PATTERN = re.compile("error sending request|HttpError|connect error|dns error|TimedOut")
# The innermost cause of a broken connection.
_CAUSE = re.compile(r'message: "([^"]+)"|error: "([^"]+)"')


@dataclass(frozen=True)
class MessageTerms:
    """A cloud's terms for messages.

    Attributes:
        cloud: Name of the cloud.
        bucket: The cloud's word for a bucket.
        list_permission, read_permission, write_permission: Names of the required permissions.
        list_buckets: Command that lists buckets.
        remove: Command that deletes everything below a key, with `{bucket}` and `{key}`.
        remove_object: Command that deletes one object, with the same placeholders.
        log_in: How to authenticate.
        endpoint: Environment variables for other servers.
        api: The API that a server must support.
    """

    cloud: str
    bucket: str
    list_permission: str
    read_permission: str
    write_permission: str
    list_buckets: str
    remove: str
    remove_object: str
    log_in: str
    endpoint: str
    api: str


@dataclass(frozen=True)
class BucketRequest:
    """A request to a bucket.

    Attributes:
        doing: The action, such as "cannot list".
        location: URL of the object.
        bucket: Name of the bucket.
        identity: Identity of the client.
        endpoint: URL of a server other than the cloud's own.
        words: Terms of the cloud.
    """

    doing: str
    location: str
    bucket: str
    identity: str
    endpoint: str
    words: MessageTerms


def login_hint(words: MessageTerms, endpoint: str) -> str:
    """Return the hint for authentication with a custom endpoint; "" without a custom endpoint."""
    if not endpoint:
        return ""
    return f"{words.log_in} for that server; or unset {words.endpoint} to use {words.cloud} itself"


def is_absent_object(error: Exception) -> bool:
    """Return whether the bucket exists but the object does not, or the key is invalid."""
    if isinstance(error, ValueError):
        return True
    status = _STATUS.search(str(error))
    # Multipart writers raise OSError.
    is_absent = isinstance(error, FileNotFoundError) or (status is not None and status[1].startswith("404"))
    return is_absent and not _NO_BUCKET.search(str(error))


def is_changed_object(error: Exception) -> bool:
    """Return whether an object has changed, possibly during the response, or already exists."""
    from obstore.exceptions import AlreadyExistsError

    return isinstance(error, AlreadyExistsError) or "precondition failure" in str(error)


def is_unsupported(error: StorageError) -> bool:
    """Return whether a server does not support a request, for example because of its condition."""
    status = _STATUS.search(str(error.__cause__))
    return status is not None and status[1][:3] in ("405", "501")


def is_refused_without_code(error: Exception) -> bool:
    """Return whether a metadata request was refused; its response has no body and thus no error code."""
    text = str(error)
    status = _STATUS.search(text)
    is_refused = status is not None and status[1].startswith("403")
    return is_refused and "performing HEAD" in text and not _CODE.search(text)


def is_listing_unsupported(error: Exception) -> bool:
    """Return whether a server does not support listings; a missing bucket has an error code."""
    text = str(error)
    status = _STATUS.search(text)
    is_absent = status is not None and status[1][:3] in ("404", "405")
    return is_absent and "performing list request" in text and not _CODE.search(text)


def is_truncated(error: Exception) -> bool:
    """Return whether a response was truncated."""
    return "response body" in str(error)


def add_retries(error: Exception, retries: int) -> Exception:
    """Add the number of retries to the error of a repeated request, in obstore's wording."""
    return type(error)(f"{error}\nafter {retries} retries")


def has_invalid_key(error: Exception) -> bool:
    """Return whether a listing contains an object whose name obstore does not accept."""
    return "Encountered object with invalid path" in str(error)


def is_not_the_api(error: Exception) -> bool:
    """Return whether the response does not follow the cloud's API."""
    return _WRONG_API_PATTERN.search(str(error)) is not None or is_listing_unsupported(error)


def explain_error(error: Exception, request: BucketRequest) -> StorageError:
    """Convert an error from obstore."""
    text = str(error)
    status = _STATUS.search(text)
    code = int(status[1][:3]) if status else 0
    if code == 404 and _NO_BUCKET.search(text):
        return _no_bucket(request)
    result = _CODE.search(text)
    reason = result[1] if result else ""
    if code in (400, 401, 403) and (code == 401 or reason in _AUTHENTICATION) and not _is_of_region(text):
        return _not_authenticated(request, _format_response(text), reason)
    if code in (401, 403) or _NOT_PUBLIC in text:
        return _not_allowed(request, _format_response(text), reason)
    if is_not_the_api(error):
        return wrong_api_error(request, _format_response(text))
    if _is_of_region(text):
        hint = "set AWS_REGION to the bucket's region"
        return _error(request, _format_response(text), "a request to the bucket's own region", hint)
    if code == 429 or code >= 500:
        hint = f"{request.endpoint or request.words.cloud} is overloaded or down: {retry_term()} later"
        return _error(request, f"{_format_response(text)}{_tries(text)}", "a response", hint)
    if not code and is_truncated(error) and "TimedOut" not in text:
        hint = f"check the network and the proxy (HTTPS_PROXY), then {retry_term()}"
        return _error(request, f"a truncated response{_tries(text)}", "the complete response", hint)
    if not code and (certificate := _CERTIFICATE.search(text)):
        cause = distrust(certificate[1])
        problem = f"the certificate of {request.endpoint or request.words.cloud} is not trusted"
        return StorageError(problem, location=request.location, got=cause.got, hint=cause.hint)
    if not code and _UNREACHABLE_PATTERN.search(text):
        return _no_connection(request, text)
    if has_invalid_key(error):
        hint = "rename that object: no part of its name may be empty, `.` or `..`, or have control characters"
        return _error(request, _format_response(text), None, hint)
    if code:
        got = f"{_format_response(text)}{_tries(text)}; asked as {request.identity}"
        return _error(request, got, None, request.words.log_in)
    return _error(
        request, _format_response(text), None, request.words.log_in if "redential" in text else None
    )


def _error(request: BucketRequest, got: str, expected: str | None, hint: str | None) -> StorageError:
    return StorageError(f"{request.doing} {request.location}", got=got, expected=expected, hint=hint)


def _no_bucket(request: BucketRequest) -> StorageError:
    words = request.words
    return MissingPathError(
        f"{words.bucket} {request.bucket!r} does not exist",
        location=request.location,
        got=f"the response of {request.endpoint or words.cloud}",
        expected=f"a {words.bucket} that exists",
        hint=f"check the spelling, and the server in {words.endpoint}"
        if request.endpoint
        else f"check the spelling; `{words.list_buckets}` lists yours",
    )


def _is_of_region(text: str) -> bool:
    """Return whether a request was sent to a region other than the bucket's."""
    return "region" in text.partition("Debug source")[0].lower()


def unusable_credentials(error: Exception, request: BucketRequest) -> StorageError:
    """Return the error for credentials or settings that obstore does not accept."""
    got = str(error).partition("\n")[0].removeprefix("Generic ")
    return StorageError(
        f"the credentials or settings for {request.words.cloud} cannot be used",
        location=request.location,
        got=f"{got}; from {request.identity}",
        expected="credentials in the cloud's original format",
        hint=request.words.log_in,
    )


def _not_authenticated(request: BucketRequest, response: str, code: str) -> StorageError:
    hint = request.words.log_in
    if code in _CLOCK:
        hint = "correct the clock of this machine"
    elif code in _EXPIRED:
        hint = f"get new credentials: {hint}"
    return StorageError(
        f"{request.doing} {request.location}: authentication failed",
        got=f"{response}; asked as {request.identity}",
        expected="credentials that the server accepts (permissions were not checked)",
        hint=hint,
    )


def _not_allowed(request: BucketRequest, response: str, code: str) -> StorageError:
    words = request.words
    permission = {"list": words.list_permission, "write": words.write_permission}.get(
        request.doing.rpartition(" ")[2], words.read_permission
    )
    expected, hint = f"the permission {permission} on the {words.bucket}", words.log_in
    if not code and ": " not in response:
        response += ", without an error code"
        expected = f"valid credentials, and {expected}"
    elif code and not request.identity.startswith("nobody"):
        hint = f"grant that permission to these credentials, or use others: {hint}"
    return StorageError(
        f"{request.doing} {request.location}: not allowed",
        got=f"{response}; asked as {request.identity}",
        expected=expected,
        hint=hint,
    )


def wrong_api_error(request: BucketRequest, response: str) -> StorageError:
    """Return the error for a server that does not support the cloud's API.

    Args:
        request: The request.
        response: The response, for the message.
    """
    words = request.words
    server = request.endpoint or words.cloud
    return StorageError(
        f"{server} does not offer {words.api}",
        location=request.location,
        got=response,
        expected="a server with this API",
        hint=f"use another server or emulator, and set {words.endpoint} to its URL"
        if request.endpoint
        else "check the proxy (HTTPS_PROXY)",
    )


def _no_connection(request: BucketRequest, text: str) -> StorageError:
    causes = [item for result in _CAUSE.findall(text) for item in result if item]
    got = "no response in time" if "TimedOut" in text else causes[-1] if causes else _format_response(text)
    if _NOT_TLS.search(text):
        got = "a response without TLS"
        problem = f"{request.endpoint or request.words.cloud} does not support TLS"
        hint = (
            f"check the endpoint and the proxy: for a server without TLS, {request.words.endpoint}=http://…"
        )
        return StorageError(
            problem, location=request.location, got=got, expected="an https:// server", hint=hint
        )
    return StorageError(
        f"no connection to {request.endpoint or request.words.cloud}",
        location=request.location,
        got=f"{got}{_tries(text)}",
        expected="a response",
        hint="check the network, the proxy (HTTPS_PROXY) and the endpoint",
    )


def _format_response(text: str) -> str:
    """Return the server's status, with its message if there is one."""
    status, code, message = _STATUS.search(text), _CODE.search(text), _MESSAGE.search(text)
    if status is None:
        return text.partition("\n")[0]
    known = f"{status[1].strip()}, {code[1]}" if code else status[1].strip()
    words = message[1].strip() if message else ""
    return f"{known}: {words}" if words else known


def _tries(text: str) -> str:
    result = re.search(r"after (\d+) retries", text)
    return f", tried {int(result[1]) + 1} times" if result else ""
