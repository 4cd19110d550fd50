"""A headless Chromium that opens a file, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ABSENT = "no Chromium on PATH (chromium, chromium-browser, google-chrome) nor in DURE_CHROMIUM"


def chromium() -> str | None:
    """The program of DURE_CHROMIUM, or the first of the known names on PATH."""
    return os.environ.get("DURE_CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One tab. A call waits for its answer at most `seconds`."""

    def __init__(self, to: int, of: int, *, seconds: float = 60.0) -> None:
        self._to, self._of, self._seconds = to, of, seconds
        self._kept, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + self._seconds
        while b"\0" not in self._kept:
            ready, _, _ = select.select([self._of], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium did not answer within {self._seconds} s"
            part = os.read(self._of, 1 << 16)
            assert part, "Chromium ended"
            self._kept += part
        message, _, self._kept = self._kept.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of a size, and wait until it is complete."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a named key, as "ArrowLeft"."""
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def errors(self) -> list[dict[str, Any]]:
        """Exceptions, and messages of the browser about the page (a refused script, a failed load)."""
        self.run("0")
        return [event for event in self.events if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]

    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A Chromium with a profile of its own in `folder`; it is ended at the end of the block."""
    program = chromium()
    assert program is not None
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    options += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"]
    moved = f'exec 3<&{their_in} 4>&{their_out}; exec "$0" "$@"'
    command = ["bash", "-c", moved, program, *options, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Tab(our_out, our_in)
    finally:
        os.close(our_out)
        os.close(our_in)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
