"""Makings: ended by their session, by its word, for want of room, and without their lock."""

from ecd.core.model.types import Key, SessionId, Ticket
from ecd.live.makings import MAX_MAKINGS, Makings
from ecd_proto.contract import MAKING_S
from support.clock import SetClock

ONE, TWO, PEER = SessionId(1), SessionId(2), SessionId(3)
KEY, OTHER = Key("n", "k"), Key("n", "other")


class Locks:
    """The keys that clients have locked."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()

    def is_key_locked(self, key: Key) -> bool:
        return key in self.keys

    def note_elsewhere(self, key: Key, *, is_made: bool) -> None: ...


def peer_wait(number: int) -> tuple[SessionId, Ticket]:
    return PEER, Ticket(number)


def test_waits_are_told_when_their_making_is_taken() -> None:
    makings = Makings(SetClock())
    assert makings.begin(ONE, KEY)
    makings.note_wait(KEY, *peer_wait(1))
    makings.note_wait(OTHER, *peer_wait(2))  # which nobody makes yet
    makings.note_wait(KEY, *peer_wait(3))
    assert makings.take([KEY], TWO) == [], "it is another session's"
    assert makings.take([OTHER, KEY], ONE) == [peer_wait(1), peer_wait(3)]
    assert KEY not in makings
    assert makings.take([KEY]) == []


def test_all_makings_of_a_session_end_with_it() -> None:
    makings = Makings(SetClock())
    makings.begin(ONE, KEY)
    makings.begin(TWO, OTHER)
    makings.note_wait(KEY, *peer_wait(1))
    makings.note_wait(OTHER, *peer_wait(2))
    assert makings.take_session(ONE) == [peer_wait(1)]
    assert makings.take_session(ONE) == []
    assert OTHER in makings


def test_a_making_that_begins_anew_keeps_its_waits() -> None:
    makings = Makings(SetClock())
    makings.begin(ONE, KEY)
    makings.note_wait(KEY, *peer_wait(1))
    makings.begin(TWO, KEY)
    assert makings.take_session(ONE) == []
    assert makings.take_session(TWO) == [peer_wait(1)]


def test_a_making_lasts_for_a_moment_and_then_while_its_key_is_locked() -> None:
    clock, locks = SetClock(), Locks()
    makings = Makings(clock, locks)
    keys = [Key("n", str(number)) for number in range(4)]
    for key in keys:
        makings.begin(ONE, key)
        makings.note_wait(key, *peer_wait(int(key.mm_hash)))
    assert list(makings.lasting(MAKING_S)) == []
    assert makings.take_past(keys[0]) == []
    clock.at_s = MAKING_S
    makings.begin(ONE, keys[1])
    locks.keys = {keys[2]}
    assert list(makings.lasting(MAKING_S)) == [keys[0], keys[2], keys[3]]
    assert [key in makings for key in keys] == [False, True, True, False]
    assert [makings.take_past(key) for key in keys] == [[peer_wait(0)], [], [], [peer_wait(3)]]
    assert list(makings._makings) == [keys[2], keys[1]]
    clock.at_s = 100 * MAKING_S
    assert keys[2] in makings, "it has not ended by time"
    locks.keys.clear()
    waits = [makings.take_past(key) for key in list(makings.lasting(MAKING_S))]
    assert waits == [[peer_wait(2)], [peer_wait(1)]]
    assert (makings._makings, makings._by_session) == ({}, {})


def test_a_session_makes_no_more_than_it_may() -> None:
    clock = SetClock()
    makings = Makings(clock)
    keys = [Key("n", str(number)) for number in range(MAX_MAKINGS + 1)]
    assert [makings.begin(ONE, key) for key in keys].count(False) == 1
    assert keys[-1] not in makings
    assert makings.begin(ONE, keys[0]), "it makes this one already"
    assert makings.begin(TWO, keys[-1])
    clock.at_s = MAKING_S
    makings.take_past(keys[0])
    assert makings.begin(ONE, keys[-1])


def test_waits_that_come_before_their_making_are_told_too() -> None:
    makings = Makings(SetClock())
    makings.note_wait(KEY, *peer_wait(1))
    makings.begin(ONE, KEY)
    makings.note_wait(OTHER, *peer_wait(2))
    assert makings.take_session(ONE) == [peer_wait(1)]
    assert makings.take_early(OTHER) == [peer_wait(2)]
    assert makings.take_early(OTHER) == []


def test_waits_that_have_ended_by_themselves_are_forgotten() -> None:
    makings = Makings(SetClock())
    makings.begin(ONE, KEY)
    for number in (1, 2):
        makings.note_wait(KEY, *peer_wait(number))
        makings.note_wait(OTHER, *peer_wait(number))  # which nobody makes yet
    makings.forget_wait(KEY, *peer_wait(1))
    makings.forget_wait(OTHER, *peer_wait(1))
    makings.forget_wait(OTHER, *peer_wait(3))
    assert makings.take([KEY]) == makings.take_early(OTHER) == [peer_wait(2)]
    makings.note_wait(OTHER, *peer_wait(1))
    makings.forget_wait(OTHER, *peer_wait(1))
    assert makings._early == {}
