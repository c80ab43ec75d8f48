"""Media that stay in their requests for a while, as a request without them has failed.

Anybody can send a request that fails without its media and is right with them: under a name that a
client chose, an engine may find another picture than the request shows. So a failure is held
against the same media together, and against nobody where a client has named one of them.
"""

from __future__ import annotations

from collections import OrderedDict

from ecd_proto.backoff import Backoff

RESTS = Backoff(1.0, 60.0)
"""First and longest time for which media stay in their requests."""
MAX_RESTS = 256
"""Requests' media that are remembered; the oldest are forgotten first."""


class Rests:
    """The media of requests that failed without them; time is an argument.

    `names` are the stored names of all media of a request. None: a client has chosen one.
    """

    def __init__(self) -> None:
        self._rests: OrderedDict[frozenset[str], tuple[float, float]] = OrderedDict()

    def are_resting(self, names: frozenset[str] | None, now_s: float) -> bool:
        until_s, _ = self._of(names)
        return now_s < until_s

    def note_served(self, names: frozenset[str] | None) -> None:
        if names is not None:
            self._rests.pop(names, None)

    def note_failed(self, names: frozenset[str] | None, now_s: float) -> None:
        """Keep these media in their requests for a while, each time for longer."""
        if names is None:
            return
        rest_s = RESTS.after(self._of(names)[1])
        self._rests[names] = now_s + rest_s, rest_s
        self._rests.move_to_end(names)
        if len(self._rests) > MAX_RESTS:
            self._rests.popitem(last=False)

    def _of(self, names: frozenset[str] | None) -> tuple[float, float]:
        """When the media's last rest ends, and its length."""
        return (0.0, 0.0) if names is None else self._rests.get(names, (0.0, 0.0))
