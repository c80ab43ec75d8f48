"""Every setting of the daemon, as one frozen model."""

from __future__ import annotations

import os
import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    ByteSize,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    SettingsConfigDict,
)

from ecd.core.model.rules import Rules
from ecd.settings import config_rules
from ecd_proto.contract import NODE_PATTERN, as_address, default_address

ENV_PREFIX = "ECD_"
NOT_OURS = {"ECD_REQUIRE_VLLM"}
"""Variables with our prefix that the daemon has no use for."""
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")
KERNEL_PORTS = range(32768, 61000)
"""Linux' ports for outgoing connections; Mooncake ignores a port range that lies among them."""
MIN_ENGINE_PORTS = 2
MAX_ZONE_LENGTH = 64
SECRETS = ("peer_token",)
"""Settings whose flag is refused: every user of the machine can read a process's arguments."""
RULES = ("namespace_quotas", "namespace_ttls")
RELOADABLE = ("log_level", "peers", "hint_networks", "fetch_timeout_s", "slow_log_s", *RULES)
"""Settings that a running daemon takes over on SIGHUP."""


class ConfigError(Exception):
    """A setting is wrong; the message names it, its origin and what is allowed."""


def default_disk_dir() -> Path:
    """Where this user's caches lie."""
    home = os.path.expanduser("~")  # "~" itself for a user without a home
    if os.geteuid() == 0 or home == "~":
        return Path("/var/cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache")


class Config(BaseSettings):
    """The daemon's settings. The defaults need no file and no other service."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    address: str = Field(
        default_factory=default_address, description="Unix socket for the engines on this node."
    )
    name: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Tells daemons on one node apart. Letters, digits, dots, dashes, underscores.",
    )
    shm_dir: str = Field(default="/dev/shm", description="A tmpfs directory for the host pool.")
    # ByteSize takes "75%" for 75 bytes, but for the least size.
    host_pool_bytes: Annotated[ByteSize, Field(ge=config_rules.MIN_POOL_BYTES)] | str | None = (
        Field(
            default=None,
            description="Size of the host pool, such as 4GiB, 1MiB at least, or a share of "
            "shm_dir's size, such as 75%. By default a quarter of what shm_dir has free, at most "
            "4 GiB.",
        )
    )
    eviction: Literal["value", "lru"] = Field(
        default="value",
        description="Which entries of the host pool are evicted first. value: those that save the "
        "least encoding time per byte, weighed by how often they are read. lru: those read "
        "longest ago.",
    )
    namespace_quotas: Annotated[dict[str, int | str], NoDecode] = Field(
        default={},
        description="Most of the host pool that one namespace may have, by patterns of names: "
        "PATTERN=2GiB,*=10%, or a TOML table. An exact name wins over a pattern, a longer pattern "
        "over a shorter. By default all of it.",
    )
    namespace_ttls: Annotated[dict[str, float], NoDecode] = Field(
        default={},
        description="The age, since their put, at which entries are evicted, by patterns of their "
        "namespaces' names: PATTERN=30m,*=7d, or a TOML table. By default none.",
    )
    trace: Path | None = Field(
        default=None,
        description="A file for a trace of what decides evictions, for `ecd replay`. Each start "
        "overwrites it, and it grows until the daemon ends. Keys are salted. By default none.",
    )
    device_pool_bytes: ByteSize = Field(
        default=ByteSize(0),
        description="Size of a pool in the memory of each GPU, such as 2GiB, taken at the start. "
        "Engines on that GPU copy from it what any of them has loaded. 0: none.",
    )
    devices: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="The GPUs that have such a pool, by UUID or number, separated by commas. By "
        "default all that the daemon sees.",
    )
    disk_pool_bytes: ByteSize = Field(
        default=ByteSize(0),
        description="Size of the disk tier, such as 200GiB: entries that memory will soon evict "
        "are written to files, and read back on demand. 0: none.",
    )
    disk_dir: Path = Field(
        default_factory=default_disk_dir,
        description="A directory on a local disk, in which the daemon makes one of its own for the "
        "disk tier. It must exist: name one below the disk's mount point.",
    )
    disk_write_bytes_per_s: ByteSize = Field(
        default=ByteSize(20_000_000),
        gt=0,
        description="The most that may be written to the disk tier on average, such as 50MB. "
        "Writing wears a disk.",
    )
    warm_restart: bool | None = Field(
        default=None,
        description="true: on SIGTERM, leave the pool and its index for the next start. false: "
        "leave nothing, and ignore what the last daemon left. auto, the default: leave them if "
        "systemd or Kubernetes will start the daemon again, and take over what was left.",
    )
    group: str | None = Field(
        default=None,
        description="A group, by name or number, whose members may connect: for engines that run "
        "as other users. Without it, only this user may.",
    )
    metrics_address: str = Field(
        default="127.0.0.1:9464",
        pattern=r"^(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):[0-9]{1,5}$",
        description="host:port of the status page, /metrics and /v1/locate. Port 0: any free one.",
    )
    events_address: str | None = Field(
        default=None,
        pattern=r"^(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):[0-9]{1,5}$",
        description="host:port (an IP address) where changes are published for routers. The next "
        "port replays them. Port 0: any two free ones. By default nothing is published.",
    )
    health_address: str | None = Field(
        default=None,
        pattern=NODE_PATTERN,
        description="host:port that serves gRPC's health service and nothing else, for what cannot "
        "open the socket, such as Kubernetes' probes. By default there is none.",
    )
    lease_ttl_s: float = Field(
        default=30.0,
        allow_inf_nan=False,
        ge=1.0,
        le=3600.0,
        description="How long a lease holds without a heartbeat from its client.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe messages that are logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="How messages are written: text for people and for journald, or one JSON "
        "object a line.",
    )
    slow_log_s: float = Field(
        default=0.1,
        allow_inf_nan=False,
        ge=0.0,
        description="Calls, puts and disk reads that take at least this long are kept in the slow "
        "log (`ecd-cli slow`), and fetches from other nodes that take ten times as long.",
    )
    peer_address: str | None = Field(
        default=None,
        pattern=NODE_PATTERN,
        description="host:port at which other nodes reach this one; the daemon listens there for "
        "its peers. Without it, the daemon serves only this node and opens no port for others.",
    )
    directory: str | None = Field(
        default=None,
        description="Where to ask which nodes hold a key: none (only hints are followed), static "
        "(all peers are asked) or a Redis URL: redis://, rediss://, redis+cluster://, "
        "rediss+cluster://. By default static if peers are given, else none.",
    )
    peers: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="host:port of other nodes, separated by commas."
    )
    cluster: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Tells clusters that share a Redis apart. The same characters as in name.",
    )
    zone: str = Field(
        default="",
        max_length=MAX_ZONE_LENGTH,
        description="A label: of several nodes that hold a key, one in the same zone is preferred.",
    )
    protocol: str = Field(
        default="tcp",
        pattern=r"^[a-z0-9_]{1,32}$",
        description="Mooncake's transport between nodes: tcp, rdma, efa, ascend, nvlink, ...",
    )
    device: str = Field(
        default="", description="Network devices for the transport, such as mlx5_0. Empty: all."
    )
    engine_ports: str = Field(
        default="18200-18231",
        pattern=r"^[0-9]{1,5}-[0-9]{1,5}$",
        description="Ports that Mooncake may listen on, as first-last. With fewer than 32, the "
        "previous daemon may still hold all of them after a quick restart: each start takes two, "
        "which rest for a minute after its end.",
    )
    fetch_timeout_s: float = Field(
        default=5.0,
        allow_inf_nan=False,
        ge=0.1,
        le=600.0,
        description="How long fetching one entry from another node may take in total.",
    )
    readers_per_entry: int = Field(
        default=2,
        ge=1,
        description="Most other nodes that read one entry of more than 8 MiB from this node at a "
        "time. The others wait, or are sent to a node that has read it.",
    )
    peer_token: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="A secret that all nodes of the cluster share. It authenticates them, and does "
        "not encrypt.",
    )
    peer_tls_ca: Path | None = Field(
        default=None,
        description="Certificate of the authority that signed every node's, PEM.",
    )
    peer_tls_cert: Path | None = Field(default=None, description="This node's certificate, PEM.")
    peer_tls_key: Path | None = Field(default=None, description="This node's private key, PEM.")
    peer_insecure: bool = Field(
        default=False,
        description="Allow peers without a token or TLS on an address other than loopback.",
    )
    hint_networks: Annotated[tuple[IPv4Network, ...], NoDecode] = Field(
        default=(),
        description="Networks, such as 10.0.0.0/8, that hints in requests may lead into, in "
        "addition to the nodes that peers or the directory name, and in which encoders of other "
        "nodes may be. By default none.",
    )

    @field_validator("address", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return as_address(value) if isinstance(value, str) else value

    @field_validator("warm_restart", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        return None if value == "auto" else value

    @field_validator("host_pool_bytes", mode="before")
    @classmethod
    def _pool_size(cls, value: object) -> object:
        return config_rules.pool_size(value)

    @field_validator(
        "device_pool_bytes", "disk_pool_bytes", "disk_write_bytes_per_s", mode="before"
    )
    @classmethod
    def _size(cls, value: object) -> object:
        return config_rules.size(value)

    @field_validator("lease_ttl_s", "slow_log_s", "fetch_timeout_s", mode="before")
    @classmethod
    def _duration(cls, value: object) -> object:
        return config_rules.duration(value)

    @field_validator("namespace_quotas", mode="before")
    @classmethod
    def _quotas(cls, value: object) -> object:
        return config_rules.quotas(value)

    @field_validator("namespace_ttls", mode="before")
    @classmethod
    def _ttls(cls, value: object) -> object:
        return config_rules.ttls(value)

    @field_validator("devices", "peers", "hint_networks", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("peers")
    @classmethod
    def _nodes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(NODE_PATTERN, node) for node in value):
            raise ValueError("each must be host:port")
        return value

    @field_validator("metrics_address", "events_address", "health_address", "peer_address", "peers")
    @classmethod
    def _addresses(
        cls, value: str | tuple[str, ...] | None, info: ValidationInfo
    ) -> str | tuple[str, ...] | None:
        for node in (value,) if isinstance(value, str) else value or ():
            config_rules.check_address(info.field_name or "", node)
        return value

    @field_validator("directory")
    @classmethod
    def _known_directory(cls, value: str | None) -> str | None:
        if value in (None, "none", "static"):
            return value
        try:
            parts = urlsplit(value)
            _ = parts.port
        except ValueError:  # which may quote the password
            raise ValueError("not a URL: in a password / ? # @ are %2F %3F %23 %40") from None
        if parts.scheme not in REDIS_SCHEMES:
            raise ValueError(f"must be none, static or a URL of {', '.join(REDIS_SCHEMES)}")
        return value

    @field_validator("engine_ports")
    @classmethod
    def _usable_ports(cls, value: str) -> str:
        first, last = map(int, value.split("-"))
        if not 1024 <= first <= last <= 65535 or last - first + 1 < MIN_ENGINE_PORTS:
            raise ValueError(f"must be FIRST-LAST, at least {MIN_ENGINE_PORTS} ports in 1024-65535")
        if first in KERNEL_PORTS or last in KERNEL_PORTS:
            raise ValueError("must lie outside 32768-60999, the kernel's for outgoing connections")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.peer_address is None:
            for name in ("directory", "peers"):
                if getattr(self, name) not in (None, "none", ()):
                    raise ValueError(f"{name} needs peer_address: where other nodes reach this one")
            return self
        if self.directory == "static" and not self.peers:
            raise ValueError("directory=static needs peers")
        tls = (self.peer_tls_ca, self.peer_tls_cert, self.peer_tls_key)
        if any(tls) and not all(tls):
            raise ValueError("peer_tls_ca, peer_tls_cert and peer_tls_key go together")
        proven = self.peer_token or any(tls) or self.peer_insecure
        if not (proven or is_loopback(self.peer_address)):
            raise ValueError(
                f"peers on {self.peer_address} could be anybody: set peer_token or peer_tls_*, or "
                "allow it with peer_insecure on a network of trusted machines"
            )
        return self

    def rules(self, pool_bytes: int) -> Rules:
        """The rules for namespaces, with a host pool of `pool_bytes`."""
        return config_rules.rules(self.namespace_quotas, self.namespace_ttls, pool_bytes)

    @property
    def token(self) -> str | None:
        """The cluster's token, in the clear."""
        return self.peer_token.get_secret_value() if self.peer_token else None

    @property
    def directory_kind(self) -> str:
        """`none`, `static` or `redis`."""
        if self.directory in (None, "none", "static"):
            return self.directory or ("static" if self.peers else "none")
        return "redis"

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return {"warn": "warning"}.get(value.lower(), value.lower())

    @field_validator("name")
    @classmethod
    def _no_dots_only(cls, value: str) -> str:
        if not value.strip("."):
            raise ValueError("a name needs more than dots")
        return value


def is_loopback(node: str) -> bool:
    host = node.rpartition(":")[0]
    try:
        return IPv4Address(host).is_loopback
    except ValueError:
        return host == "localhost"
