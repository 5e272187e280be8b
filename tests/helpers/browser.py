"""Drives the system's Chromium, headless, with the DevTools protocol over a pipe: no package, no port, no network.

The protocol sets the width of the page, since `--window-size` makes no window narrower than 500 pixels.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Self

import pytest

# Chromium reads commands from descriptor 3 and answers on 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
TIMEOUT = 30.0


class Browser:
    """A browser with one page.

    Attributes:
        requests: Addresses that pages have requested since `open`.
        complaints: Uncaught exceptions and console errors since `open`.
    """

    def __init__(self, profile: Path) -> None:
        binary = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
        if binary is None:
            pytest.skip("needs Chromium")
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reads, writes)]
        command = [sys.executable, "-c", _START, *map(str, ends), binary, *_OPTIONS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (reads, writes, *ends):
            os.close(end)
        self._unread, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._out)  # which ends the browser
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(
        self, page: Path, width: int = 1280, dark: bool = False, draws_itself: bool = True, query: str = ""
    ) -> None:
        """Open a page and wait until it is loaded and, if it draws itself as the report does, drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.requests.clear()
        self.complaints.clear()
        self._ask("Page.navigate", url=page.as_uri() + query)
        deadline = time.monotonic() + TIMEOUT
        ready = "completeyes" if draws_itself else "completeundefined"
        while self.evaluate("document.readyState + document.documentElement?.dataset.drawn") != ready:
            assert time.monotonic() < deadline, f"the page was not drawn: {self.complaints}"
            time.sleep(0.05)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page as plain data, and of a promise its result."""
        result = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            found = answer.get("params", {})
            match answer.get("method"):
                case "Network.requestWillBeSent":
                    self.requests.append(found["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(json.dumps(found["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if found["type"] == "error":
                    self.complaints.append(json.dumps(found["args"]))
                case "Log.entryAdded" if found["entry"]["level"] == "error":
                    self.complaints.append(found["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], TIMEOUT)
            chunk = os.read(self._in, 1 << 20) if ready else b""
            assert chunk, "the browser has ended, or does not answer"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


def data_of(text: str) -> Any:
    """The data that a page carries."""
    (block,) = re.findall(r'<script type="application/json" id="data">"(.*?)"</script>', text)
    return json.loads(zlib.decompress(base64.b64decode(block)))


def choose(browser: Browser, field: str, value: str, event: str = "change") -> None:
    """Set a field of the page."""
    browser.evaluate(
        f"(field => {{ field.value = {value!r}; field.dispatchEvent(new Event('{event}')); }})"
        f"(document.getElementById('{field}'))"
    )


def texts_of(browser: Browser, selector: str) -> Any:
    """The texts of the elements that match a selector."""
    return browser.evaluate(f"[...document.querySelectorAll('{selector}')].map(each => each.textContent)")


def said_in(browser: Browser, name: str) -> Any:
    """What an element shows."""
    return browser.evaluate(f"document.getElementById('{name}').innerText")
