"""A real Chromium, driven over a pipe by its own remote debugging protocol."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from h2okv_lab.analysis.viewer import Reader
from h2okv_lab.cli.analyze import shown_cache

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT = 60


class Browser:
    """One page in a headless Chromium."""

    def __init__(self, binary, profile):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-extensions"]
        flags += ["--disable-background-networking", "--window-size=1280,1000", "about:blank"]
        # The protocol wants file descriptors 3 and 4.
        move = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", move, "chromium", binary, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._count, self._buffer, self._session = 0, b"", None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def run(self, script):
        """Evaluate JavaScript, awaits it, returns its value."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition):
        """Wait until a JavaScript expression is true, or a promise of it."""
        deadline = time.monotonic() + TIMEOUT
        while not self.run(f"(async () => Boolean(await ({condition})))()"):
            assert time.monotonic() < deadline, f"not within {TIMEOUT} s: {condition}"
            time.sleep(0.05)

    def open(self, address):
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def press(self, key, shift=False):
        code = {" ": "Space"}.get(key, key)
        options = {"key": key, "code": code, "modifiers": 8 if shift else 0}
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **options, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)
        # The page repaints in the next frame.
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width=1280, height=1000):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path, width=1280, height=1000):
        self.resize(width, height)
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def dark(self, is_dark):
        value = "dark" if is_dark else "light"
        feature = {"name": "prefers-color-scheme", "value": value}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def complaints(self):
        """Return the errors that the page reported, and its requests elsewhere."""
        self.run("1")
        problems = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                problems.append(params["exceptionDetails"])
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                problems.append(params["entry"])
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("http://127.0.0.1", "file:", "data:", "blob:")):
                    problems.append(url)
        return problems

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None or sys.platform == "win32":
        pytest.skip("no Chromium on this machine")
    instance = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield instance
    instance.close()


class LetterTokenizer:
    """A token for each character."""

    pad_token_id, eos_token_id, bos_token_id = 0, None, None

    def __call__(self, text, **_):
        return {"input_ids": [2 + ord(letter) % 90 for letter in text]}

    def decode(self, ids, **_):
        return "".join(chr(32 + (int(i) + 56) % 90) for i in ids)


@pytest.fixture(scope="module")
def reader(model):
    described = SimpleNamespace(tokenizer=LetterTokenizer(), name="tiny", context=512)
    return Reader(model, described, 300, shown_cache)
