"""The Google Cloud Storage emulator in a separate process that also reports its state."""

from __future__ import annotations

import json
import sys
import threading

from support.gcs_server import Fault, Server


class Told(Server):
    """Serves objects, uploads and the number of requests at `GET /_state`."""

    def fault(self, method_and_path: str) -> Fault | None:
        if method_and_path == "GET /_state":
            self.log.pop()
            return Fault(status=200, body=described(self))
        return super().fault(method_and_path)


def described(server: Server) -> str:
    objects = {key: item.etag for key, item in list(server.buckets["crash"].items())}
    uploads = {name: item.key for name, item in list(server.uploads.items())}
    return json.dumps({"objects": objects, "uploads": uploads, "requests": len(server.log)})


def main() -> None:
    server = Told()
    server.latency = float(sys.argv[1])
    server.put("crash", "a", b"")
    with server.running():
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
