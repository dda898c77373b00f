"""Serves the viewer page."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from h2okv.analysis.viewer.reading import Reader, Reading

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("data.js", "pane.js", "map.js", "app.js")


def build_page(content: dict[str, Any]) -> str:
    """Makes the page, with its style, its scripts and what it shows inside."""
    page = (_FOLDER / "index.html").read_text(encoding="utf-8")
    scripts = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    # "</script" in a text would end the script that holds it.
    data = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    for mark, part in (
        ("/*STYLE*/", (_FOLDER / "style.css").read_text(encoding="utf-8")),
        ("/*SCRIPT*/", scripts),
        ("/*CONTENT*/", data),
    ):
        before, after = page.split(mark)
        page = before + part + after
    return page


HOST = "127.0.0.1"
_LARGEST_BODY = 4_000_000
_KEPT_READINGS, _KEPT_TRACES = 4, 24
_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Desk:
    """Reads texts and follows policies for the page, one thing at a time."""

    def __init__(self, reader: Reader, choice: dict[str, Any]) -> None:
        self.reader, self.choice = reader, choice
        self.progress = 0.0
        self._lock = threading.Lock()
        self._readings: OrderedDict[int, Reading] = OrderedDict()
        self._traces: OrderedDict[tuple[int, str, float], dict[str, Any]] = OrderedDict()
        self._count = 0

    def page(self) -> str:
        """Returns the page."""
        return build_page({"choice": self.choice})

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """Reads a text; see `Reader.read`."""
        text, new_tokens = body.get("text"), body.get("new_tokens", 0)
        if not isinstance(text, str) or not isinstance(new_tokens, int):
            raise ValueError('the request needs {"text": "...", "new_tokens": 0}.')
        with self._lock:
            reading = self.reader.read(text, new_tokens)
            self._count += 1
            self._readings[self._count] = reading
            while len(self._readings) > _KEPT_READINGS:
                self._readings.popitem(last=False)
            return {"id": self._count, **reading.describe()}

    def trace(self, number: int, policy: str, share: float) -> dict[str, Any]:
        """Follows a policy; see `Reading.trace`."""
        with self._lock:
            reading = self._readings.get(number)
            if reading is None:
                raise ValueError("this text is not held any more; read it again.")
            key = (number, policy, share)
            if key not in self._traces:
                self.progress = 0.0
                self._traces[key] = reading.trace(policy, share, self._note)
                while len(self._traces) > _KEPT_TRACES:
                    self._traces.popitem(last=False)
            self._traces.move_to_end(key)
            return self._traces[key]

    def _note(self, share: float) -> None:
        self.progress = share


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # On Windows it would let a second server listen on the same port unnoticed.
    allow_reuse_address = os.name == "posix"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing about a page that was closed before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def make_server(desk: Desk, port: int) -> ThreadingHTTPServer:
    """Opens the port, on this machine only."""
    try:
        return _Server((HOST, port), _handler(desk))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"--port {port} cannot be opened ({reason}); choose another one, or --port 0 for any "
            "that is free."
        ) from error


def _handler(desk: Desk) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers the page's requests."""

        def do_GET(self) -> None:
            """The page, a trace, or how far the current one is."""
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            if url.path == "/":
                self._answer(lambda: desk.page())
            elif url.path == "/api/trace":
                self._answer(lambda: desk.trace(*_trace_query(query)))
            elif url.path == "/api/progress":
                self._answer(lambda: {"share": desk.progress})
            else:
                self._send(404, json.dumps({"error": "there is no such page."}), "application/json")

        def do_POST(self) -> None:
            """A text to read."""
            if urlsplit(self.path).path != "/api/text":
                self._send(404, json.dumps({"error": "there is no such page."}), "application/json")
                return
            self._answer(lambda: desk.read(self._body()))

        def _body(self) -> dict[str, Any]:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 < length <= _LARGEST_BODY:
                raise ValueError(f"the text is empty or larger than {_LARGEST_BODY} bytes.")
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict):
                raise ValueError('the request needs {"text": "...", "new_tokens": 0}.')
            return body

        def _answer(self, make: Callable[[], str | dict[str, Any]]) -> None:
            # A page elsewhere that points its own name at this machine must not get in.
            name = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if name not in (HOST, "localhost"):
                self._send(403, json.dumps({"error": "wrong host."}), "application/json")
                return
            try:
                content = make()
            except ValueError as error:
                self._send(400, json.dumps({"error": str(error)}), "application/json")
                return
            if isinstance(content, str):
                self._send(200, content, "text/html; charset=utf-8")
            else:
                self._send(200, json.dumps(content, allow_nan=False), "application/json")

        def _send(self, code: int, text: str, kind: str) -> None:
            data = text.encode("utf-8")
            self.send_response(code)
            for name, value in {**_SECURITY, "Content-Type": kind}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing; the terminal is the user's."""

    return Handler


def _trace_query(query: dict[str, str]) -> tuple[int, str, float]:
    try:
        return int(query["text"]), query["policy"], float(query["share"])
    except (KeyError, ValueError) as error:
        raise ValueError("a trace needs text, policy and share.") from error
