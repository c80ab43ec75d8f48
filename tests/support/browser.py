"""A real browser without a screen."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's chromium; an event loop runs in this thread meanwhile."""
    program = shutil.which("chromium")
    assert program, "chromium is missing: run make test-system"
    with sync_playwright() as playwright:
        # Its sandbox needs what neither root nor a container has.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serve the files of a directory on loopback; yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=directory)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
