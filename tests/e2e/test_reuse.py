"""The middleware in vLLM's own server: what ecd has is neither preprocessed nor encoded again."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import NIGHTLY, VERSIONS, installed
from e2e.gates import Gate
from e2e.servers import Server, api_server, picture_url
from e2e.shared import EXACT, TRUST, Engines, Pictures, PlainServer
from ecd_client import Client
from support.daemon import Daemon
from support.waiting import eventually
from support.web import site

pytestmark = pytest.mark.timeout(600)
MIDDLEWARE = ["--middleware", "ecd_client.vllm.ReuseMiddleware"]
OTHER = ["--middleware", "passing_middleware.passes"]
"""An operator's own, which vLLM calls after ecd's."""
KEY = "a key of the tests"
CALLER = {"Authorization": f"Bearer {KEY}"}
READY = "ecd: pictures that are stored are not preprocessed"
CALM = {"CALM": "1"}
"""For `counting_server.py` and `counting_worker.py`: no answer depends on a busy machine."""


class Servers:
    """An engine that encodes for others, and one that does all, whose steps pass a gate."""

    def __init__(self, daemon: Daemon, start: Callable[..., Server], gate: Gate) -> None:
        self.daemon, self.gate = daemon, gate
        self.encoder = start("ec_producer", [*MIDDLEWARE, "--api-key", KEY], CALM)
        wrong = {"ECD_ENCODERS": "http://encoder-1:8000,encoder-2:8000"}
        environ = {**CALM, **wrong, "STEP_GATE": str(gate.path)}
        self.server = start("ec_both", [*OTHER, *MIDDLEWARE, TRUST], environ)
        self.plain: PlainServer

    def right(self, content: list[dict], **options: object) -> None:
        """The answer is the plain engine's."""
        status, body = self.server.chat(content, **options)
        assert status == 200, f"{body}\n{self.server.text()[-3000:]}"
        assert answer(body) == answer(self.plain.chat(content, **options))

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


def preprocessed(server: Server) -> int:
    return server.text().count("media are preprocessed")


def encoded(server: Server) -> float:
    return server.metrics().get("misses", 0)


def failures(servers: Servers) -> int:
    said = "a request without its media failed, and was made with them"
    return servers.server.text().count(said)


def forwards(server: Server) -> int:
    """Of the vision tower, those at the start included."""
    return server.text().count("pictures are encoded")


@pytest.fixture(scope="session", params=[VERSIONS[0], NIGHTLY])
def version(request: pytest.FixtureRequest) -> str:
    return installed(request.param)


@pytest.fixture(scope="module")
def running(
    version: str, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("servers")
    daemon = Daemon(directory, "64MiB").start()
    started: list[Server] = []

    def start(role: str, flags: Sequence[str], environ: dict[str, str]) -> Server:
        log, model = directory / f"{role}.log", engines.model(version)
        how = {"counting": True, "environ": environ, "ecd_address": daemon.address}
        started.append(api_server(version, log, model, role, [*flags, *EXACT], **how))
        return started[-1]

    try:
        servers = Servers(daemon, start, Gate(directory / "steps"))
        for server in started:
            server.wait_ready()
            eventually(lambda server=server: READY in server.text())
        daemon.wait_for_clients(3 * len(started))  # the middleware has one, too
        yield servers
    finally:
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, started))
        daemon.close()


@pytest.fixture
def servers(running: Servers, plain_server: PlainServer) -> Iterator[Servers]:
    """No step waits at the gate."""
    running.plain = plain_server
    yield running
    running.gate.open()


@pytest.fixture
def stored(servers: Servers, new: Pictures) -> str:
    """The URL of a picture that ecd has."""
    return store(servers, new.url())


def store(servers: Servers, url: str) -> str:
    before = servers.daemon.status().counters.puts
    servers.right(shown(url))
    eventually(lambda: servers.daemon.status().counters.puts == before + 1)
    return url


def store_elsewhere(servers: Servers, url: str) -> str:
    """The same, of a picture that the server itself has not seen, while it may store others."""
    status, body = servers.encoder.chat(shown(url), CALLER, max_tokens=1)
    assert status == 200
    [name] = body["ec_transfer_params"]
    eventually(lambda: name in servers.daemon.names(), "it is stored")
    return url


def test_a_picture_that_is_stored_is_neither_preprocessed_nor_encoded(
    servers: Servers, stored: str
) -> None:
    before = preprocessed(servers.server), forwards(servers.server)
    servers.right(shown(stored, "is this the other picture?"))
    both = [*shown(stored)[:1], *shown(stored, "are these the same?")]
    servers.right(both)
    assert (preprocessed(servers.server), forwards(servers.server)) == before


def test_a_picture_with_a_transparent_colour_is_reused_as_others_are(
    servers: Servers, new: Pictures
) -> None:
    """Since 0.33 vLLM lays it on a background, and names it by that, too."""
    url = store_elsewhere(servers, new.url(transparent=True))
    before = preprocessed(servers.server), forwards(servers.server)
    servers.right(shown(url))
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
    said = "nothing is sent to encoders: ECD_ENCODERS has 'encoder-2:8000'; it must be URLs"
    assert said in servers.server.text()


def test_one_new_picture_beside_a_stored_one_leaves_the_request_as_it_is(
    servers: Servers, stored: str, new: Pictures
) -> None:
    before = preprocessed(servers.server)
    servers.right([*shown(stored)[:1], *shown(new.url())])
    assert preprocessed(servers.server) > before


def test_requests_that_change_the_names_of_pictures_pass_as_they_are(
    servers: Servers, stored: str
) -> None:
    before = preprocessed(servers.server)
    servers.right(shown(stored), mm_processor_kwargs={})
    assert preprocessed(servers.server) == before
    servers.right(shown(stored), media_io_kwargs={"image": {"image_mode": "RGB"}})
    assert preprocessed(servers.server) > before


def test_a_url_is_fetched_once_and_never_taken_for_its_content(
    servers: Servers, new: Pictures
) -> None:
    contents = [b64decode(new.url().partition(",")[2]) for _ in range(2)]

    def is_right(content: bytes, text: str) -> None:
        data = f"data:image/png;base64,{b64encode(content).decode()}"
        expected = answer(servers.plain.chat(shown(data, text)))
        assert answer(servers.server.chat(shown(url, text))[1]) == expected

    with site() as (url, page):
        for content in contents:
            page["content"] = content
            page["asked"] = 0
            assert servers.server.chat(shown(url))[0] == 200
            assert page["asked"] == 1, "a new picture is fetched once"
            is_right(content, "what is in this picture?")
        before = preprocessed(servers.server)
        is_right(contents[-1], "what is this?")
        assert preprocessed(servers.server) == before


def test_a_picture_that_vllm_would_not_take_is_not_taken(servers: Servers, stored: str) -> None:
    assert servers.server.chat(shown(stored))[0] == 200
    assert servers.server.chat([{"type": "image_url", "image_url": stored}])[0] == 400


def test_a_tenants_picture_is_not_anothers(servers: Servers, new: Pictures) -> None:
    """Each of two tenants has it encoded once, and neither can use it by the other's name."""
    url = new.url()
    for salt in ("one", "other", None):
        before = forwards(servers.server), servers.daemon.status().counters.puts
        servers.right(shown(url), **({"cache_salt": salt} if salt else {}))
        assert forwards(servers.server) == before[0] + 1
        eventually(lambda puts=before[1]: servers.daemon.status().counters.puts == puts + 1)
        seen = preprocessed(servers.server), forwards(servers.server)
        servers.right(shown(url, "and now?"), **({"cache_salt": salt} if salt else {}))
        assert (preprocessed(servers.server), forwards(servers.server)) == seen


def test_a_tenants_name_says_nothing_to_others(servers: Servers, new: Pictures) -> None:
    status, said = servers.encoder.chat(
        shown(new.url()), CALLER, max_tokens=1, cache_salt="a tenant's"
    )
    assert status == 200
    [(name, item)] = said["ec_transfer_params"].items()
    bare = [{"type": "image_embeds", "image_embeds": item["metadata"], "uuid": name}]
    texts = [{"type": "text", "text": "what is it?"}]
    assert servers.server.chat([*bare, *texts], cache_salt="a tenant's")[0] == 200
    for other in ({}, {"cache_salt": "another's"}):
        assert servers.server.chat([*bare, *texts], **other)[0] >= 400
        named = [{"type": "image_url", "image_url": {"url": "data:,"}, "uuid": name}]
        assert servers.encoder.chat(named, CALLER, max_tokens=1, **other)[0] >= 400
    servers.right(shown(new.url()))


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


def test_an_engine_that_encodes_says_again_what_it_has_said(
    servers: Servers, new: Pictures
) -> None:
    url = new.url()
    status, first = servers.encoder.chat(shown(url), CALLER, max_tokens=1)
    assert status == 200, first
    [(name, said)] = first["ec_transfer_params"].items()
    assert said["metadata"]
    assert name in servers.daemon.names()
    before = preprocessed(servers.encoder), forwards(servers.encoder)
    status, second = servers.encoder.chat(shown(url, "and this?"), CALLER, max_tokens=1)
    assert (status, preprocessed(servers.encoder), forwards(servers.encoder)) == (200, *before)
    assert second["ec_transfer_params"] == first["ec_transfer_params"]
    assert second.keys() <= first.keys()
    assert second["choices"][0].keys() <= first["choices"][0].keys()
    assert second["choices"][0]["message"].items() <= first["choices"][0]["message"].items()
    assert second["choices"][0]["finish_reason"] == first["choices"][0]["finish_reason"]
    status, _ = servers.encoder.chat(shown(url), max_tokens=1)
    assert status == 401
    assert servers.encoder.chat(shown(url), CALLER, model="another")[0] == 404


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_fails_without_its_pictures_is_made_with_them(
    servers: Servers, streams: bool, new: Pictures
) -> None:
    """An entry of another width lies under the picture's name, with metadata of the right form."""
    url = store(servers, new.url())
    entry = max(servers.daemon.entries(), key=lambda entry: entry.entry)
    with Client(servers.daemon.address, namespace=entry.key.namespace) as client:
        servers.daemon.evict(entry.key)
        shape = (entry.content.shape[0], entry.content.shape[1] + 1)
        nbytes = entry.content.nbytes // entry.content.shape[1] * shape[1]
        put = client.put_bytes(
            *(entry.key.mm_hash, bytes(nbytes), entry.content.dtype, shape),
            metadata=entry.content.metadata,
        )
        assert put
    bystander, before = store_elsewhere(servers, new.url()), failures(servers)
    if streams:
        servers.right_streamed(shown(url, "what is it?"))
    else:
        servers.right(shown(url, "what is it?"))
    assert failures(servers) == before + 1
    servers.right(shown(url, "and again?"))
    assert failures(servers) == before + 1, "it rests"
    seen = preprocessed(servers.server)
    servers.right(shown(bystander, "and this?"))
    assert preprocessed(servers.server) == seen, "it alone"


def test_a_name_that_a_client_has_chosen_keeps_no_other_picture_in_its_requests(
    servers: Servers, new: Pictures
) -> None:
    """A small picture is called like a large one: the text has room beside the small one alone."""
    large, small = picture_url(0, 560, 560), picture_url(0, 84, 84)

    def named(url: str, words: int) -> list[dict]:
        [part, text] = shown(url, "word " * words)
        return [{**part, "uuid": "a name that a client has chosen"}, text]

    def tokens(words: int) -> int:
        status, body = servers.server.chat(named(small, words)[1:], max_tokens=1)
        assert status == 200
        return body["usage"]["prompt_tokens"]

    words = 1750 * 100 // (tokens(200) - tokens(100))
    assert servers.encoder.chat(named(large, 1), CALLER, max_tokens=1)[0] == 200
    bystander, before = store_elsewhere(servers, new.url()), failures(servers)
    assert servers.server.chat(named(small, words), max_tokens=1)[0] == 200
    assert failures(servers) == before + 1
    seen = preprocessed(servers.server)
    servers.right(shown(bystander, "and this?"))
    assert preprocessed(servers.server) == seen
    assert servers.server.chat(named(large, 1), max_tokens=1)[0] == 200
    assert preprocessed(servers.server) == seen, "nor that of its name"


def answering(servers: Servers, url: str, lines: int) -> Any:
    """A streamed answer of which so many lines have come, while the engine waits at the gate."""
    servers.gate.shut()
    servers.gate.let(4)
    stream = servers.server.open(shown(url), None, {"stream": True, "max_tokens": 1500})
    for _ in range(2 * lines):  # each with an empty one behind it
        stream.readline()
    return stream


def is_running(servers: Servers) -> bool:
    return servers.server.sample("vllm:num_requests_running") == 1


def test_what_a_request_or_an_answer_needs_is_not_evicted(servers: Servers, new: Pictures) -> None:
    url = store(servers, new.url())
    name = servers.daemon.names()[-1]
    store(servers, new.url())
    bystander = servers.daemon.names()[-1]
    with answering(servers, url, 1):
        servers.daemon.crowd()
        left = servers.daemon.names()
        assert is_running(servers), "its answer has begun and not ended"
    assert name in left
    assert bystander not in left
    servers.gate.open()
    eventually(lambda: not is_running(servers))

    stored = store(servers, new.url())
    status, _ = servers.encoder.chat(shown(stored), CALLER, max_tokens=1)
    assert status == 200
    servers.daemon.crowd()
    before = preprocessed(servers.server), forwards(servers.server)
    servers.right(shown(stored, "is it still there?"))
    assert (preprocessed(servers.server), forwards(servers.server)) == before


def test_a_client_that_goes_leaves_nothing_held_and_nothing_running(
    servers: Servers, stored: str
) -> None:
    """The engine stops before it has all tokens, as it hears that nobody wants them."""
    before, held = preprocessed(servers.server), held_bytes(servers)
    generated = servers.server.sample("vllm:generation_tokens_total")
    answering(servers, stored, 2).close()

    def has_stopped() -> bool:
        servers.gate.let()
        return not is_running(servers)

    eventually(has_stopped)
    servers.gate.open()
    assert servers.server.sample("vllm:generation_tokens_total") < generated + 1500
    assert preprocessed(servers.server) == before
    eventually(lambda: held_bytes(servers) <= held)


def held_bytes(servers: Servers) -> int:
    """The encoder holds what it has told of for a while."""
    return servers.daemon.status().pools[0].leased_bytes


def test_a_daemon_that_stands_still_costs_a_request_the_connectors_time(
    servers: Servers, new: Pictures
) -> None:
    """The hint has the middleware ask the daemon; a call has no other bound here."""
    [part, text] = shown(new.url())
    hinted = {"ec_transfer_params": {"a": {"ecd_node": "127.0.0.1:9465"}}}
    with servers.daemon.stopped():
        servers.right([{**part, "uuid": "a"}, text], **hinted)
    stored = store_elsewhere(servers, new.url())
    eventually(lambda: is_left_out(servers, stored))


def is_left_out(servers: Servers, stored: str) -> bool:
    before = preprocessed(servers.server)
    servers.right(shown(stored))
    return preprocessed(servers.server) == before


def test_vllm_0_28_serves_as_ever_and_is_told_why(
    engines: Engines, make_daemon: Callable[..., Daemon], tmp_path: Path, new: Pictures
) -> None:
    version = installed(VERSIONS[-1])
    extra = {"ecd_address": make_daemon().start().address}
    model = engines.model(version)
    server = api_server(version, tmp_path / "log", model, "ec_both", MIDDLEWARE, **extra)
    try:
        server.wait_ready()
        said = "ecd: all media are preprocessed each time: this version of vLLM takes no metadata"
        eventually(lambda: said in server.text())
        for _ in range(2):
            assert server.chat(shown(new.url()))[0] == 200
    finally:
        server.close()
