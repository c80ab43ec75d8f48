"""Encoders that register themselves: this server's registration, and those of others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ecd_client.client import Client
from ecd_client.errors import DaemonTooOld, EcdError
from ecd_client.vllm.middleware.hop.encoders import KEPT_S
from ecd_proto.encoders import RegisteredEncoder, checked_url

if TYPE_CHECKING:
    from ecd_client.vllm.middleware.hop.encode_hop import EncodeHop

logger = logging.getLogger(f"vllm.{__name__}")

URL_VARIABLE = "ECD_ENCODER_URL"
OFF = "off"
"""The value of the variable for a server that is not registered."""
ASK_S = 1.0
"""Pause between two questions for the encoders, and between two reports of this one's load."""


def server_url(args: Any, environment: Mapping[str, str]) -> str | None:
    """The URL at which other engines reach a server with these arguments of vLLM.

    The host 0.0.0.0 stands for the node. None: nobody reaches it. Raises ValueError for a wrong
    variable.
    """
    if said := environment.get(URL_VARIABLE, "").strip():
        return None if said == OFF else checked_url(said)
    if getattr(args, "uds", None) or not args.port:
        return None
    host, has_tls = args.host or "0.0.0.0", args.ssl_keyfile or args.ssl_certfile
    shown = f"[{host}]" if ":" in host else host
    return checked_url(f"{'https' if has_tls else 'http'}://{shown}:{args.port}")


def urls_of(encoders: Sequence[RegisteredEncoder], own_engine: str) -> list[str]:
    """The URLs of all but this engine; of those that prefill, too, only if there are no others."""
    others = [each for each in encoders if each.engine != own_engine]
    encode_only = [each for each in others if not each.loads]
    return [each.url for each in encode_only or others]


async def repeat(act: Callable[[], Awaitable[None]]) -> None:
    """Act every ASK_S, until cancelled."""
    never = asyncio.get_running_loop().create_future()
    while True:
        await act()
        await asyncio.wait([never], timeout=ASK_S)


class Registration:
    """Registers this server as an encoder, with the number of requests that it serves."""

    def __init__(self, client: Client, engine: str, url: str, active: Callable[[], int]) -> None:
        """`active` counts them. Raises InvalidArgument."""
        self._client, self._engine, self._url = client, engine, url
        self._read_active, self._active = active, 0
        client.register(engine, url)

    async def report(self) -> None:
        """Report the number if it has changed."""
        if (active := self._read_active()) != self._active:
            self._active = active
            self._client.register(self._engine, self._url, active)


class Registered:
    """Keeps the encoders of a hop those that are registered in the engine's namespace."""

    def __init__(
        self, client: Client, engine: str, namespace: Callable[[], str | None], hop: EncodeHop
    ) -> None:
        """`engine` is this one's id; `namespace` reads its own, None while it shares nothing."""
        self._client, self._engine, self._hop = client, engine, hop
        self._read_namespace = namespace
        self._namespace: str | None = None
        self._is_too_old = False

    async def ask(self) -> None:
        """Use the encoders that the daemon knows; while it does not answer, those from before."""
        namespace = self._read_namespace()
        if namespace != self._namespace:
            self._namespace = namespace
            self._hop.use([], 0.0)  # they store under another name
        if namespace is not None:
            known = await asyncio.to_thread(self._known, namespace)
            if known is not None:
                self._hop.use(urls_of(known, self._engine), KEPT_S)

    def _known(self, namespace: str) -> Sequence[RegisteredEncoder] | None:
        try:
            known = self._client.encoders(namespace=namespace)
        except DaemonTooOld as error:
            if not self._is_too_old:
                logger.warning("ecd: nothing is sent to encoders: %s", error)
            self._is_too_old = True
            return None
        except EcdError:
            return None
        self._is_too_old = False
        return known
