"""Headless Chromium by the WebDriver protocol, without another package."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "needs chromium and chromedriver (Debian: chromium-driver)"


class Browser:
    """One page in a window of a given size."""

    def __init__(self, address, width, height):
        self._address = address
        options = {
            "binary": CHROMIUM,
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"],
            "mobileEmulation": {
                "deviceMetrics": {"width": width, "height": height, "pixelRatio": 1.0}
            },
        }
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        reply = self._call("POST", "", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/{reply['sessionId']}"

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._address}/session{path}",
            data,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())["value"]

    def open(self, url):
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script, *arguments):
        """Returns the result of JavaScript that ends in `return`."""
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def messages(self):
        """Returns the messages of the console since the last call."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def close(self):
        self._call("DELETE", self._session)


@contextlib.contextmanager
def browser(width=1280, height=900):
    """Starts Chromium, and ends it with the body."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                page = Browser(f"http://127.0.0.1:{port}", width, height)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        with contextlib.closing(page):
            yield page
    finally:
        driver.terminate()
        driver.wait()
