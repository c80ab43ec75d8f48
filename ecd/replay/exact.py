"""Replays a trace's operations in order, and compares the evictions with the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ecd.core.model.block import Block
from ecd.core.model.entry import Entry
from ecd.core.model.states import EntryState
from ecd.core.model.types import Content, EntryId, Extent, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.eviction import plan
from ecd.core.pool.pool import FOR_ROOM, REASONS
from ecd.replay.policies import POLICIES
from ecd.replay.reading import TraceError, TraceHeader


@dataclass
class Comparison:
    """The result of a replay of the recorded pool."""

    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    operations: int = 0
    difference: str | None = None
    """The first operation that came out differently; the replay ends there."""
    missing: int = 0
    """Records that the trace misses; the replay ends at the first hole."""
    is_whole: bool = False
    """Whether the daemon ended the trace itself."""


class _Different(Exception):
    pass


class Replay:
    """The recorded pool, rebuilt: its allocator, its policy and its plans."""

    def __init__(self, header: TraceHeader) -> None:
        """Raises TraceError for a policy that this ecd does not have."""
        if header.policy not in POLICIES:
            raise TraceError(f"this ecd does not have the trace's policy, {header.policy}")
        self._allocator = Allocator(0, header.pool_bytes, header.granule_bytes)
        self._policy = POLICIES[header.policy](self._allocator)
        self._blocks: dict[int, Block] = {}
        self._entries: dict[int, Entry] = {}
        self._given_up: set[int] = set()

    def run(self, operations: Iterable[list[Any]]) -> Comparison:
        """Run all operations. Raises TraceError if one is malformed, or names unknown objects."""
        done = Comparison()
        for operation in operations:
            match operation:
                case ["hole", missing]:
                    done.missing = missing
                    return done
                case ["end"]:
                    done.is_whole = True
                    continue
                case ["evict", _, reason] if reason in done.evictions:
                    done.evictions[reason] += 1
            done.operations += 1
            try:
                self._do(operation)
            except _Different as different:
                done.difference = f"operation {done.operations}, {operation}: {different}"
                return done
            except (KeyError, TypeError, AssertionError) as error:
                what = f"operation {done.operations}, {operation}"
                raise TraceError(f"{what}: not possible here ({error!r})") from None
        return done

    def _do(self, operation: list[Any]) -> None:
        policy, allocator, entries = self._policy, self._allocator, self._entries
        match operation:
            case ["use", entry, now_s, *_]:
                used = entries[entry]
                policy.use(used, now_s)
                used.used_s = now_s
            case ["cost", entry, cost_s]:
                entries[entry].cost_s = cost_s
            case ["hold", entry]:
                policy.hold(entries[entry])
            case ["let go", entry]:
                policy.let_go(entries[entry])
            case ["take", start, nbytes]:
                self._place(start, allocator.allocate(nbytes))
            case ["place", start, nbytes]:
                extent = Extent(0, start * allocator.granule_bytes, nbytes)
                self._place(start, allocator.allocate_at(extent))
            case ["cut", start, at]:
                self._blocks[at] = allocator.split(self._blocks[start], at)
            case ["free", start]:
                allocator.free(self._blocks.pop(start))
            case ["admit", entry, start, key, namespace, nbytes, rows, cost_s, now_s]:
                self._admit(entry, start, f"{key:x}", str(namespace), nbytes, rows, cost_s, now_s)
            case ["plan", nbytes, recorded]:
                self._plan(nbytes, recorded)
            case ["evict", entry, reason]:
                if reason in FOR_ROOM and reason != "quota" and entry not in self._given_up:
                    raise _Different("no plan gave the entry up")
                self._given_up.discard(entry)
                policy.remove(entries.pop(entry))
            case _:
                raise TypeError("not an operation")

    def _place(self, start: int, block: Block | None) -> None:
        if block is None or block.start != start:
            where = "nowhere" if block is None else f"at {block.start}"
            raise _Different(f"the extent lies {where}")
        self._blocks[start] = block

    def _admit(
        self,
        number: int,
        start: int,
        key: str,
        namespace: str,
        nbytes: int,
        rows: int,
        cost_s: float,
        now_s: float,
    ) -> None:
        content = Content("", (rows,), nbytes)
        block = self._blocks[start]
        entry = Entry(EntryId(number), namespace, key, content, block, SessionId(0))
        entry.state, entry.cost_s = EntryState.COMMITTED, cost_s
        entry.created_s = entry.used_s = now_s
        block.owner = self._entries[number] = entry
        self._policy.admit(entry)

    def _plan(self, nbytes: int, recorded: list[int]) -> None:
        if nbytes:
            victims = plan(nbytes, self._allocator, self._policy) or []
        else:
            victims = [entry for entry, _ in zip(self._policy.coldest(), recorded, strict=False)]
        planned = [victim.id for victim in victims]
        if planned != recorded:
            raise _Different(f"the plan is {planned}")
        self._policy.give_up(victims)
        self._given_up.update(recorded)
