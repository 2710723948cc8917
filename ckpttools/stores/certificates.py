"""The certificate authorities (CAs) that requests trust, and hints for untrusted certificates.

Requests trust the system's CAs, which `SSL_CERT_FILE` may replace. The CAs in `AWS_CA_BUNDLE` and
`REQUESTS_CA_BUNDLE` are added for every store.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpttools.core.errors import StorageError

if TYPE_CHECKING:
    import ssl

_SYSTEM = "SSL_CERT_FILE"
_ADDED = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
VARIABLES = (_SYSTEM, *_ADDED)
_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+?-----END CERTIFICATE-----")
_CLOCK = "renew the certificate of the server; if it is valid, correct the clock of this machine"
_ISSUE_CERTIFICATE_HINT = (
    "issue an X.509 version 3 certificate to the server that is not itself of a CA (CA:FALSE)"
)


class SourceCheck(NamedTuple):
    """The reason why a certificate is not trusted, for messages.

    Attributes:
        got: The certificate.
        hint: What to do about it.
    """

    got: str
    hint: str


def unknown_authority() -> SourceCheck:
    """Return the cause and hint for a certificate of an untrusted CA."""
    named = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    trusted = f"; trusted now, besides the system's: {', '.join(named)}" if named else ""
    return SourceCheck(
        f"a certificate of an unknown certificate authority (CA){trusted}",
        "if it is the CA of your organization, export SSL_CERT_FILE=FILE, or AWS_CA_BUNDLE or "
        "REQUESTS_CA_BUNDLE, where FILE has its certificate in PEM format",
    )


# Reasons as named by rustls (obstore) and OpenSSL (Python), in this order.
_REASONS = (
    (
        r"CaUsedAsEndEntity",
        SourceCheck("a certificate of a CA in place of a server certificate", _ISSUE_CERTIFICATE_HINT),
    ),
    (
        r"Expired|NotValidYet|has expired|not yet valid",
        SourceCheck("a certificate that is not valid now", _CLOCK),
    ),
    (
        r"NotValidForName|mismatch|doesn't match|not valid for",
        SourceCheck(
            "a certificate for another host name",
            "use a host name that the certificate lists, or issue one that lists this name",
        ),
    ),
)
_UNKNOWN = re.compile("UnknownIssuer|unable to get|self[- ]signed")


def distrust(text: str) -> SourceCheck:
    """Return the cause and hint for an untrusted certificate.

    Args:
        text: The library's error message.
    """
    result = next((explanation for pattern, explanation in _REASONS if re.search(pattern, text)), None)
    if result is not None:
        return result
    if _UNKNOWN.search(text):
        return unknown_authority()
    reason = " ".join(re.findall(r"\w[\w ]*", text))
    return SourceCheck(f"a certificate that is not valid: {reason}", _ISSUE_CERTIFICATE_HINT)


def added_certificates() -> str:
    """Return certificates that libraries do not find by themselves, in PEM format; "" if there are none.

    Raises:
        StorageError: A file named by the environment cannot be read or has no certificates.
    """
    named = {name: Path(os.environ[name]) for name in VARIABLES if os.environ.get(name)}
    blocks = {name: _certificates(name, path) for name, path in named.items()}
    known = set(blocks.pop(_SYSTEM, ()))
    return "\n".join(
        dict.fromkeys(item for result in blocks.values() for item in result if item not in known)
    )


def _certificates(name: str, path: Path) -> list[str]:
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        if path.is_dir():
            # These directories may also contain private keys, which other users may not read.
            files = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
        result = [block for file in files for block in _BLOCK.findall(file.read_text(errors="replace"))]
    except OSError as error:
        raise _unusable(name, path, error.strerror or str(error)) from error
    if not result:
        raise _unusable(name, path, "no certificate")
    return result


def _unusable(name: str, path: Path, got: str) -> StorageError:
    return StorageError(
        f"the certificates that {name} names cannot be used",
        location=path,
        got=got,
        expected="a file of certificates in PEM format (-----BEGIN CERTIFICATE-----)",
        hint=f"correct the path; or trust only the system's CAs: unset {name}",
    )


def tls_context() -> ssl.SSLContext:
    """Return the TLS settings for connections from Python; same errors as `added_certificates`."""
    from urllib3.util import create_urllib3_context

    context = create_urllib3_context()
    context.load_default_certs()
    if added := added_certificates():
        context.load_verify_locations(cadata=added)
    return context


def bundle_path() -> str | None:
    """Return a single certificate file for boto3, which accepts only one; None to use its default."""
    if os.environ.get("AWS_CA_BUNDLE"):
        return None
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get(_SYSTEM) or None
