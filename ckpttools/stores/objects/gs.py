"""`gs://bucket/key`: Google Cloud Storage, with the credentials that Google's own tools find."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote as quote_url
from urllib.parse import urlencode
from xml.etree import ElementTree

from ckpttools.core.errors import StorageError
from ckpttools.stores.abilities import PendingUpload
from ckpttools.stores.certificates import tls_context
from ckpttools.stores.objects.client import Access, metadata_headers
from ckpttools.stores.objects.errors import MessageTerms
from ckpttools.stores.objects.store import ObjectStore

if TYPE_CHECKING:
    import urllib3

    from ckpttools.stores.costs import Meter


# Environment variables for emulator addresses in Google's libraries and in tensorstore.
_EMULATORS = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
# Environment variables from which obstore takes credentials.
_EXPLICIT = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
)
_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
# Kinds of credentials that obstore reads; google-auth reads all kinds.
_KNOWN_KINDS = ("service_account", "authorized_user")
_ANONYMOUS = {"skip_signature": True}


class GoogleStore(ObjectStore):
    """The store for the scheme `gs`."""

    scheme: ClassVar[str] = "gs"
    header_variables: ClassVar[Sequence[str]] = ("GOOGLE_BEARER_TOKEN",)
    words = MessageTerms(
        cloud="Google Cloud Storage",
        bucket="bucket",
        list_permission="storage.objects.list (role Storage Object Viewer)",
        read_permission="storage.objects.get (role Storage Object Viewer)",
        write_permission="storage.objects.create, storage.objects.delete (role Storage Object User)",
        list_buckets="gcloud storage ls",
        remove="gcloud storage rm -r gs://{bucket}/{key}",
        remove_object="gcloud storage rm gs://{bucket}/{key}",
        log_in=f"gcloud auth application-default login; or set {_FILE} to the key file of a service account",
        endpoint="STORAGE_EMULATOR_HOST or TENSORSTORE_GCS_HTTP_URL",
        api="the XML API of Google Cloud Storage (the JSON API alone is not enough)",
    )

    def access(self, bucket: str) -> Access:
        emulator = next((name for name in _EMULATORS if os.environ.get(name)), None)
        if emulator:
            return _emulator_access(os.environ[emulator], emulator)
        config, identity = _credentials()
        return Access("GCSStore", config, identity)

    def uploads(self, key: str) -> Sequence[PendingUpload]:
        """See `SupportsUploads`."""
        bucket, _, rest = key.partition("/")
        prefix = f"{rest}/" if rest else ""
        return list(_list_uploads(self.access(bucket).endpoint, bucket, prefix, self._meter))

    def abort(self, uploads: Iterable[PendingUpload]) -> None:
        """See `SupportsUploads`."""
        for upload in uploads:
            self._meter.add(requests=1)
            _abort_upload(self.access(upload.key.partition("/")[0]).endpoint, upload)

    def upload_rule(self, key: str) -> str:
        """See `SupportsUploads`."""
        rule = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}}
        bucket = quote(f"gs://{key.partition('/')[0]}")
        given = quote(json.dumps({"rule": [rule]}))
        return f"gcloud storage buckets update {bucket} --lifecycle-file=<(echo {given})"


def _emulator_access(address: str, variable: str) -> Access:
    url = address.rstrip("/") if "://" in address else f"http://{address.rstrip('/')}"
    # Without these keys, obstore would still request tokens.
    nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    key = json.dumps({"gcs_base_url": url, "disable_oauth": True, **nobody})
    log_in = (
        f"requests to {url} have no credentials; to use Google Cloud Storage itself, unset {variable}, "
        f"then {GoogleStore.words.log_in}"
    )
    return Access("GCSStore", {"service_account_key": key}, f"anonymous ({variable} is set)", url, log_in)


def _credentials() -> tuple[dict[str, Any], str]:
    """Return the client configuration and the identity for messages, from application default credentials.

    Raises:
        StorageError: A credentials file does not exist or cannot be used.
    """
    if os.environ.get("GOOGLE_SKIP_SIGNATURE"):
        return _ANONYMOUS, "anonymous (GOOGLE_SKIP_SIGNATURE is set)"
    explicit = next((name for name in _EXPLICIT if os.environ.get(name)), None)
    if explicit:
        return {}, f"the identity in {explicit}"
    named, usual = os.environ.get(_FILE), _usual_file()
    if named or usual.is_file():
        return _credentials_from_file(Path(named) if named else usual)
    if _is_on_google():
        return {}, "the service account of this machine"
    return _ANONYMOUS, f"anonymous: no credentials were found ({_FILE}, {usual}, metadata server)"


def _usual_file() -> Path:
    directory = os.environ.get("CLOUDSDK_CONFIG")
    result = Path(directory) if directory else Path.home() / ".config" / "gcloud"
    return result / "application_default_credentials.json"


def _credentials_from_file(path: Path) -> tuple[dict[str, Any], str]:
    try:
        content = json.loads(path.read_bytes())
        kind = content["type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            "the credentials file cannot be read",
            location=path,
            got=repr(error),
            hint=GoogleStore.words.log_in,
        ) from error
    if kind not in _KNOWN_KINDS:
        return {"credential_provider": _credentials_from_google_auth(path, kind)}, f"{kind} of {path}"
    return {"application_credentials": str(path)}, f"{content.get('client_email', kind)} of {path}"


def _credentials_from_google_auth(path: Path, kind: str) -> object:
    try:
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError as error:
        raise StorageError(
            f"credentials of the kind {kind} are read by the package google-auth, which is not installed",
            location=path,
            expected=" or ".join(_KNOWN_KINDS),
            hint="pip install google-auth requests",
        ) from error
    return GoogleCredentialProvider()


def _is_on_google() -> bool:
    """Return whether this is a Google Cloud machine, which has an identity."""
    if os.environ.get("GCE_METADATA_HOST"):
        return True
    result = metadata_headers("/", {"Metadata-Flavor": "Google"})
    return result is not None and result.get("Metadata-Flavor") == "Google"


_HOST = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"
_SECONDS = 30.0
_LIST_UPLOADS_FAILURE = "cannot list incomplete uploads"


def _list_uploads(endpoint: str, bucket: str, prefix: str, meter: Meter) -> Iterator[PendingUpload]:
    """List pending uploads to keys with a prefix.

    Args:
        endpoint: URL of an emulator, which needs no token; "" for the cloud.
        bucket: Name of the bucket.
        prefix: Key prefix.
        meter: Counts the requests.

    Raises:
        StorageError: The uploads cannot be listed.
    """
    query = {"uploads": "", "prefix": prefix}
    headers = _authorization(endpoint)
    while True:
        meter.add(requests=1)
        response = _request("GET", endpoint, bucket, query, headers)
        try:
            page = ElementTree.fromstring(response)
            yield from [_parse_upload(bucket, item) for item in page.iterfind("{*}Upload")]
        except (ElementTree.ParseError, ValueError) as error:
            raise _listing_error(bucket, f"an unreadable response: {error}") from error
        if _child_text(page, "IsTruncated") != "true":
            return
        after = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        query |= {name: _child_text(page, declared) for name, declared in after.items()}


def _parse_upload(bucket: str, element: ElementTree.Element) -> PendingUpload:
    start_time = datetime.fromisoformat(_child_text(element, "Initiated")).timestamp()
    return PendingUpload(
        f"{bucket}/{_child_text(element, 'Key')}", _child_text(element, "UploadId"), start_time
    )


def _abort_upload(endpoint: str, upload: PendingUpload) -> None:
    """Abort an upload if it exists; raises StorageError on failure."""
    _request("DELETE", endpoint, upload.key, {"uploadId": upload.upload}, _authorization(endpoint))


def _request(method: str, endpoint: str, key: str, query: dict[str, str], headers: dict[str, str]) -> bytes:
    import urllib3

    url = f"{endpoint or _HOST}/{quote_url(key)}?{urlencode(query)}"
    retry = urllib3.Retry(4, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504))
    try:
        response = _pool().request(method, url, headers=headers, timeout=_SECONDS, retries=retry)
    except urllib3.exceptions.HTTPError as error:
        raise _listing_error(key, str(error)) from error
    if response.status >= 400 and not (method == "DELETE" and response.status == 404):
        raise _listing_error(key, f"{response.status} {response.reason}")
    return response.data


def _listing_error(key: str, got: str) -> StorageError:
    expected = "the permissions storage.multipartUploads.list and .abort (role Storage Object User)"
    return StorageError(_LIST_UPLOADS_FAILURE, location=f"gs://{key}", got=got, expected=expected)


@cache
def _pool() -> urllib3.PoolManager:
    import urllib3

    return urllib3.PoolManager(ssl_context=tls_context())


def _authorization(endpoint: str) -> dict[str, str]:
    """Return the authorization header; empty for an emulator."""
    if endpoint:
        return {}
    return {"Authorization": f"Bearer {os.environ.get('GOOGLE_BEARER_TOKEN') or _token()}"}


def _token() -> str:
    """Return an access token from application default credentials or the metadata server.

    Raises:
        StorageError: No token is available.
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
        raise StorageError(_LIST_UPLOADS_FAILURE, got=error) from error
    return str(credentials.token)


def _machine_token() -> str:
    import urllib3

    headers = {"Metadata-Flavor": "Google"}
    try:
        response = _pool().request("GET", _TOKEN, headers=headers, timeout=1.0, retries=False)
        return str(json.loads(response.data)["access_token"])
    except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError):
        raise StorageError(
            _LIST_UPLOADS_FAILURE,
            got="no token for Google's XML API",
            expected="the package google-auth, or a Google Cloud machine",
            hint="pip install google-auth requests",
        ) from None


def _child_text(element: ElementTree.Element, name: str) -> str:
    return element.findtext(f"{{*}}{name}") or element.findtext(name) or ""


STORE = GoogleStore()
