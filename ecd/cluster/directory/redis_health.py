"""Whether Redis answers: after a failure it is left alone for a while, and operators are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis import ResponseError

from ecd.base.clock import Clock
from ecd.cluster.directory.directory import DirectoryState
from ecd.cluster.directory.redis_rows import ANSWERED, DOWN
from ecd.settings.redaction import answer_without_password
from ecd_proto.backoff import Backoff
from ecd_proto.contract import REFUSES, duration_text

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.25
"""A lookup that takes longer is a miss; after it Redis is not asked for the first pause."""
HICCUP_S = 5.0
"""A Redis that has failed for no longer than this is expected to answer again soon."""
PAUSE = Backoff(1.0, 5.0)
"""Pauses between attempts to write: the first for HICCUP_S, then each twice the one before."""


class RedisHealth:
    """The state of one Redis, from the answers to its lookup and its publisher."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.state = DirectoryState("redis", up=False)
        self.pause_s = 0.0
        """The pause before the next attempt to write."""
        self.has_work = asyncio.Event()
        """Set where the publisher has something to do before its next beat."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called after each failure, whoever noted it."""
        self._url, self._clock = url, clock
        self._silent_until_s = 0.0
        self._down_since_s: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether Redis failed a moment ago, so that no lookup waits for it."""
        return self._clock.now_s() < self._silent_until_s

    def answered(self) -> None:
        """Note the answer to a lookup."""
        if not self.state.up:
            self.has_work.set()  # the next beat would come seconds after a late lookup

    def worked(self) -> None:
        """Note that Redis has taken all that was to be written."""
        if self._down_since_s is not None:
            down_s = self._clock.now_s() - self._down_since_s
            logger.info("the directory works again, after %s", duration_text(down_s))
        self.state.up, self.pause_s, self._down_since_s = True, 0.0, None

    def failed(self, error: BaseException, *, is_write: bool = False) -> None:
        """Note an error. A Redis that refuses writes, because it is full, is still asked."""
        was_quiet = self.state.up or not self.state.last_error
        said = answer_without_password(str(error) or type(error).__name__, self._url)
        self.state.failed(REFUSES + said if isinstance(error, ANSWERED) else said)
        if not isinstance(error, DOWN):
            logger.error("the directory cannot be understood", exc_info=error)
        elif was_quiet:
            silence = "" if isinstance(error, ANSWERED) else "does not answer: "
            logger.warning("the directory %s%s", silence, self.state.last_error)
        self.state.up = False
        now_s = self._clock.now_s()
        if self._down_since_s is None:
            self._down_since_s = now_s
        is_hiccup = now_s - self._down_since_s < HICCUP_S
        self.pause_s = PAUSE.after(0.0 if is_hiccup else self.pause_s)
        if not (is_write and isinstance(error, ResponseError)):
            self._silent_until_s = now_s + PAUSE.first_s
        self.on_failure()
