"""Pictures that stay in their requests for a while, as a request without them has failed.

Anybody can send a request that fails without its pictures and is right with them: under a name that
a client chose, an engine may find another picture than the request shows. So a failure is held
against the same pictures together, and against nobody where a client has named one of them.
"""

from __future__ import annotations

from collections import OrderedDict

from ecd_proto.backoff import Backoff

RESTS = Backoff(1.0, 60.0)
"""First and longest time for which pictures stay in their requests."""
MAX_RESTS = 256
"""Requests' pictures that are remembered; the oldest are forgotten first."""


class Rests:
    """The pictures of requests that failed without them; time is an argument.

    `pictures` are the stored names of all pictures of a request. None: a client has chosen one.
    """

    def __init__(self) -> None:
        self._rests: OrderedDict[frozenset[str], tuple[float, float]] = OrderedDict()

    def are_resting(self, pictures: frozenset[str] | None, now_s: float) -> bool:
        until_s, _ = self._of(pictures)
        return now_s < until_s

    def note_served(self, pictures: frozenset[str] | None) -> None:
        if pictures is not None:
            self._rests.pop(pictures, None)

    def note_failed(self, pictures: frozenset[str] | None, now_s: float) -> None:
        """Keep these pictures in their requests for a while, each time for longer."""
        if pictures is None:
            return
        rest_s = RESTS.after(self._of(pictures)[1])
        self._rests[pictures] = now_s + rest_s, rest_s
        self._rests.move_to_end(pictures)
        if len(self._rests) > MAX_RESTS:
            self._rests.popitem(last=False)

    def _of(self, pictures: frozenset[str] | None) -> tuple[float, float]:
        """When the pictures' last rest ends, and its length."""
        return (0.0, 0.0) if pictures is None else self._rests.get(pictures, (0.0, 0.0))
