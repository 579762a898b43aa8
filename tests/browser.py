"""A headless Chromium for tests of the built site, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page of a browser.

    Attributes:
        events: what the browser reported since the page was last opened.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, os.fdopen(replies, "rb")
        self._number, self._session, self._received = 0, None, b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._number:
            self.events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not (chunk := self._replies.read1()):
                raise RuntimeError("Chromium ended")
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Open a page and wait until it has loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        assert self.wait("document.readyState == 'complete' && location.href != 'about:blank'"), url

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> bool:
        """Wait until a JavaScript expression is true, and return whether it became so in time."""
        end = time.monotonic() + seconds
        while self.evaluate(condition) is not True:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def show(self, width: int, height: int = 800, *, dark: bool = False) -> None:
        """Set the viewport's size in CSS pixels, and the colour scheme that the system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])


@contextmanager
def opened(chromium: str, profile: Path) -> Iterator[Tab]:
    """A tab of a browser that runs as long as the context."""
    (to_read, requests), (replies, to_write) = os.pipe(), os.pipe()
    command = f'exec "$@" 3<&{to_read} 4>&{to_write}'  # the protocol's pipes are file descriptors 3 and 4
    arguments = ["bash", "-c", command, "-", chromium, *OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        arguments, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Tab(requests, replies)
    finally:
        os.close(requests)
        process.terminate()
        process.wait(30)
