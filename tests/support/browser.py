"""A headless Chromium, driven through chromedriver's own protocol; no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1500,900",
)


def missing() -> str:
    """What of it is not installed, empty if all is."""
    return ", ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


def free_port() -> int:
    """A port without a listener now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Browser:
    """One tab.

    Args:
        url: Its session at chromedriver.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """A command of the WebDriver protocol."""
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            f"{self._url}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        """Go to a page."""
        self.ask("POST", "/url", url=url)

    def text(self) -> str:
        """What the page shows."""
        return str(
            self.ask("POST", "/execute/sync", script="return document.body.innerText", args=[])
        )

    def wait_for(self, *words: str, seconds: float = 30) -> str:
        """Wait until the page shows all these words; returns all that it shows."""
        end = time.monotonic() + seconds
        while True:
            text = self.text()
            if all(word in text for word in words):
                return text
            if time.monotonic() > end:
                raise AssertionError(
                    f"{[word for word in words if word not in text]} not on the page:\n{text}"
                )
            time.sleep(0.2)

    def picture(self, file: Path) -> None:
        """Keep what it looks like."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A new Chromium with an empty profile, gone at the end."""
    port = free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    base = f"http://127.0.0.1:{port}"
    try:
        with tempfile.TemporaryDirectory() as profile:
            _wait_until_up(f"{base}/status")
            options = {
                "binary": shutil.which("chromium"),
                "args": [*FLAGS, f"--user-data-dir={profile}"],
            }
            wanted = {"alwaysMatch": {"goog:chromeOptions": options}}
            session = Browser(base).ask("POST", "/session", capabilities=wanted)["sessionId"]
            tab = Browser(f"{base}/session/{session}")
            try:
                yield tab
            finally:
                tab.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(10)


def _wait_until_up(url: str) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing answers at {url}")
