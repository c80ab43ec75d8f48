"""Mutual TLS between nodes, from the files that the settings name."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from ecd.settings.config import Config


class ClusterError(Exception):
    """This node cannot join; the message says what to change."""


class Credentials(NamedTuple):
    """Credentials of this node for both directions; None without TLS."""

    server: grpc.ServerCredentials | None = None
    channel: grpc.ChannelCredentials | None = None


def credentials(config: Config) -> Credentials:
    """Read the node's key and certificates. Raises ClusterError."""
    paths = (config.peer_tls_ca, config.peer_tls_key, config.peer_tls_cert)
    if not all(paths):
        return Credentials()
    try:
        ca, key, cert = (path.read_bytes() for path in paths if path is not None)
    except OSError as error:
        raise ClusterError(f"cannot read {error.filename}: {error.strerror}") from None
    server = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
    return Credentials(server, grpc.ssl_channel_credentials(ca, key, cert))
