"""Mooncake's own handshake: an engine's description of itself, and a probe of its ports.

Spoken here because the library's call holds the interpreter while it waits.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

TIMEOUT_S = 1.0
MAX_BYTES = 1 << 20
METADATA = b"\x01"
"""The request for a node's description."""


async def describe(endpoint: str, within_s: float | None = None) -> dict[str, Any]:
    """The engine's description of itself: protocol, data port, registered memory.

    Raises OSError: it cannot be reached `within_s`, by default TIMEOUT_S, or does not speak it.
    """
    host, _, port = endpoint.rpartition(":")
    if not 0 < int(port) < 65536:
        raise OSError(f"{endpoint} has no such port")
    within_s = TIMEOUT_S if within_s is None else within_s
    try:
        return await asyncio.wait_for(_describe(host, int(port)), within_s)
    except asyncio.TimeoutError:
        raise TimeoutError(f"{endpoint} did not answer within {within_s} s") from None


async def _describe(host: str, port: int) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        asked = METADATA + b"{}"
        writer.write(struct.pack("<Q", len(asked)) + asked)
        (length,) = struct.unpack("<Q", await reader.readexactly(8))
        if not 0 < length <= MAX_BYTES:
            raise OSError(f"{host}:{port} does not speak Mooncake's handshake")
        answer = json.loads((await reader.readexactly(length))[1:])
        if not isinstance(answer, dict):
            raise OSError(f"{host}:{port} does not speak Mooncake's handshake")
        return answer
    except (asyncio.IncompleteReadError, ValueError, RecursionError):
        raise OSError(f"{host}:{port} does not speak Mooncake's handshake") from None
    finally:
        writer.close()


async def probe(endpoint: str) -> str:
    """The protocol of the engine at host:port, once both its ports are seen to answer there.

    First contact of the engine itself with an address that does not answer would hold up every
    other transfer. Raises OSError.
    """
    described = await describe(endpoint)
    protocol = str(described.get("protocol"))
    if protocol == "tcp":
        host, port = described.get("tcp_data_host"), described.get("tcp_data_port")
        if not (isinstance(host, str) and isinstance(port, int) and 0 < port < 65536):
            raise OSError(f"{endpoint} names no data port")
        if host != endpoint.rpartition(":")[0]:
            raise OSError(f"{endpoint} names a data port on another machine, {host[:256]}")
        connecting = asyncio.open_connection(host, port)
        try:
            _, writer = await asyncio.wait_for(connecting, TIMEOUT_S)
        except asyncio.TimeoutError:
            raise TimeoutError(f"data port {host}:{port} of {endpoint} does not answer") from None
        writer.close()
    return protocol
