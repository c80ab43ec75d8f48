"""Mutual TLS between nodes, from the files that the settings name."""

from __future__ import annotations

import ssl
from pathlib import Path
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
    ca, key, cert = config.peer_tls_ca, config.peer_tls_key, config.peer_tls_cert
    if ca is None or key is None or cert is None:
        return Credentials()
    try:
        pems = ca.read_bytes(), key.read_bytes(), cert.read_bytes()
    except OSError as error:
        raise ClusterError(
            f"cannot read {error.filename}: {error.strerror}. ECD_PEER_TLS_CA, ECD_PEER_TLS_CERT "
            "and ECD_PEER_TLS_KEY must name files that this user may read"
        ) from None
    _check(ca, key, cert)
    server = grpc.ssl_server_credentials([pems[1:]], pems[0], require_client_auth=True)
    return Credentials(server, grpc.ssl_channel_credentials(*pems))


def _check(ca: Path, key: Path, cert: Path) -> None:
    """Raise ClusterError for files that gRPC would report as an address that it cannot bind."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how strong keys must be is gRPC's to say
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise ClusterError(f"{ca} has no certificate in PEM (ECD_PEER_TLS_CA)") from None
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # or a terminal is asked for it
    except ssl.SSLError as error:
        raise ClusterError(
            f"{cert} and {key} must be a certificate and its private key, in PEM and without a "
            f"password (ECD_PEER_TLS_CERT, ECD_PEER_TLS_KEY): {error.reason or error}"
        ) from None
