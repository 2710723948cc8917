"""Servers of the tests for benchmarks, each in a process of its own, and a bucket among them."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def started(target: Callable[..., None], *arguments: object) -> tuple[str, Any]:
    """A server in a process of its own: its address, and what it is told by."""
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=target, args=(*arguments, there), daemon=True).start()
    return here.recv(), here


def serve_bucket(latency: float, bandwidth: float, pipe: Any) -> None:
    """Takes what is written until the process ends; forgets it, or says what it has sent, when told to."""
    from support import gcs_server

    with gcs_server.Server().running() as bucket:
        bucket.latency, bucket.up.bandwidth, bucket.down.bandwidth = latency, bandwidth, bandwidth
        bucket.put("bucket", "a", b"")
        pipe.send(bucket.url)
        while (order := pipe.recv()) in ("clear", "sent"):
            if order == "clear":
                for name in [name for name in bucket.buckets["bucket"] if name != "a"]:
                    del bucket.buckets["bucket"][name]
            pipe.send({"bytes": bucket.down.carried, "requests": len(bucket.log)})


def clear(server: Any) -> None:
    """Deletes what was uploaded."""
    server.send("clear")
    server.recv()


def sent(server: Any) -> dict[str, int]:
    """Bytes of all answers so far, and how many requests there were."""
    server.send("sent")
    result: dict[str, int] = server.recv()
    return result


def clients(url: str) -> dict[str, str]:
    """The environment in which obstore and tensorstore take a server for Google's."""
    # tensorstore asks the machine who it is before it goes without credentials.
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GCE_METADATA_ROOT": url.removeprefix("http://"),
    }
