"""Uploads in parts to Amazon S3 that nobody has ended, by boto3: obstore does not list them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpttools.core.errors import StorageError
from ckpttools.stores.abilities import PendingUpload
from ckpttools.stores.certificates import bundle_path


def listed(access: Any, bucket: str, prefix: str) -> Iterator[PendingUpload]:
    """Uploads to keys that begin so.

    Args:
        access: what obstore's client is made with: region, endpoint, whether anything is signed.
        bucket: name of the bucket.
        prefix: what keys begin with.

    Raises:
        StorageError: they cannot be listed.
    """
    with _asking(access, bucket) as client:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Uploads", ()):
                begun = item["Initiated"].timestamp()
                yield PendingUpload(f"{bucket}/{item['Key']}", item["UploadId"], begun)


def abort(access: Any, upload: PendingUpload) -> None:
    """Gives one up; none is there afterwards. Raises StorageError where that fails."""
    bucket, _, key = upload.key.partition("/")
    with _asking(access, bucket) as client:
        try:
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.upload)
        except client.exceptions.NoSuchUpload:
            return


@contextmanager
def _asking(access: Any, bucket: str) -> Iterator[Any]:
    what, location = "unfinished uploads cannot be looked for", f"s3://{bucket}"
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        hint = "pip install 'ckpttools[cloud]'"
        raise StorageError(what, location=location, got="boto3 is not installed", hint=hint) from error
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
        raise StorageError(what, location=location, got=error, expected=expected) from error
