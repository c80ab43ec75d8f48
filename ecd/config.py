"""Every setting of the daemon: one frozen model, and where each value came from.

Flags come before `ECD_*` variables, those before the TOML file, that before the defaults.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ecd_proto.contract import default_address

ENV_PREFIX = "ECD_"
NOT_OURS = {"ECD_REQUIRE_VLLM"}
"""Variables with our prefix that the daemon has no use for."""


class ConfigError(Exception):
    """A setting is wrong; the message names it, its origin and what is allowed."""


class Config(BaseSettings):
    """The daemon's settings. The defaults need no file and no other service."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    address: str = Field(
        default_factory=default_address, description="Unix socket for the engines on this node."
    )
    name: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Tells daemons on one node apart.",
    )
    shm_dir: str = Field(default="/dev/shm", description="A tmpfs directory for the host pool.")
    host_pool_bytes: ByteSize | None = Field(
        default=None,
        ge=1 << 20,
        description="Size of the host pool, such as 4GiB. "
        "By default a quarter of what shm_dir has free, at most 4 GiB.",
    )
    group: str | None = Field(
        default=None,
        description="A group whose members may connect, for engines that run as other users.",
    )
    metrics_address: str = Field(
        default="127.0.0.1:9464",
        pattern=r"^(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):\d{1,5}$",
        description="host:port of /metrics. Port 0: any free one.",
    )
    lease_ttl_s: float = Field(
        default=30.0,
        ge=1.0,
        le=3600.0,
        description="How long a lease holds without a sign of life from its client.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages that are logged."
    )

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _no_dots_only(cls, value: str) -> str:
        if not value.strip("."):
            raise ValueError("a name needs more than dots")
        return value


def load(flags: dict[str, Any], file: Path | None) -> tuple[Config, dict[str, str]]:
    """The effective settings, and for each the origin of its value.

    Raises ConfigError for a value that is not allowed, an unknown name in the file, or a file
    that cannot be read.
    """
    sources = {"default": dict[str, Any]()}
    if file is not None:
        sources[str(file)] = _read(file)
    sources["environment"] = EnvSettingsSource(Config)()
    sources["flag"] = {name: value for name, value in flags.items() if value is not None}
    origins = dict.fromkeys(Config.model_fields, "default")
    merged: dict[str, Any] = {}
    for origin, values in sources.items():
        merged |= values
        origins |= dict.fromkeys(values, origin)
    try:
        return Config(**merged), origins
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, wrong['loc']))} (from {origins[str(wrong['loc'][0])]}): "
            f"{wrong['msg']}, got {wrong['input']!r}"
            for wrong in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None


def unknown_variables() -> list[str]:
    """Variables in the environment that look like settings and are none: misspelt, most likely."""
    known = {f"{ENV_PREFIX}{name}".upper() for name in Config.model_fields} | NOT_OURS
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"no such file: {file}")
    try:
        return TomlConfigSettingsSource(Config, toml_file=file)()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
