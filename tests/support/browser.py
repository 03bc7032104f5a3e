"""A headless Chromium, driven through two pipes by its own protocol (DevTools), without a driver.

Every request that a page makes is refused but that of the page itself.
"""

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
OPTIONS += ("--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking")


def program() -> str | None:
    named = os.environ.get("SAFERUN_TEST_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; `events` are the messages that nobody asked for."""

    def __init__(self, to: int, back: io.BufferedReader) -> None:
        self._to, self._back = to, back
        self._rest, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._back.read1(1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def wait(self, event: str) -> None:
        while not any(one.get("method") == event for one in self.events):
            self.events.append(self._read())

    def open(self, url: str) -> None:
        self.events.clear()
        self.ask("Page.navigate", url=url)
        self.wait("Page.loadEventFired")

    def evaluate(self, code: str) -> Any:
        done = self.ask("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def show_at(self, width: int, scheme: str) -> None:
        """Show the page at this width, light or dark."""
        screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **screen)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def complaints(self) -> list[str]:
        """Errors and warnings of the page, what its policy has refused, and requests."""
        self.ask("Runtime.evaluate", expression="0")  # what came before it has arrived
        found = []
        for one in self.events:
            method, params = one.get("method", ""), one.get("params", {})
            requested = params.get("request", {}).get("url", "file:")
            if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(json.dumps(params))
            elif method == "Network.requestWillBeSent" and not requested.startswith("file:"):
                found.append(requested)
        return found


@contextlib.contextmanager
def chromium(path: str, home: pathlib.Path) -> Iterator[Browser]:
    """Start a browser; it ends with the pipes."""
    of_browser, to = os.pipe()
    back, from_browser = os.pipe()
    # It reads 3 and writes 4.
    words = f'exec 3<&{of_browser} 4>&{from_browser}; exec "$@"'
    job = subprocess.Popen(
        ["bash", "-c", words, "bash", path, *OPTIONS, f"--user-data-dir={home}", "about:blank"],
        pass_fds=(of_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(home)},
    )
    os.close(of_browser)
    os.close(from_browser)
    try:
        with os.fdopen(back, "rb") as answers:
            yield Browser(to, answers)
    finally:
        os.close(to)
        job.terminate()
        job.wait()
