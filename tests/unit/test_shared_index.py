"""The mapped index from both sides at once: what the daemon shows is what a client finds."""

import errno
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ecd.core.model.board import Uses
from ecd.core.model.types import Content, EntryId, EntryInfo, Extent, Key, SessionId
from ecd.memory.pool_dir import PoolDir
from ecd.memory.shared_index import CHUNK_ROWS, SharedIndex
from ecd.memory.use_counters import uncounted
from ecd_client.shared.board import MappedBoard
from ecd_client.shared.index import AskDaemon, IndexReader, OnMiss
from ecd_proto.shm.session_page import FIRST_MISSED_WORD, MISSED_WORDS, MISSES_WORD
from ecd_proto.v1 import cache_pb2 as pb

POOL_BYTES = 64 << 20
SESSION = SessionId(1)
N = 1 << 63
"""What a daemon says that has counted all."""


def info(entry: int, name: str, namespace: str = "n") -> EntryInfo:
    content = Content("int8", (entry,), entry, name.encode(), 0.0)
    extent = Extent(0, entry * 4096, entry)
    return EntryInfo(EntryId(entry), Key(namespace, name), content, extent, 0, 0, 0.0, 0.0, None)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[SharedIndex]:
    directory = PoolDir(str(tmp_path), "test")
    index = SharedIndex(directory, "ab", POOL_BYTES, 4)
    yield index
    index.close()
    directory.close()


@pytest.fixture
def seen(shown: SharedIndex) -> IndexReader:
    offset = shown.open_page(SESSION)
    files = pb.IndexFile(path=str(shown.path), pins_path=str(shown.pins_path), pins_offset=offset)
    board = MappedBoard.open(files)
    assert board is not None
    return IndexReader(board)


def pinned(shown: SharedIndex, live: Iterable[int]) -> set[EntryId]:
    """The entries that a whole scan finds pinned."""
    portions = shown.pinned(dict.fromkeys(map(EntryId, live)).keys())
    return {entry for portion in portions for entry in portion.pinned}


def test_what_is_shown_is_found_and_what_is_hidden_is_not(
    shown: SharedIndex, seen: IndexReader
) -> None:
    """Thousands of entries come and go in a thousand buckets: most share theirs."""
    chance = random.Random(1)
    there: dict[str, int] = {}
    for entry in range(1, 12_000):
        name = f"k{chance.randrange(6000)}"
        if name in there:
            shown.hide(EntryId(there.pop(name)), Key("n", name))
        else:
            shown.show(info(entry, name))
            there[name] = entry
        if entry % 50 == 0:
            name = f"k{chance.randrange(6000)}"
            assert seen.contains("n", [name]) == [name in there]
    assert len(there) > CHUNK_ROWS
    for number in range(6000):
        name = f"k{number}"
        found = seen.pin("n", name, OnMiss.COUNT)
        assert (found is not None) == (name in there)
        if found is not None:
            row, pin = found
            assert (row.entry, row.nbytes, row.shape) == (there[name],) * 2 + ((there[name],),)
            assert row.metadata == name.encode()
            assert pinned(shown, there.values()) == {there[name]}
            seen.unpin(pin)
    assert pinned(shown, there.values()) == set()
    uses = shown.drain_uses()
    assert (uses.hits, uses.misses) == (len(there), 6000 - len(there))
    assert len(shown._free_rows) + len(there) == shown._rows_with_memory, "a row leaked"


def test_misses_are_counted_in_their_namespaces(shown: SharedIndex, seen: IndexReader) -> None:
    shown.note_namespace(SESSION, "own")
    names = "a", "b", *(f"{number}" for number in range(130))
    for entry, namespace in enumerate(names, 1):
        shown.show(info(entry, "k", namespace))

    def missed(*counts: tuple[str, int]) -> dict[str, int]:
        for namespace, count in counts:
            for _ in range(count):
                seen.note_miss(namespace)
        uses = shown.drain_uses()
        assert uses.misses == sum(count for _, count in counts)
        return misses_in(uses)

    def misses_in(uses: Uses) -> dict[str, int]:
        [one] = uses.by_client
        return +Counter(dict(one.misses_in))

    assert missed(("a", 200), ("", 2), ("none", 1)) == {"a": 200, "own": 3}
    assert missed(("b", 100), ("a", 9)) == {"b": 100, "a": 9}
    assert missed(("a", 1000), ("b", 3000), ("", 1)) == {"a": 1000, "b": 3000, "own": 1}
    seen._words[FIRST_MISSED_WORD + 1] += 2
    assert missed(("b", 1)) == {"a": 1}, "a client has counted two, and the sum will follow"
    assert missed(("", 2)) == {"a": 1, "b": 1}
    first = dict.fromkeys(names[:127], 1)
    assert missed(*((name, 1) for name in names)) == {**first, "": 5}, "more than it has pairs"
    assert missed(*((name, 1) for name in names)) == {**first, "": 5}
    for word in range(MISSED_WORDS):
        seen._words[FIRST_MISSED_WORD + word] = (1 << 64) - 1
    seen._words[MISSES_WORD] += 5
    assert misses_in(shown.drain_uses()) == {"own": 5}, "a client may write anything"
    for word in range(MISSED_WORDS):
        seen._words[FIRST_MISSED_WORD + word] = 1 << 39
    seen._words[MISSES_WORD] += 5
    assert misses_in(shown.drain_uses()) == {"": 5}


def test_without_memory_for_a_row_the_daemon_is_asked(
    shown: SharedIndex, seen: IndexReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shown, "_take_memory", full)
    assert seen.contains("n", ["a"]) == [False]
    shown.show(info(1, "a"))
    assert shown.unlisted == 1
    with pytest.raises(AskDaemon):
        seen.contains("n", ["a"])
    monkeypatch.undo()
    shown.show(info(2, "b"))
    assert seen.contains("n", ["b"]) == [True]
    with pytest.raises(AskDaemon):
        seen.contains("n", ["c"])
    shown.hide(EntryId(1), Key("n", "a"))
    assert seen.contains("n", ["c"]) == [False]


def test_of_a_namespace_without_a_number_the_daemon_is_asked(
    shown: SharedIndex, seen: IndexReader
) -> None:
    assert seen.contains("n", ["a"]) == [False], "nothing of it is stored"
    names = [f"{number:01000}" for number in range(70)]
    for entry, name in enumerate(names, 1):
        shown.show(info(entry, "a", name))
    assert seen.contains(names[0], ["a", "b"]) == [True, False]
    for key in ((names[-1], "a"), ("n", "a"), (names[0], "h" * 300)):
        with pytest.raises(AskDaemon):
            seen.contains(key[0], [key[1]])


def test_a_chain_that_never_ends_is_given_up(shown: SharedIndex, seen: IndexReader) -> None:
    """A reader comes back, whatever chain it meets while rows move."""
    shown.show(info(1, "a"))
    shown._buckets[:] = memoryview(b"\1\0\0\0" * len(shown._buckets)).cast("I")
    shown._row_words[0] = 1
    with pytest.raises(AskDaemon):
        seen.contains("n", ["b"])
    assert seen.contains("n", ["a"]) == [True]


def test_what_a_dead_daemon_had_not_counted_is_the_difference() -> None:
    pages, told = [(5, 900, 1, 0), (2, 100, 0, 1)], (N + 4, N + 600, N + 1, N)
    assert uncounted(pages, told) == Uses((), 3, 400, 0, 1)
    assert uncounted([(0, 50, 0, 0)], (N, N - 50, N, N)) == Uses((), 0, 100, 0, 0)
    assert uncounted([*pages, (1 << 60, 0, 0, 0)], told) == Uses(), "a page that lies"
    assert uncounted(pages, (N + 8, N, N, N)) == Uses(), "more was counted than is said"
    assert uncounted(pages, (0, 0, 0, 0)) == Uses(), "a daemon that did not say"
