"""Encoders that fail, answer nonsense or are slow with a video: the engine encodes it itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from e2e.engines import VERSIONS, installed
from e2e.servers import Server
from e2e.shared import Engines
from e2e.test_reuse_media import ONCE, Fleet, data_url, shown

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 10.0
"""Time of a picture: a busy machine asks all encoders within it."""


class Small:
    """An HTTP server in place of an encoder."""

    def __init__(self, answer: bytes | None, status: int = 200) -> None:
        """The answer is None where none comes before the test is over."""
        self.asked, self.was_asked_if_it_lives, self.is_over = [], 0, threading.Event()
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                small.was_asked_if_it_lives += 1
                self.send_response(200)
                self.end_headers()

            def do_POST(self) -> None:
                small.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if answer is None:
                    small.is_over.wait()
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()


NONSENSE = json.dumps({"ec_transfer_params": {"a": {"metadata": {"video_grid_thw": [-1]}}}})


class Failing(Fleet):
    """An engine whose encoders are no encoders, and one without ecd."""

    def __init__(self, version: str, model: Path, directory: Path) -> None:
        self.failing = Small(b"out of memory", 500)
        self.mad, self.slow = Small(NONSENSE.encode()), Small(None)
        super().__init__(version, model, directory)

    @property
    def encoders(self) -> tuple[Small, Small, Small]:
        return self.failing, self.mad, self.slow

    def _begin_server(self) -> Server:
        urls = ",".join(each.url for each in self.encoders)
        return self._begin("ec_both", {"ECD_ENCODERS": urls}, ecd_load_timeout_s=PATIENCE_S)

    def close(self) -> None:
        with ThreadPoolExecutor() as side:
            list(side.map(Small.close, self.encoders))
        super().close()


@pytest.fixture(scope="module")
def fleet(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    version = installed(VERSIONS[0])
    started = Failing(version, engines.model(version), tmp_path_factory.mktemp("failing"))
    try:
        yield started
    finally:
        started.close()


def test_encoders_that_fail_cost_no_video(fleet: Failing) -> None:
    first = shown(data_url(fleet.clip()))
    assert fleet.worked(first) == ONCE, "the answer is right, and the video was encoded here"
    assert [len(each.asked) for each in fleet.encoders] == [1, 1, 1]
    assert fleet.slow.was_asked_if_it_lives == 1, "and had longer than for a picture"
    [asked] = fleet.slow.asked
    [part] = asked["messages"][0]["content"]
    assert part["type"] == "video_url"
    for encoder in fleet.encoders:
        assert f"encoder {encoder.url} is left out" in fleet.server.text()
    assert fleet.worked(shown(data_url(fleet.clip()))) == ONCE
