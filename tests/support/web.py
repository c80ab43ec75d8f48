"""A web server of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def site() -> Iterator[tuple[str, dict]]:
    """A web server with one page, whose content can be changed."""
    page = {"content": b"", "asked": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page["asked"] += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page["content"])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/picture.png", page
    finally:
        server.shutdown()
        server.server_close()
