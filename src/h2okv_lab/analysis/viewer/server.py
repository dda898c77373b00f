"""The viewer's page, and the standard library's server for it.

It has four routes for one user on this machine; `h2okv view` needs no extra.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from h2okv.records import refusing
from h2okv_lab.analysis.viewer.reading import Desk

HOST = "127.0.0.1"
_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("data.js", "pane.js", "map.js", "app.js")
_LARGEST_BODY = 4_000_000
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def build_page(content: dict[str, Any]) -> str:
    """Return the page with its style, its scripts and its data inside."""
    page, style, *scripts = (
        (_FOLDER / name).read_text("utf-8") for name in ("index.html", "style.css", *_SCRIPTS)
    )
    # "</script" in a text would end the script around it.
    data = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", "\n".join(scripts))
    return page.replace("/*CONTENT*/", data)


class PageServer(ThreadingHTTPServer):
    """A server of the page, on this machine only."""

    daemon_threads = True
    # On Windows it would let a second server listen on the same port unnoticed.
    allow_reuse_address = os.name == "posix"

    def __init__(self, port: int, desk: Desk | None = None) -> None:
        self.desk = desk
        remedy = "choose another one, or --port 0 for a free one."
        with refusing(f"--port {port} cannot be opened", remedy, OSError, OverflowError):
            super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that was closed before its response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


_ROUTES: dict[tuple[str, str], Callable[..., str | dict[str, Any]]] = {
    ("GET", "/"): lambda desk, query, body: build_page({"choice": desk.choice}),
    ("GET", "/api/progress"): lambda desk, query, body: {"share": desk.progress},
    ("GET", "/api/trace"): lambda desk, query, body: desk.trace(query),
    ("POST", "/api/text"): lambda desk, query, body: desk.read(body()),
}


class _Handler(BaseHTTPRequestHandler):
    """Handler of the page's requests."""

    server: PageServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        # Refuse DNS rebinding: another site whose name points to this machine.
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (HOST, "localhost"):
            return self._send(403, {"error": "wrong host."})
        route = _ROUTES.get((self.command, url.path))
        if route is None:
            return self._send(404, {"error": "page not found."})
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            return self._send(200, route(self.server.desk, query, self._body))
        except ValueError as error:
            return self._send(400, {"error": str(error)})

    do_POST = do_GET

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= _LARGEST_BODY:
            raise ValueError(f"the text is empty or larger than {_LARGEST_BODY} bytes.")
        return json.loads(self.rfile.read(length))

    def _send(self, code: int, content: str | dict[str, Any]) -> None:
        kind = "text/html; charset=utf-8"
        if not isinstance(content, str):
            content, kind = json.dumps(content, allow_nan=False), "application/json"
        data = content.encode("utf-8")
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; the terminal is the user's."""
