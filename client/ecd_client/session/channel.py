"""The channel to the daemon: its address, one call, and the errors for its refusals."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from ecd_client import arguments
from ecd_client.errors import DaemonTooOld, DaemonUnavailable, EcdError, InvalidArgument
from ecd_proto.contract import MAX_MESSAGE_BYTES, as_address, default_address
from ecd_proto.shm.files import is_file_locked

CALL_TIMEOUT_S = 5.0
"""How long the daemon may take to answer one call, besides waits."""
NO_ANSWER = (
    "the daemon is starting, stopping or busy",
    "its log says more; or start it anew: systemctl restart ecd",
)
"""The cause, and what to do, if a connection is made but no call is answered."""
CLOSED = "the client is closed"
PROBE_S = 0.1

Reply = TypeVar("Reply")


def resolve(address: str | None) -> str:
    """The address to use: the given one, `ECD_ADDRESS`, or this user's default socket.

    Raises InvalidArgument.
    """
    if address is not None:
        address = arguments.text(address, "daemon's address")
    address = as_address(address or default_address())
    if not address.startswith("unix:"):
        raise InvalidArgument(
            f"the address must be unix:///path/to/socket, or that path, not {address!r}"
        )
    return address


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(
        address,
        options=[
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 2000),  # it is how long an attempt may take
            ("grpc.max_reconnect_backoff_ms", 400),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),  # a call that gRPC tries again may never end
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ],
    )


def socket_owner(address: str) -> int:
    """The user that owns the socket. Raises OSError where there is no socket.

    A symbolic link is not followed: it could lead to another daemon's socket.
    """
    path = socket_path(address)
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a socket", path)
    return found.st_uid


def call(
    method: Callable[..., Reply], request: Any, address: str, timeout_s: float = CALL_TIMEOUT_S
) -> Reply:
    """One unary call. Raises EcdError."""
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise translate(error, address) from None
    except ValueError:  # the channel is closed
        raise DaemonUnavailable(CLOSED) from None


def translate(error: grpc.RpcError, address: str) -> EcdError:
    """The error for the caller when a call failed."""
    if not isinstance(error, grpc.Call):
        return DaemonUnavailable(f"the call to {address} failed: {error}")
    return from_status(error.code(), error.details() or "", address)


def from_status(code: grpc.StatusCode, details: str, address: str) -> EcdError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return DaemonTooOld(f"the daemon on {address} is older than this call: upgrade it")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonUnavailable(late(address))
    if code is grpc.StatusCode.UNAVAILABLE and not details.startswith("the daemon"):
        return DaemonUnavailable(unreachable(address))
    return DaemonUnavailable(details or f"the daemon on {address} answered {code.name}")


def late(address: str) -> str:
    return f"the daemon on {address} did not answer in time"


def unreachable(address: str) -> str:
    cause, advice = why_refused(address) or NO_ANSWER
    return f"nothing answers on {address}: {cause}; {advice}"


def why_refused(address: str) -> tuple[str, str] | None:
    """Why nobody gets a connection to the socket, and what to do. None: one was made."""
    path = socket_path(address)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_S)
            probe.connect(path)
    except FileNotFoundError:
        if _is_owned(path):
            return f"the daemon of {path} is starting or stopping", "wait: its log says what for"
        return f"there is no {path}", "start the daemon, or say where it is (ECD_ADDRESS)"
    except PermissionError:
        advice = "join the daemon's group (ECD_GROUP; under systemd ecd), or run as its user"
        return f"{path} does not let this user in", advice
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # a daemon that starts has just removed it
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                return f"{path} is no socket", "say where the daemon's is (ECD_ADDRESS)"
        advice = "start the daemon: it takes the file over"
        return f"nobody listens on {path}, which a dead daemon left", advice
    except OSError as error:
        return f"{path}: {error}", "start the daemon anew"
    return None


def _is_owned(path: str) -> bool:
    """Whether a daemon has locked the socket's path, as far as this user can see."""
    with contextlib.suppress(OSError):
        return is_file_locked(f"{path}.lock")
    return False


def socket_path(address: str) -> str:
    return re.sub(r"^unix:(//)?", "", address)
