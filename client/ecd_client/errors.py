"""What can go wrong, by who has to act."""

from __future__ import annotations


class EcdError(Exception):
    """Everything that ecd raises. An engine treats it as a miss."""


class DaemonUnavailable(EcdError):
    """Nothing usable answers on the socket: not started, restarting, or of another version.

    Try `ecd-cli status`.
    """


class PoolFull(EcdError):
    """Everything in the pool is leased or being written. Later, or with a larger pool, it fits."""


class EntryTooLarge(EcdError):
    """The tensor is larger than the whole pool: raise ECD_HOST_POOL_BYTES."""


class InvalidArgument(EcdError, ValueError):
    """The caller's fault: a dtype, shape, key or size that the contract does not allow."""


class LeaseExpired(EcdError):
    """The item was closed, or its lease ran out unrenewed: its bytes may be another entry's by now.

    Get it again.
    """


def limit_reached(what: str, limit: int) -> EcdError:
    """One of the daemon's bounds."""
    return EcdError(f"the daemon's limit of {limit} {what} is reached")
