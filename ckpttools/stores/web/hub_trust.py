"""Certificates that `huggingface_hub` trusts when it creates repositories and downloads files."""

from __future__ import annotations

import re
from typing import Any

from ckpttools.core.errors import StorageError
from ckpttools.stores.certificates import added_certificates, distrust, tls_context

_FAILED = re.compile(r"CERTIFICATE_VERIFY_FAILED\] certificate verify failed: ([^(]*)")


def trust_certificates() -> None:
    """Have `huggingface_hub` trust the certificates that the environment adds.

    It honors `SSL_CERT_FILE` by itself. A client that the user's program has set stays as it is.

    Raises:
        StorageError: A file that the environment names cannot be used.
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
    """Raise StorageError if a request failed because of the certificate of the server.

    Args:
        error: What `huggingface_hub` raised.
        location: What was asked for, for the message.
    """
    result = _FAILED.search(f"{error} {error.__cause__} {error.__context__}")
    if result is not None:
        why = distrust(result[1].strip())
        raise StorageError(
            "the certificate of the Hub is not trusted", location=location, got=why.got, hint=why.hint
        ) from error
