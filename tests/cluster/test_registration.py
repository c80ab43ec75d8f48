"""Encoders that register themselves at one daemon, as another one tells engines and operators."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ecd_client import Client
from ecd_proto.engines import Engine
from support.cli import as_json, cli
from support.daemon import Daemon
from support.pages import DOCS, printed
from support.redis import RedisServer
from support.waiting import eventually

PAGE = DOCS / "vllm-middleware.md"
NODES = "127.0.77.101:9465", "127.0.77.102:9465"


@pytest.mark.parametrize("directory", ["redis", "static"])
def test_an_encoder_of_another_node_is_known_until_its_node_dies(
    directory: str,
    make_peer: Callable[..., Daemon],
    client_of: Callable[..., Client],
    shared_redis: RedisServer,
) -> None:
    about = {"ECD_DIRECTORY": shared_redis.url, "ECD_CLUSTER": "encoders"}
    if directory == "static":
        about = {"ECD_PEERS": ",".join(NODES)}
    there, here = (make_peer(ECD_PEER_ADDRESS=node, **about).start() for node in NODES)
    engine, server = client_of(there), client_of(there)
    engine.describe(Engine("e", "m", "n", True, True, {}, "image"))
    server.register("e", "http://0.0.0.0:8000")
    client = client_of(here, namespace="n")
    url, node = "http://127.0.77.101:8000", NODES[0]
    eventually(lambda: [(each.url, each.node) for each in client.encoders()] == [(url, node)])
    assert client.encoders(namespace="other") == []
    [shown] = as_json(here, "encoders")["encoders"]
    assert (shown["url"], shown["node"], shown["own"]) == (url, node, False)
    assert f"{node} " in cli(here, "encoders").stdout
    assert as_json(there, "encoders")["encoders"][0]["own"]
    server.close()
    eventually(lambda: not client.encoders())
    client_of(there).register("e", "http://127.0.0.1:8000")
    client_of(there).register("e", "http://0.0.0.0:8001")
    eventually(lambda: [each.url for each in client.encoders()] == ["http://127.0.77.101:8001"])
    there.kill()
    eventually(lambda: not client.encoders())


def in_any_time(lines: list[str]) -> list[list[str]]:
    """The words, without how long ago an encoder was registered."""
    return [re.sub(r"[\d.]+ \w+ ago", "N ago", line).split() for line in lines]


def test_the_encoders_are_listed_as_the_page_says(
    make_peer: Callable[..., Daemon], client_of: Callable[..., Client]
) -> None:
    here, there = (
        make_peer(ECD_PEER_ADDRESS=node, ECD_PEERS=",".join(NODES)).start() for node in NODES
    )
    for daemon, requests in ((here, 2), (there, 3)):
        namespace = "Qwen/Qwen2.5-VL-7B-Instruct|main|bfloat16|3f9a"
        client_of(daemon).describe(Engine("e", "m", namespace, True, False, {}, "image"))
        client_of(daemon).register("e", "http://0.0.0.0:8000", requests)
    eventually(lambda: len(as_json(here, "encoders")["encoders"]) == 2)
    page = "\n".join(printed(PAGE, "encoders"))
    for shown, node in (("10.0.0.1", NODES[0]), ("10.0.0.2", NODES[1])):
        page = page.replace(shown, node.partition(":")[0])
    said = cli(here, "encoders").stdout
    assert in_any_time(said.splitlines()) == in_any_time(page.splitlines())
