"""A node that speaks the real protocol, with a real engine, and lies.

    python lying_peer.py NODE PORTS LIE [SECONDS]

Has every key that is asked of it: NBYTES of the seed 1. LIE names what is wrong with its answer;
one that dies with the lease does so SECONDS after the answer, and one whose memory is another's
from the second lease on takes SECONDS to answer that.
"""

import asyncio
import ctypes
import os
import secrets
import sys

import grpc

from ecd.base.checksum import digests, fold
from ecd.base.clock import REAL
from ecd.cluster.transport.engine import EngineSettings, ReadEngine
from ecd.rpc.peer.peer_token import TokenCheck
from ecd_proto.contract import CONTRACT_VERSION
from ecd_proto.mapped_file import MappedFile
from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc
from support.node_client import content

NBYTES, SMALL_BYTES = 3 << 20, 60 << 10
LIES = {
    "truth": lambda peer, said: None,
    "wrong checksum": lambda peer, said: setattr(said, "checksum", said.checksum ^ 1),
    "wrong bytes": lambda peer, said: peer.spoil(),
    "another place": lambda peer, said: setattr(said, "address", said.address + 4096),
    "memory of others": lambda peer, said: setattr(said, "address", 4096),
    "beyond the end": lambda peer, said: setattr(said, "address", said.address + (4 << 20) - 4096),
    "an address beyond all": lambda peer, said: setattr(said, "address", (1 << 64) - 4096),
    "too few bytes": lambda peer, said: peer.resize(said, NBYTES - 4096),
    "too many bytes": lambda peer, said: peer.resize(said, NBYTES + 4096),
    "more than any pool": lambda peer, said: peer.resize(said, 1 << 50),
    "length and shape differ": lambda peer, said: setattr(said.content, "nbytes", NBYTES - 1),
    "unknown dtype": lambda peer, said: setattr(said.content, "dtype", "float99"),
    "too much metadata": lambda peer, said: setattr(said.content, "metadata", b"x" * 5000),
    "no content": lambda peer, said: said.ClearField("content"),
}
"""What is wrong with a lease; those below are wrong elsewhere."""
OTHER_LIES = (
    *("another incarnation", "no identity", "an identity nowhere", "a lease of no time"),
    *("a dead engine", "no engine"),
    *("another protocol", "another contract", "no answer", "an answer to nobody", "hangs up"),
    *("dies with the lease", "refuses", "a lease for ever", "a lease of no number"),
    *("an engine elsewhere", "an engine whose port is of other digits", "a pool beyond all"),
    *("a zone of 65 characters", "a description of 16 KiB", "an answer to another question"),
    *("other bytes with the lease", "some bytes with the lease", "bytes from nowhere"),
    *("late bytes", "more bytes than asked for"),
    *("elsewhere is here", "elsewhere is the asker", "elsewhere is nowhere"),
)
LATE_TTL_S = 1e-9
"""Every answer comes later."""
LATER = "another's memory from the second lease on"


class LyingPeer(pb_grpc.PeerServicer):
    def __init__(self, node: str, ports: str, lie: str, seconds: str = "0.001") -> None:
        self.node, self.lie, self.seconds = node, lie, float(seconds)
        self.incarnation = secrets.token_hex(16)
        self.leases = 0
        self.elsewhere: dict[str, str] = {}  # where lies send the asker
        host = node.partition(":")[0]
        self.memory = MappedFile.of_memory(4 << 20)
        self.memory.view(0, NBYTES)[:] = content(NBYTES, 1)
        self.engine = ReadEngine(
            EngineSettings(host, "tcp", ports), bytes.fromhex(self.incarnation)
        )
        self.identity_address = self.engine.identity_address
        if lie == LATER:
            self.identity_address = self.memory.address + NBYTES
            self.memory.view(NBYTES, 16)[:] = bytes.fromhex(self.incarnation)

    def spoil(self) -> None:
        ctypes.c_ubyte.from_address(self.memory.address + NBYTES - 1).value ^= 1

    def resize(self, said: pb.PeerLeased, nbytes: int) -> None:
        said.content.nbytes = nbytes
        said.content.shape[:] = [nbytes]

    def describe(self) -> pb.NodeDescription:
        told = pb.NodeDescription(
            contract_version=CONTRACT_VERSION,
            daemon="a test",
            node=self.node,
            incarnation=self.incarnation,
            engine=self.engine.endpoint,
            protocol="tcp",
            identity_address=self.identity_address,
            lease_ttl_s=LATE_TTL_S if self.lie == "late bytes" else 30.0,
            pools=[pb.PeerPool(address=self.memory.address, nbytes=4 << 20)],
        )
        match self.lie:
            case "another incarnation":
                told.incarnation = secrets.token_hex(16)
            case "no identity":
                told.incarnation, told.identity_address = "not hex", 0
            case "an identity nowhere":
                told.identity_address = 4096
            case "a lease of no time":
                told.lease_ttl_s = 0.0
            case "a lease for ever":
                told.lease_ttl_s = 1e308
            case "a lease of no number":
                told.lease_ttl_s = float("nan")
            case "an engine elsewhere":
                told.engine = "127.0.99.99:" + self.engine.endpoint.partition(":")[2]
            case "an engine whose port is of other digits":
                host, _, port = told.engine.partition(":")
                told.engine = f"{host}:{chr(0xFF10 + int(port[0]))}{port[1:]}"
            case "a zone of 65 characters":
                told.zone = "z" * 65
            case "a description of 16 KiB":
                told.daemon = "d" * (16 << 10)
            case "a pool beyond all":
                told.pools[0].address, told.pools[0].nbytes = (1 << 64) - 4096, 1 << 40
            case "a dead engine":
                told.engine = self.engine.endpoint.partition(":")[0] + ":1"
            case "no engine":
                told.engine = ""
            case "another protocol":
                told.protocol = "rdma"
            case "another contract":
                told.contract_version = 99
        return told

    def leased(self, ticket: int) -> pb.LeaseOutcome:
        if (node := self.elsewhere.get(self.lie)) is not None:
            return pb.LeaseOutcome(ticket=ticket, elsewhere=pb.Elsewhere(node=node))
        data = self.memory.view(0, NBYTES)
        said = pb.PeerLeased(
            lease=1,
            content=cache_pb2.Content(dtype="uint8", shape=[NBYTES], nbytes=NBYTES),
            address=self.memory.address,
            checksum=fold(digests(data)),
        )
        LIES.get(self.lie, LIES["truth"])(self, said)
        match self.lie:
            case "bytes from nowhere":
                self.resize(said, SMALL_BYTES)
                data, said.address = data[:SMALL_BYTES], 4096
                said.bytes, said.checksum = bytes(data), fold(digests(data))
            case "late bytes":
                self.resize(said, SMALL_BYTES)
                data = data[:SMALL_BYTES]
                said.bytes, said.checksum = bytes(data), fold(digests(data))
            case "more bytes than asked for":
                said.bytes = bytes(data)
            case "other bytes with the lease":
                self.resize(said, SMALL_BYTES)
                said.bytes = bytes(SMALL_BYTES)
            case "some bytes with the lease":
                self.resize(said, SMALL_BYTES)
                said.bytes = bytes(data[: SMALL_BYTES - 1])
        return pb.LeaseOutcome(ticket=ticket, leased=said)

    async def Link(self, requests, context):  # noqa: N802
        await TokenCheck(self.node, os.environ.get("ECD_PEER_TOKEN"), REAL).check(context)
        hello = (await anext(requests)).hello
        self.elsewhere = {
            "elsewhere is here": self.node,
            "elsewhere is the asker": hello.node,
            "elsewhere is nowhere": "x" * 100_000,
        }
        await context.write(pb.LinkReply(welcome=self.describe()))
        async for request in requests:
            if request.WhichOneof("request") != "lease":
                continue
            if self.lie == "hangs up":
                return
            if self.lie == "refuses":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many sessions")
            if self.lie == "no answer":
                continue
            tickets = [item.ticket for item in request.lease.keys]
            if self.lie == "an answer to another question":
                for ticket in tickets:
                    await context.write(pb.LinkReply(found=pb.FoundKeys(ticket=ticket)))
                continue
            if self.lie == "an answer to nobody":
                tickets = [ticket + 1000 for ticket in tickets for _ in range(100)]
            loop = asyncio.get_running_loop()
            if self.lie == LATER and self.leases > 0:
                self.memory.view(NBYTES, 16)[:] = bytes(16)
                in_time = asyncio.Event()
                loop.call_later(self.seconds, in_time.set)
                await in_time.wait()
            self.leases += 1
            outcomes = pb.LeaseOutcomes(outcomes=map(self.leased, tickets))
            await context.write(pb.LinkReply(leases=outcomes))
            if self.lie == "dies with the lease":
                loop.call_later(self.seconds, os._exit, 9)


async def main() -> None:
    peer = LyingPeer(*sys.argv[1:])
    assert peer.lie in (*LIES, *OTHER_LIES, LATER)
    await peer.engine.verify("tcp")
    await peer.engine.register(peer.memory)
    server = grpc.aio.server()
    pb_grpc.add_PeerServicer_to_server(peer, server)
    server.add_insecure_port(peer.node)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
