"""Encoders that register themselves at one daemon, as another one tells engines and operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ecd_client import Client
from ecd_proto.engines import Engine
from support.cli import as_json, cli
from support.daemon import Daemon
from support.redis import RedisServer
from support.waiting import eventually

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
