"""A node that speaks the real protocol, with a real engine, and alters what it answers.

    python fuzzing_peer.py PORTS NBYTES NODE...

Has every key of NAMESPACE: NBYTES of the seed 1. A number on stdin is what answers are
altered by from then on.
"""

from __future__ import annotations

import asyncio
import sys
from random import Random

import grpc

from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb
from support import lying_peer
from support.fuzz import mutated
from support.lying_peer import LyingPeer

NAMESPACE = "of another node"
WELCOMES, ANSWERS = 0.1, 0.5
"""How many of them are altered."""


class FuzzingPeer(LyingPeer):
    def __init__(self, node: str, ports: str) -> None:
        super().__init__(node, ports, "truth")
        self.chance = Random(0)

    def altered(self, reply: pb.LinkReply) -> bytes:
        described = self.describe()
        known = {
            "address": [
                *(self.memory.address, described.identity_address),
                *(0, (1 << 64) - 4096, (1 << 64) - 1),
            ],
            "checksum": [0],
            "ticket": [1, 2, 3],
            "nbytes": [lying_peer.NBYTES],
            "dtype": ["int8"],
            "node": [self.node],
            "incarnation": [self.incarnation],
            "protocol": ["tcp"],
            "found": [True],
        }
        for _ in range(100):
            data = mutated(reply, self.chance, known)
            if _leads_nowhere(data, described.engine):
                return data
        return reply.SerializeToString()

    async def link(self, requests, context):
        context_write = context.write
        await anext(requests)
        welcome = pb.LinkReply(welcome=self.describe())
        is_plain = self.chance.random() >= WELCOMES
        await context_write(welcome.SerializeToString() if is_plain else self.altered(welcome))
        async for request in requests:
            match request.WhichOneof("request"):
                case "lease":
                    outcomes = [
                        self.leased(item.ticket) if has(item.key) else _missing(item.ticket)
                        for item in request.lease.keys
                    ]
                    reply = pb.LinkReply(leases=pb.LeaseOutcomes(outcomes=outcomes))
                case "find":
                    found = [has(key) and self.chance.random() < 0.5 for key in request.find.keys]
                    said = pb.FoundKeys(ticket=request.find.ticket, found=found)
                    reply = pb.LinkReply(found=said)
                case _:
                    continue
            is_plain = self.chance.random() >= ANSWERS
            await context_write(reply.SerializeToString() if is_plain else self.altered(reply))


def has(key: cache_pb2.Key) -> bool:
    return key.namespace == NAMESPACE


def _missing(ticket: int) -> pb.LeaseOutcome:
    return pb.LeaseOutcome(ticket=ticket, missing=cache_pb2.Missing())


def _leads_nowhere(data: bytes, engine: str) -> bool:
    """Whether nobody is made to connect anywhere but to this engine."""
    try:
        said = pb.LinkReply.FromString(data)
    except Exception:
        return True
    return said.welcome.engine in ("", engine, "x:0", "127.0.81.1:1")


async def main() -> None:
    ports, nbytes, *nodes = sys.argv[1:]
    lying_peer.NBYTES = int(nbytes)
    peer = FuzzingPeer(nodes[0], ports)
    await peer.engine.verify("tcp")
    await peer.engine.register(peer.memory)
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        peer.link, request_deserializer=pb.LinkRequest.FromString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("ecd.v1.Peer", {"Link": handler}),)
    )
    for node in nodes:
        server.add_insecure_port(node)
    await server.start()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        peer.chance = Random(int(line))
        print("ok", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
