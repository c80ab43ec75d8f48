"""Puts that the daemon refuses, in its log."""

from __future__ import annotations

import logging

from ecd.base.clock import Clock
from ecd.base.log_limit import LogLimit
from ecd.core.model.outcomes import EntryTooLarge, PoolFull, Reservation
from ecd_proto.contract import shown, size_text

logger = logging.getLogger(__name__)
_ADVICE = "see `ecd-cli clients` and `ecd-cli ls --kept`, end a keep by `ecd-cli unkeep`, or raise"


class RefusedPuts:
    """Logs refused puts, at most one a minute for each cause and namespace."""

    def __init__(self, clock: Clock) -> None:
        self._lines = LogLimit(clock)

    def note(self, namespace: str, outcome: Reservation) -> None:
        if not isinstance(outcome, EntryTooLarge | PoolFull):
            return
        more = self._lines.take((type(outcome), outcome.quota_bytes > 0, namespace))
        if more is not None:
            size, why = size_text(outcome.nbytes), _why(outcome)
            about = {"namespace": namespace, "nbytes": outcome.nbytes}
            who = shown(namespace)
            logger.warning("a put of %s by %s is refused: %s%s", size, who, why, more, extra=about)


def _why(outcome: EntryTooLarge | PoolFull) -> str:
    quota = size_text(outcome.quota_bytes)
    match outcome:
        case EntryTooLarge() if outcome.quota_bytes:
            return f"the quota of its namespace is {quota}: raise ECD_NAMESPACE_QUOTAS"
        case EntryTooLarge():
            return f"the whole pool has {size_text(outcome.pool_bytes)}: raise ECD_HOST_POOL_BYTES"
        case PoolFull() if outcome.quota_bytes:
            return (
                f"its namespace's quota of {quota} is full of what is leased, kept or being "
                f"written: {_ADVICE} ECD_NAMESPACE_QUOTAS"
            )
    return (
        f"the pool is full: {size_text(outcome.held_bytes)} are leased, kept or being written, the "
        f"largest free piece has {size_text(outcome.largest_free_bytes)}: {_ADVICE} "
        "ECD_HOST_POOL_BYTES"
    )
