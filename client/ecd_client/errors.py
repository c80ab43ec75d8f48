"""Errors, one for each who must act: the operator, the caller, a later attempt."""

from __future__ import annotations

from typing import TypeVar


class EcdError(Exception):
    """Base of all errors of ecd. An engine treats one as a miss."""


class DaemonUnavailable(EcdError):
    """Nothing usable answers on the socket: not started, restarting, or of another version.

    `ecd-cli doctor` says which.
    """


class DaemonTooOld(DaemonUnavailable):
    """The daemon does not know the call: it is older than this client. Upgrade it."""


class PoolFull(EcdError):
    """All of the pool, or of the namespace's quota, is held.

    Try later, or raise ECD_HOST_POOL_BYTES or ECD_NAMESPACE_QUOTAS.
    """


class EntryTooLarge(EcdError):
    """The tensor is larger than the whole pool, or than its namespace's quota.

    Raise ECD_HOST_POOL_BYTES or ECD_NAMESPACE_QUOTAS.
    """


class InvalidArgument(EcdError, ValueError):
    """The caller passed a dtype, shape, key or size that the contract does not allow."""


class LeaseExpired(EcdError):
    """The item was closed, or its lease ran out unrenewed: its bytes may be another entry's by now.

    Get it again.
    """


class DeviceError(EcdError):
    """A call of CUDA's driver failed; the message has its name and the driver's reason.

    After an illegal address, or where the GPU is lost, every later call of the process fails too.
    """


class DeviceBusy(DeviceError):
    """A call that CUDA's driver refuses for now: memory is short, or a graph is being captured.

    What was queued before goes on.
    """


RETRY_S = 0.001
"""Pause before a call that raised DeviceBusy is made again."""


Failure = TypeVar("Failure", bound=BaseException)


def stripped(error: Failure) -> Failure:
    """The error without its traceback and causes, for a future to keep.

    Their frames have the future, the session and the tensor in turn: all that would stay until
    Python collects.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def limit_reached(what: str, limit: int) -> EcdError:
    """The error for a bound of the daemon, such as leases in one session."""
    return EcdError(f"the daemon's limit of {limit} {what} is reached")
