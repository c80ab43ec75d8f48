"""Rules of the daemon, each taken out by hand: a campaign with the bug must find it."""

from __future__ import annotations

BUGS = {
    "pins": "from ecd.core.model.board import Portion; "
    "from ecd.memory.shared_index import SharedIndex; "
    "SharedIndex.pinned = lambda *_: iter((Portion(set(), is_last=True),)); "
}
"""What a daemon runs before it starts. pins: a scan finds no entry pinned."""
FOUND = "wrong"
"""The kind of violation by which each is found."""
