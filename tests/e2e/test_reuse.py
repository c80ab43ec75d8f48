"""The middleware in vLLM's own server: what ecd has is neither preprocessed nor encoded again."""

from __future__ import annotations

import itertools
import json
import re
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest

from e2e.engines import installed
from e2e.servers import Server, api_server, noise_url, picture_url
from ecd_client import Client
from support.daemon import Daemon, eventually
from support.web import site

pytestmark = pytest.mark.timeout(900)
MIDDLEWARE = ["--middleware", "ecd_client.vllm.ReuseMiddleware"]
OTHER = ["--middleware", "passing_middleware.passes"]
"""An operator's own, which vLLM calls after ecd's."""
KEY = "a key of the tests"
TRUST = "--trust-request-mm-kwargs"
READY = "ecd: pictures that are stored are not preprocessed"
seeds = itertools.count(1000)


@pytest.fixture(scope="session")
def version() -> str:
    """vLLM 0.28 takes no metadata as JSON."""
    return installed("0.32.0")


class Servers:
    """An engine that encodes for others, one that does all, and one that has never heard of ecd."""

    def __init__(self, daemon: Daemon, start: Callable[..., Server]) -> None:
        self.daemon = daemon
        extra = {"ecd_address": daemon.address}
        self.encoder = start("ec_producer", [*MIDDLEWARE, "--api-key", KEY], **extra)
        wrong = {"ECD_ENCODERS": "http://encoder-1:8000,encoder-2:8000"}
        self.server = start("ec_both", [*OTHER, *MIDDLEWARE, TRUST], environ=wrong, **extra)
        self.plain = start(None, [TRUST])

    def right(self, content: list[dict], **options: object) -> None:
        """The answer is the plain engine's."""
        status, body = self.server.chat(content, **options)
        assert status == 200, f"{body}\n{self.server.text()[-3000:]}"
        assert answer(body) == answer(self.plain.chat(content, **options)[1])

    def right_streamed(self, content: list[dict]) -> None:
        """The same, in as many chunks as the server finds time for."""
        answers = []
        for server in (self.server, self.plain):
            lines = server.stream(content, max_tokens=8)
            assert lines[-1] == "data: [DONE]", lines
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            said = "".join(delta.get("content", "") for delta in deltas)
            answers.append((deltas[0].get("role"), said))
        assert answers[0] == answers[1]


def answer(body: dict) -> list[tuple[str, float]]:
    tokens = body["choices"][0]["logprobs"]["content"]
    return [(token["token"], pytest.approx(token["logprob"], abs=1e-3)) for token in tokens]


def shown(url: str, text: str = "what is in this picture?") -> list[dict]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def new_url() -> str:
    return picture_url(next(seeds))


def preprocessed(server: Server) -> int:
    return server.text().count("media are preprocessed")


def encoded(server: Server) -> float:
    return server.metrics().get("misses", 0)


def forwards(server: Server) -> int:
    """Of the vision tower, those at the start included."""
    return server.text().count("pictures are encoded")


@pytest.fixture(scope="module")
def servers(
    version: str,
    model_of: Callable[[str], Path],
    shared_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("servers")
    started: list[Server] = []

    def start(role: str | None, flags: Sequence[str] = (), **extra: object) -> Server:
        model, log = model_of("qwen2_5_vl"), logs / f"{role}.log"
        started.append(api_server(version, log, model, role, flags, counting=True, **extra))
        return started[-1]

    shared_daemon.start()
    try:
        servers = Servers(shared_daemon, start)
        for server in started:
            server.wait_ready()
        for server in (servers.encoder, servers.server):
            eventually(lambda server=server: READY in server.text(), 30)
        yield servers
    finally:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, started))


@pytest.fixture
def stored(servers: Servers) -> str:
    """The URL of a picture that ecd has."""
    return store(servers, new_url())


def store(servers: Servers, url: str) -> str:
    before = servers.daemon.status().counters.puts
    servers.right(shown(url))
    eventually(lambda: servers.daemon.status().counters.puts == before + 1)
    return url


def test_a_picture_that_is_stored_is_neither_preprocessed_nor_encoded(
    servers: Servers, stored: str
) -> None:
    before = preprocessed(servers.server), forwards(servers.server)
    servers.right(shown(stored, "is this the other picture?"))
    both = [*shown(stored)[:1], *shown(stored, "are these the same?")]
    servers.right(both)
    assert (preprocessed(servers.server), forwards(servers.server)) == before


def test_a_picture_that_has_left_ecd_is_encoded_again(servers: Servers, stored: str) -> None:
    """vLLM's processor remembers an item that came without media by its name."""
    servers.right(shown(stored, "is this the other picture?"))
    servers.daemon.evict_all()
    before = servers.daemon.status().counters.puts
    servers.right(shown(stored, "and now?"))
    eventually(lambda: servers.daemon.status().counters.puts == before + 1)
    seen = preprocessed(servers.server)
    servers.right(shown(stored, "and again?"))
    assert preprocessed(servers.server) == seen


def test_a_wrong_list_of_encoders_is_said_and_costs_no_more(servers: Servers) -> None:
    said = "no picture is sent to encoders: ECD_ENCODERS has 'encoder-2:8000'; it must be URLs"
    assert said in servers.server.text()


def test_one_new_picture_beside_a_stored_one_leaves_the_request_as_it_is(
    servers: Servers, stored: str
) -> None:
    before = preprocessed(servers.server)
    servers.right([*shown(stored)[:1], *shown(new_url())])
    assert preprocessed(servers.server) > before


def test_requests_that_change_the_names_of_pictures_pass_as_they_are(
    servers: Servers, stored: str
) -> None:
    before = preprocessed(servers.server)
    servers.right(shown(stored), mm_processor_kwargs={})
    assert preprocessed(servers.server) == before
    servers.right(shown(stored), media_io_kwargs={"image": {"image_mode": "RGB"}})
    assert preprocessed(servers.server) > before


def test_a_url_is_fetched_once_and_never_taken_for_its_content(servers: Servers) -> None:
    contents = [b64decode(new_url().partition(",")[2]) for _ in range(2)]
    with site() as (url, page):
        for content in contents:
            page["content"] = content
            page["asked"] = 0
            assert servers.server.chat(shown(url))[0] == 200
            assert page["asked"] == 1, "a new picture is fetched once"
            servers.right(shown(url))
        before = preprocessed(servers.server)
        servers.right(shown(url, "what is this?"))
        assert preprocessed(servers.server) == before


def test_an_answer_is_streamed_as_ever(servers: Servers, stored: str) -> None:
    before = preprocessed(servers.server)
    servers.right_streamed(shown(stored))
    assert preprocessed(servers.server) == before


def test_a_stream_is_vllms_to_the_byte_but_for_ids_and_times(servers: Servers, stored: str) -> None:
    """With one token, as vLLM makes one chunk of as many tokens as it then has."""
    options = {"max_tokens": 1, "logprobs": False, "stream_options": {"include_usage": True}}
    before = preprocessed(servers.server)
    told, plainly = (
        "\n".join(server.stream(shown(stored), **options))
        for server in (servers.server, servers.plain)
    )
    changing = r'"id":"[^"]+"|"created":\d+|"system_fingerprint":"[^"]+"'
    assert re.sub(changing, "", told) == re.sub(changing, "", plainly)
    assert told.count("data: ") == 4, "the role, the token, the usage and the end"
    assert preprocessed(servers.server) == before


def test_what_a_request_or_an_answer_needs_is_not_evicted(servers: Servers) -> None:
    def is_held_while_its_answer_comes() -> bool:
        """Of an answer that has begun and not ended; no where the engine had all its tokens."""
        url = store(servers, new_url())
        name = servers.daemon.names()[-1]
        store(servers, new_url())
        bystander = servers.daemon.names()[-1]
        with servers.server.open(shown(url), None, {"stream": True, "max_tokens": 1500}) as file:
            file.readline()
            with servers.server.engine_stopped():
                servers.daemon.crowd()
                left = servers.daemon.names()
                comes = servers.server.sample("vllm:num_requests_running") == 1
        assert bystander not in left
        assert not comes or name in left
        return comes

    assert any(is_held_while_its_answer_comes() for _ in range(20)), "a busy machine may be late"
    stored = store(servers, new_url())
    key = {"headers": {"Authorization": f"Bearer {KEY}"}}
    status, _ = servers.encoder.chat(shown(stored), max_tokens=1, **key)
    assert status == 200
    servers.daemon.crowd()
    before = preprocessed(servers.server), forwards(servers.server)
    servers.right(shown(stored, "is it still there?"))
    assert (preprocessed(servers.server), forwards(servers.server)) == before


def test_a_client_that_goes_leaves_nothing_held_and_nothing_running(
    servers: Servers, stored: str
) -> None:
    before = preprocessed(servers.server)

    def leaves() -> bool:
        """Whether the engine stops before it has all tokens, as it hears that nobody wants them."""
        generated = servers.server.sample("vllm:generation_tokens_total")
        servers.server.stream(shown(stored), max_tokens=1500, lines=2)  # and closes
        eventually(lambda: servers.server.sample("vllm:num_requests_running") == 0, 20)
        return servers.server.sample("vllm:generation_tokens_total") < generated + 1500

    assert any(leaves() for _ in range(5)), "a busy machine may be late now and then"
    assert preprocessed(servers.server) == before
    with Client(servers.daemon.address) as client:
        held = servers.daemon.status().pools[0]
        eventually(lambda: servers.daemon.status().pools[0].leased_bytes == 0, 20, f"{held}")
        assert client.node is not None


def test_the_middleware_has_a_request_for_a_moment_alone(servers: Servers) -> None:
    """The benchmark of repeated pictures measures it; here are ten times what it should take."""
    words = [{"type": "text", "text": "what is what?"}]
    picture = shown(store(servers, noise_url(next(seeds))))
    seen = preprocessed(servers.server)
    for content, most_s in ((words, 1e-3), (picture, 50e-3)):
        before = len(servers.server.had_for_s())
        for _ in range(11):
            assert servers.server.chat(content, max_tokens=1)[0] == 200
        assert median(servers.server.had_for_s()[before:]) < most_s
    assert preprocessed(servers.server) == seen


def test_an_engine_that_encodes_says_again_what_it_has_said(servers: Servers) -> None:
    key = {"headers": {"Authorization": f"Bearer {KEY}"}}
    for _ in range(5):
        url = new_url()
        status, first = servers.encoder.chat(shown(url), max_tokens=1, **key)
        assert status == 200, first
        [(name, said)] = first["ec_transfer_params"].items()
        if said.get("metadata"):
            break  # else it was stored a moment after this was said
    eventually(lambda: name in {entry.key.mm_hash for entry in servers.daemon.entries()})
    before = preprocessed(servers.encoder), forwards(servers.encoder)
    status, second = servers.encoder.chat(shown(url, "and this?"), max_tokens=1, **key)
    assert (status, preprocessed(servers.encoder), forwards(servers.encoder)) == (200, *before)
    assert second["ec_transfer_params"] == first["ec_transfer_params"]
    assert second.keys() <= first.keys()
    assert second["choices"][0].keys() <= first["choices"][0].keys()
    assert second["choices"][0]["message"].items() <= first["choices"][0]["message"].items()
    assert second["choices"][0]["finish_reason"] == first["choices"][0]["finish_reason"]
    status, _ = servers.encoder.chat(shown(url), max_tokens=1)
    assert status == 401
    assert servers.encoder.chat(shown(url), model="another", **key)[0] == 404


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_fails_without_its_pictures_is_made_with_them(
    servers: Servers, streams: bool
) -> None:
    """An entry of another shape lies under the picture's name, with metadata of the right form."""
    time.sleep(2.5)  # for which it rests after the last such request
    url = new_url()
    before = servers.daemon.status().counters.puts
    servers.right(shown(url))
    eventually(lambda: servers.daemon.status().counters.puts == before + 1)
    entry = max(servers.daemon.entries(), key=lambda entry: entry.entry)
    with Client(servers.daemon.address, namespace=entry.key.namespace) as client:
        servers.daemon.evict(entry.key)
        shape = (entry.content.shape[0] + 1, entry.content.shape[1])
        nbytes = entry.content.nbytes // entry.content.shape[0] * shape[0]
        put = client.put_bytes(
            *(entry.key.mm_hash, bytes(nbytes), entry.content.dtype, shape),
            metadata=entry.content.metadata,
        )
        assert put
    said = "a request without its pictures failed, and was made with them"
    before = servers.server.text().count(said)
    if streams:
        servers.right_streamed(shown(url, "what is it?"))
    else:
        servers.right(shown(url, "what is it?"))
    assert servers.server.text().count(said) == before + 1


def test_vllm_0_28_serves_as_ever_and_is_told_why(
    model_of: Callable[[str], Path], shared_daemon: Daemon, tmp_path: Path
) -> None:
    version, model = installed("0.28.0"), model_of("qwen2_5_vl")
    extra = {"ecd_address": shared_daemon.address}
    server = api_server(version, tmp_path / "log", model, "ec_both", MIDDLEWARE, **extra)
    try:
        server.wait_ready()
        said = "ecd: pictures are preprocessed as ever: this version of vLLM takes no metadata"
        eventually(lambda: said in server.text(), 30)
        for _ in range(2):
            assert server.chat(shown(new_url()))[0] == 200
    finally:
        server.close()
