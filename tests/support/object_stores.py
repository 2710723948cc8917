"""Buckets on the servers that fixtures start, filled with directories or dictionaries."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from ckpttools.stores import Location, parse
from ckpttools.stores.objects import az, gs, s3

_NUMBERS = count()
# Of the environment, what says who asks and where.
_VARIABLES = ("GOOGLE_", "GCE_", "CLOUDSDK_", "STORAGE_EMULATOR", "TENSORSTORE_GCS", "AWS_", "AZURE_")


def files_in(directory: Path) -> dict[str, bytes]:
    """All files below a directory, by name."""
    locations = (item for item in directory.rglob("*") if item.is_file())
    return {str(location.relative_to(directory)): location.read_bytes() for location in locations}


class Cloud(ABC):
    """One scheme, and a bucket that is filled."""

    scheme: str

    def __init__(self) -> None:
        self.bucket = f"bucket-{next(_NUMBERS)}"

    def filled(self, files: Mapping[str, bytes]) -> Location:
        """A new place with these files below it, and others beside it."""
        number = next(_NUMBERS)
        self.put({f"{number}/some where/{key}": content for key, content in files.items()})
        self.put({f"{number}/some": b"x"})
        return parse(f"{self.scheme}://{self.bucket}/{number}/some where")

    @abstractmethod
    def put(self, files: Mapping[str, bytes]) -> None:
        """Writes objects of the bucket."""

    @abstractmethod
    def age(self, key: str, seconds: float) -> None:
        """Move the modification time of an object back, so that a test need not wait."""


class Google(Cloud):
    scheme = "gs"

    def __init__(self, server: Any) -> None:
        super().__init__()
        self.server = server

    def put(self, files: Mapping[str, bytes]) -> None:
        for key, content in files.items():
            self.server.put(self.bucket, key, content)

    def age(self, key: str, seconds: float) -> None:
        objects = self.server.buckets[self.bucket]
        objects[key] = objects[key]._replace(changed=objects[key].changed - seconds)


class Azure(Google):
    """The same server and its faults, as Azure."""

    scheme = "az"


class Amazon(Cloud):
    scheme = "s3"

    def __init__(self, url: str) -> None:
        from obstore.store import S3Store

        super().__init__()
        urlopen(Request(f"{url}/{self.bucket}", method="PUT")).close()
        self._client = S3Store(self.bucket, endpoint=url, client_options={"allow_http": True})

    def put(self, files: Mapping[str, bytes]) -> None:
        import obstore

        for key, content in files.items():
            obstore.put(self._client, key, content, use_multipart=False)

    def age(self, key: str, seconds: float) -> None:
        from moto.s3.models import s3_backends

        backends = (backend for account in s3_backends.values() for backend in account.values())
        bucket = next(item.buckets[self.bucket] for item in backends if self.bucket in item.buckets)
        result = bucket.keys[key]
        result.last_modified -= timedelta(seconds=seconds)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """An environment that says this of clouds, and nothing else; what stores know of buckets is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(_VARIABLES):
                patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        for store in (az.STORE, gs.STORE, s3.STORE):
            patch.setattr(store, "_buckets", {})
        yield


@contextmanager
def google(server: Any) -> Iterator[Google]:
    """What `gs://` is, on a server."""
    server.reset()
    with environment(STORAGE_EMULATOR_HOST=server.url):
        yield Google(server)
    server.reset()


@contextmanager
def azure(server: Any) -> Iterator[Azure]:
    """What `az://` is, on a server."""
    server.reset()
    where = {"AZURE_STORAGE_ENDPOINT": f"{server.url}/azure", "AZURE_STORAGE_ACCOUNT_NAME": "account"}
    with environment(**where, AZURE_SKIP_SIGNATURE="true"):
        yield Azure(server)
    server.reset()


@contextmanager
def amazon(url: str) -> Iterator[Amazon]:
    """What `s3://` is, on a server."""
    keys = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "secret"}
    with environment(AWS_ENDPOINT_URL=url, AWS_REGION="us-east-1", **keys):
        yield Amazon(url)
