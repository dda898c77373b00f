"""The chat page as a person has it: tabs of a real Chromium, and a proxy that can do wrong."""

import importlib.util
import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "lab" / "analysis" / "viewer" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("viewer_browser", _FILE)
_VIEWER = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_VIEWER)
browser = _VIEWER.browser  # the fixture

IDLE = "document.getElementById('stop').hidden"
BUSY = "!document.getElementById('stop').hidden"


def text(browser, selector):
    return browser.run(f"document.querySelector({selector!r}).textContent")


def texts(browser, selector):
    return browser.run(
        f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)"
    )


def answers(browser):
    return texts(browser, ".assistant .said")


def questions(browser):
    return texts(browser, ".user .said")


def is_visible(browser, selector):
    return browser.run(f"document.querySelector({selector!r}).checkVisibility()")


def click(browser, selector):
    browser.run(f"document.querySelector({selector!r}).click()")


def button(browser, words, index=-1):
    browser.run(
        f"[...document.querySelectorAll('button')].filter((one) => one.textContent === {words!r})"
        f".at({index}).click()"
    )


def fill(browser, name, value):
    field = f"document.getElementById({name!r})"
    browser.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('change'))")


def type_in(browser, words, field="prompt"):
    browser.run(f"document.getElementById({field!r}).focus()")
    browser.call("Input.insertText", text=words)


def typed(browser):
    return browser.run("document.getElementById('prompt').value")


def say(browser, words):
    type_in(browser, words)
    browser.press("Enter")


def ask(browser, words):
    """Say something, and wait for the whole answer."""
    count = len(answers(browser))
    say(browser, words)
    browser.wait(f"{IDLE} && document.querySelectorAll('.assistant').length > {count}")


def reload(browser):
    browser.run("window.isOld = true")
    browser.call("Page.reload")
    browser.wait("!window.isOld && document.readyState === 'complete' && stats")


def titles(browser):
    """List the chats that a person finds in the list."""
    click(browser, "#open-chats")
    listed = texts(browser, "#list li button:first-child")
    browser.run("document.getElementById('chats').close()")
    return listed


def call_whole_browser(browser, method, **params):
    """Call what belongs to the browser, not to one of its tabs."""
    session, browser._session = browser._session, None
    try:
        return browser.call(method, **params)
    finally:
        browser._session = session


class Tabs:
    """The tabs of a browser; it drives one at a time."""

    def __init__(self, browser):
        self.browser, self.first, self.targets = browser, browser._session, {}

    def open(self, address):
        """Open a tab with an address, and go to it."""
        target = call_whole_browser(self.browser, "Target.createTarget", url="about:blank")
        target = target["targetId"]
        session = call_whole_browser(
            self.browser, "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        self.targets[session] = target
        self.go(session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.browser.call(f"{domain}.enable")
        self.browser.open(address)
        self.browser.wait("stats")
        return session

    def go(self, session):
        self.browser._session = session
        self.browser.call("Page.bringToFront")  # one in the background draws nothing

    def close(self, session):
        """Close a tab as a person does, and go to the first."""
        self.go(session)
        self.browser.call("Page.close")
        target = self.targets.pop(session)
        self.go(self.first)
        deadline = time.monotonic() + 10
        while any(info["targetId"] == target for info in self._open_targets()):
            assert time.monotonic() < deadline, "the tab does not close"
            time.sleep(0.02)

    def _open_targets(self):
        return call_whole_browser(self.browser, "Target.getTargets")["targetInfos"]

    def close_all(self):
        for target in self.targets.values():
            call_whole_browser(self.browser, "Target.closeTarget", targetId=target)
        self.go(self.first)


@pytest.fixture
def tabs(browser):
    opened = Tabs(browser)
    yield opened
    opened.close_all()


@pytest.fixture
def page(browser, serve, fake):
    """Open the page of a server, with nothing remembered."""

    def open_page(**options):
        served = serve(fake, **options)
        browser.open(served.address)
        browser.run("localStorage.clear(); sessionStorage.clear()")
        browser.open(served.address)
        browser.wait("document.getElementById('model').textContent === 'fake' || !stats")
        fill(browser, "max_tokens", "12")
        return served

    return open_page


class Proxy:
    """Stands between the page and a server.

    Attributes:
        prefix: The path below which the server is.
        stream: Parts of bytes that answer each chat instead of the server.
        status: The status and body of every answer but the page, instead of the server's.
        bodies: The bodies of the chats that were asked.
    """

    def __init__(self, server, prefix=""):
        self.server, self.prefix, self.stream, self.status = server, prefix, None, None
        self.bodies = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                proxy.answer(self)

            do_POST = do_GET

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.http.server_port}{prefix}"

    def answer(self, handler):
        size = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(size) if size else None
        path = handler.path.split("?")[0]
        if not path.startswith(self.prefix):
            return self.send(handler, 404, b"<html>nothing here", "text/html")
        path = path.removeprefix(self.prefix) or "/"
        if path != "/" and self.status:
            return self.send(handler, *self.status, "text/html")
        if path.endswith("/completions"):
            self.bodies.append(json.loads(body))
            if self.stream is not None:
                return self.send_parts(handler)
        headers = {
            name: handler.headers[name]
            for name in ("Authorization", "Content-Type")
            if name in handler.headers
        }
        forwarded = urllib.request.Request(self.server + path, body, headers)
        try:
            with urllib.request.urlopen(forwarded, timeout=20) as answer:
                return self.send(handler, answer.status, answer.read(), **answer.headers)
        except urllib.error.HTTPError as error:
            return self.send(handler, error.code, error.read(), **error.headers)

    def send(self, handler, status, body, kind=None, **headers):
        handler.send_response(status)
        fields = {"Content-Type": kind or headers.get("content-type", "")}
        if policy := headers.get("content-security-policy"):
            fields["Content-Security-Policy"] = policy
        for name, value in fields.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def send_parts(self, handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for data in self.stream:
            if data is None:  # the connection breaks
                handler.connection.close()
                return
            handler.wfile.write(data)
            handler.wfile.flush()
            time.sleep(0.03)

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(10)


@contextmanager
def proxied(browser, served, prefix="", at="/"):
    """Open the page of a server through a proxy."""
    proxy = Proxy(served.address, prefix)
    try:
        browser.open(proxy.address + at)
        yield proxy
    finally:
        browser.open("about:blank")
        proxy.close()
