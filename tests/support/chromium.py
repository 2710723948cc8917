"""A headless Chromium, driven over a pipe by the DevTools protocol: no server, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 30.0


def executable() -> str | None:
    """Where Chromium is: `CHROMIUM` says so, or it is on the path; None where there is none."""
    expected = os.environ.get("CHROMIUM")
    result = [expected] if expected else map(shutil.which, NAMES)
    return next((path for path in result if path), None)


class Browser:
    """One browser with one page; commands wait for their answers."""

    def __init__(self, command: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="chromium")
        # Chromium reads commands from its descriptor 3 and answers on 4.
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={self._directory}",
            "--remote-debugging-pipe",
        )
        shuffled = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shuffled, "bash", str(theirs_in), str(theirs_out), command, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command; returns its result. Events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, f"Chromium has ended with {self._process.wait()}"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the size of the window and the colors that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Opens a report and waits until it is drawn."""
        self.events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, promises awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        until = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < until, f"never true: {expression}; {self.complaints()}"
            time.sleep(0.02)

    def click(self, selector: str, number: int = 0) -> None:
        """Clicks near the upper left corner of the first, second, … element, as a mouse does."""
        box = self.value(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}]; "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.left + Math.min(8, b.width / 2), b.top + Math.min(8, b.height / 2)]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Presses a key such as Escape, Tab or ArrowRight."""
        code = {"Escape": 27, "Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, target: Path, *, whole: bool = True) -> None:
        """A picture of the whole page, or of the window."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"]
        target.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests that are not for the page itself."""
        return [text for event in self.events if (text := _complaint(event))]

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._directory, ignore_errors=True)


def _complaint(event: Mapping[str, Any]) -> str | None:
    parameters = event.get("params", {})
    match event.get("method"):
        case "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            return str(details.get("exception", {}).get("description") or details["text"])
        case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
            return str(parameters["args"])
        case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
            return str(parameters["entry"]["text"])
        case "Network.requestWillBeSent":
            url = str(parameters["request"]["url"])
            return None if url.startswith(("file:", "data:", "blob:")) else f"asked for {url}"
    return None


@contextlib.contextmanager
def browser(command: str) -> Iterator[Browser]:
    """A browser that ends with the block."""
    built = Browser(command)
    try:
        yield built
    finally:
        built.close()
