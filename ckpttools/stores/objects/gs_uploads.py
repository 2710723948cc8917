"""Uploads in parts to Google Cloud Storage that nobody has ended, which obstore does not list."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

from ckpttools.core.errors import StorageError
from ckpttools.stores.abilities import PendingUpload
from ckpttools.stores.certificates import tls_context

if TYPE_CHECKING:
    import urllib3

    from ckpttools.stores.meter import Meter

_HOST = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"
_SECONDS = 30.0
_WHAT = "unfinished uploads cannot be looked for"


def listed(endpoint: str, bucket: str, prefix: str, meter: Meter) -> Iterator[PendingUpload]:
    """Uploads to keys that begin so.

    Args:
        endpoint: URL of an emulator, which asks for no token; "" for the cloud itself.
        bucket: name of the bucket.
        prefix: what keys begin with.
        meter: counts the requests.

    Raises:
        StorageError: they cannot be listed.
    """
    asked = {"uploads": "", "prefix": prefix}
    headers = _authorized(endpoint)
    while True:
        meter.add(requests=1)
        answer = _answer("GET", endpoint, bucket, asked, headers)
        try:
            page = ElementTree.fromstring(answer)
            yield from [_upload(bucket, item) for item in page.iterfind("{*}Upload")]
        except (ElementTree.ParseError, ValueError) as error:
            raise _refused(bucket, f"an answer that cannot be read: {error}") from error
        if _text(page, "IsTruncated") != "true":
            return
        after = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        asked |= {name: _text(page, declared) for name, declared in after.items()}


def _upload(bucket: str, declared: ElementTree.Element) -> PendingUpload:
    begun = datetime.fromisoformat(_text(declared, "Initiated")).timestamp()
    return PendingUpload(f"{bucket}/{_text(declared, 'Key')}", _text(declared, "UploadId"), begun)


def abort(endpoint: str, upload: PendingUpload) -> None:
    """Gives one up; none is there afterwards. Raises StorageError where that fails."""
    _answer("DELETE", endpoint, upload.key, {"uploadId": upload.upload}, _authorized(endpoint))


def _answer(method: str, endpoint: str, key: str, query: dict[str, str], headers: dict[str, str]) -> bytes:
    import urllib3

    url = f"{endpoint or _HOST}/{quote(key)}?{urlencode(query)}"
    again = urllib3.Retry(4, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504))
    try:
        answer = _pool().request(method, url, headers=headers, timeout=_SECONDS, retries=again)
    except urllib3.exceptions.HTTPError as error:
        raise _refused(key, str(error)) from error
    if answer.status >= 400 and not (method == "DELETE" and answer.status == 404):
        raise _refused(key, f"{answer.status} {answer.reason}")
    return answer.data


def _refused(key: str, got: str) -> StorageError:
    expected = "the permissions storage.multipartUploads.list and .abort (role Storage Object User)"
    return StorageError(_WHAT, location=f"gs://{key}", got=got, expected=expected)


@cache
def _pool() -> urllib3.PoolManager:
    import urllib3

    return urllib3.PoolManager(ssl_context=tls_context())


def _authorized(endpoint: str) -> dict[str, str]:
    """The header that says who asks."""
    if endpoint:
        return {}
    return {"Authorization": f"Bearer {os.environ.get('GOOGLE_BEARER_TOKEN') or _token()}"}


def _token() -> str:
    """A token of application default credentials, or of this machine.

    Raises:
        StorageError: there is none.
    """
    try:
        import google.auth
        import google.auth.transport.requests
    except ImportError:
        return _machine_token()
    try:
        credentials, _ = google.auth.default([_SCOPE])
        credentials.refresh(google.auth.transport.requests.Request())
    except google.auth.exceptions.GoogleAuthError as error:
        raise StorageError(_WHAT, got=error) from error
    return str(credentials.token)


def _machine_token() -> str:
    import urllib3

    asked = {"Metadata-Flavor": "Google"}
    try:
        answer = _pool().request("GET", _TOKEN, headers=asked, timeout=1.0, retries=False)
        return str(json.loads(answer.data)["access_token"])
    except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError):
        raise StorageError(
            _WHAT,
            got="no token for Google's XML API",
            expected="the package google-auth, or a machine of Google's",
            hint="pip install google-auth requests",
        ) from None


def _text(element: ElementTree.Element, name: str) -> str:
    return element.findtext(f"{{*}}{name}") or element.findtext(name) or ""
