"""An answer of the events' port to an asker that takes nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import zmq

from ecd.base.clock import REAL
from ecd.ops.events import FULL_S, Events, _Asker


class Full:
    """A socket without room."""

    tries = 0

    async def send_multipart(self, *_: object) -> None:
        self.tries += 1
        raise zmq.Again


def test_an_asker_is_tried_for_as_long_as_the_patience_lasts() -> None:
    events, full = object.__new__(Events), Full()
    events._router, events._live = full, SimpleNamespace(clock=REAL)
    with pytest.raises(zmq.Again):
        asyncio.run(events._reply(_Asker(b"asker", patience_s=3.5 * FULL_S), b""))
    assert full.tries == 5
