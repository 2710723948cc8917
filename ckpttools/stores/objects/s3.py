"""`s3://bucket/key`: Amazon S3 and compatible servers, with the credentials that AWS's own tools find."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from shlex import quote
from typing import Any, ClassVar

from ckpttools.core.errors import StorageError
from ckpttools.core.extras import missing_package
from ckpttools.stores.abilities import PendingUpload
from ckpttools.stores.certificates import bundle_path
from ckpttools.stores.objects.client import Access
from ckpttools.stores.objects.errors import MessageTerms, login_hint
from ckpttools.stores.objects.store import ObjectStore

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


class AmazonStore(ObjectStore):
    """The store for the scheme `s3`."""

    scheme: ClassVar[str] = "s3"
    header_variables: ClassVar[Sequence[str]] = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        *_REGIONS,
    )
    largest_copy: ClassVar[int] = 5 << 30
    words = MessageTerms(
        cloud="Amazon S3",
        bucket="bucket",
        list_permission="s3:ListBucket",
        read_permission="s3:GetObject (and s3:ListBucket: without it, S3 also denies access to missing keys)",
        write_permission="s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload",
        list_buckets="aws s3 ls",
        remove="aws s3 rm --recursive s3://{bucket}/{key}/",
        remove_object="aws s3 rm s3://{bucket}/{key}",
        log_in="aws configure; or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        endpoint="AWS_ENDPOINT_URL",
        api="the API of Amazon S3",
    )

    def access(self, bucket: str) -> Access:
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
        config, identity = _credentials()
        if endpoint:
            config["endpoint"] = endpoint
        region = next(filter(None, map(os.environ.get, _REGIONS)), None)
        if region:
            config["region"] = region
        return Access("S3Store", config, identity, endpoint, login_hint(self.words, endpoint))

    def uploads(self, key: str) -> Sequence[PendingUpload]:
        """See `SupportsUploads`."""
        bucket, _, rest = key.partition("/")
        return list(_list_uploads(self.access(bucket), bucket, f"{rest}/" if rest else ""))

    def abort(self, uploads: Iterable[PendingUpload]) -> None:
        """See `SupportsUploads`."""
        for upload in uploads:
            _abort_upload(self.access(upload.key.partition("/")[0]), upload)

    def upload_rule(self, key: str) -> str:
        """See `SupportsUploads`."""
        ended = {"DaysAfterInitiation": 1}
        rule = {"ID": "unfinished-uploads", "Status": "Enabled", "Filter": {}}
        given = quote(json.dumps({"Rules": [{**rule, "AbortIncompleteMultipartUpload": ended}]}))
        bucket = quote(key.partition("/")[0])
        return (
            f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} "
            f"--lifecycle-configuration {given}"
        )


def _credentials() -> tuple[dict[str, Any], str]:
    """Return the client configuration, and the identity for messages.

    Raises:
        StorageError: A profile does not exist or cannot be used.
    """
    if os.environ.get("AWS_SKIP_SIGNATURE"):
        return {"skip_signature": True}, "anonymous (AWS_SKIP_SIGNATURE is set)"
    # boto3 takes 0.3 s to import, and obstore finds the same credentials.
    key = os.environ.get("AWS_ACCESS_KEY_ID")
    if key and os.environ.get("AWS_SECRET_ACCESS_KEY") and not os.environ.get("AWS_PROFILE"):
        return {}, f"{_short(key)} of AWS_ACCESS_KEY_ID"
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return {}, "the identity that obstore found (reading profiles needs boto3, which is not installed)"
    try:
        return _credentials_from_boto3(boto3.Session())
    except BotoCoreError as error:
        raise StorageError(
            "the AWS credentials cannot be read", got=error, hint=AmazonStore.words.log_in
        ) from error


def _credentials_from_boto3(session: Any) -> tuple[dict[str, Any], str]:
    result = session.get_credentials()
    config = {"region": session.region_name} if session.region_name else {}
    if result is None:
        return {**config, "skip_signature": True}, (
            "anonymous: no credentials were found (environment, profiles, web identity, container, instance)"
        )
    from obstore.auth.boto3 import Boto3CredentialProvider

    profile = f", profile {session.profile_name}" if result.method == "shared-credentials-file" else ""
    identity = f"{_short(result.get_frozen_credentials().access_key)} of {result.method}{profile}"
    return {**config, "credential_provider": Boto3CredentialProvider(session)}, identity


def _short(key: str) -> str:
    """Shorten an access key, keeping it recognizable."""
    return f"{key[:4]}…{key[-4:]}"


def _list_uploads(access: Any, bucket: str, prefix: str) -> Iterator[PendingUpload]:
    """List pending uploads to keys with a prefix.

    Args:
        access: Configuration of obstore's client: region, endpoint, signature.
        bucket: Name of the bucket.
        prefix: Key prefix.

    Raises:
        StorageError: The uploads cannot be listed.
    """
    with _upload_client(access, bucket) as client:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Uploads", ()):
                start_time = item["Initiated"].timestamp()
                yield PendingUpload(f"{bucket}/{item['Key']}", item["UploadId"], start_time)


def _abort_upload(access: Any, upload: PendingUpload) -> None:
    """Abort an upload if it exists; raises StorageError on failure."""
    bucket, _, key = upload.key.partition("/")
    with _upload_client(access, bucket) as client:
        try:
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.upload)
        except client.exceptions.NoSuchUpload:
            return


@contextmanager
def _upload_client(access: Any, bucket: str) -> Iterator[Any]:
    failure, location = "cannot list incomplete uploads", f"s3://{bucket}"
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    signed = Config(signature_version=UNSIGNED) if access.config.get("skip_signature") else None
    try:
        yield boto3.Session().client(
            "s3",
            endpoint_url=access.endpoint or None,
            region_name=access.config.get("region"),
            config=signed,
            verify=bundle_path(),
        )
    except (BotoCoreError, ClientError) as error:
        expected = "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload"
        raise StorageError(failure, location=location, got=error, expected=expected) from error


STORE = AmazonStore()
