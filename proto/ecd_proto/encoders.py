"""Encoders that register themselves: what is said of one, its one door, and the form of its URL."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_address
from math import isfinite
from urllib.parse import urlsplit

from ecd_proto.contract import MAX_NAMESPACE_BYTES
from ecd_proto.engines import is_id
from ecd_proto.v1 import cache_pb2 as pb

MAX_ENCODERS = 64
"""Encoders of one daemon, and of one namespace in an answer."""
MAX_URL_BYTES = 512
ALL_INTERFACES = "0.0.0.0", "::"
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[\w.-]+|\[[\w:.]+\]")


def checked_url(said: str) -> str:
    """The URL in its one form: with a port, without a slash at the end. Raises ValueError."""
    parts = urlsplit(said)
    scheme, host, port = parts.scheme, parts.hostname, parts.port
    if host and ":" in host:
        host = f"[{IPv6Address(host)}]"
    if not host or not _HOST.fullmatch(host) or scheme not in _PORTS or set(said) & set("@?#"):
        raise ValueError("not a URL such as http://encoder-1:8000")
    return f"{scheme}://{host}:{port or _PORTS[scheme]}{parts.path.rstrip('/')}"


def is_loopback(host: str) -> bool:
    """Whether the host leads nowhere but to the node itself."""
    try:
        address = ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class RegisteredEncoder:
    """An engine that encodes for others, as its API server or its daemon says."""

    engine: str
    """The id of its description."""
    url: str
    namespace: str = ""
    loads: bool = False
    """Whether it prefills, too."""
    age_s: float = 0.0
    node: str = ""
    """The host:port of its daemon's Peer service; empty: the daemon that answers."""
    active: int = 0
    """Requests with pictures that it serves, as of some seconds ago."""

    @classmethod
    def of(cls, message: pb.Encoder) -> RegisteredEncoder | None:
        """The encoder that a message names; None if it has another form, or is too long."""
        url, namespace, age_s = message.url, message.namespace, message.age_s
        if not (
            is_id(message.engine)
            and len(url) <= MAX_URL_BYTES
            and url.isascii()
            and len(namespace.encode()) <= MAX_NAMESPACE_BYTES
            and (url + namespace).isprintable()
        ):
            return None
        try:
            if checked_url(url) != url:
                return None
        except ValueError:
            return None
        age_s = age_s if isfinite(age_s) and age_s > 0.0 else 0.0
        about = namespace, message.loads, age_s, message.node, message.active
        return cls(message.engine, url, *about)

    @property
    def message(self) -> pb.Encoder:
        return pb.Encoder(**vars(self))

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def reached_at(self, host: str) -> RegisteredEncoder:
        """The same, with this host where the URL has that of all interfaces."""
        if self.host not in ALL_INTERFACES:
            return self
        parts = urlsplit(self.url)
        return replace(self, url=f"{parts.scheme}://{host}:{parts.port}{parts.path}")
