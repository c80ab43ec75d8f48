"""One put: into granted memory, or reserve, copy and commit by calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ecd_client.errors import DaemonUnavailable, EntryTooLarge, PoolFull, limit_reached
from ecd_client.session.calls import result_of
from ecd_client.session.session import Session
from ecd_client.shared.puts import PUT, Claim, CopyTo, NewEntry, PutState
from ecd_client.values import to_key
from ecd_proto.contract import pool_full, size_text, too_large
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from ecd_client.session.leases import Pin
    from ecd_client.tensors import TensorSource
    from ecd_client.values import Extent

CLAIMED, MUST_CALL, STORED = PutState.CLAIMED, PutState.MUST_CALL, PutState.STORED
BEING_WRITTEN = PutState.BEING_WRITTEN  # as looking them up takes longer


class Put:
    """One put in the states of `PUT`: each has one step, those that end it none."""

    def __init__(
        self,
        session: Session,
        entry: NewEntry,
        copy_to: CopyTo,
        tensor: TensorSource | None = None,
    ) -> None:
        """Claim granted memory for the entry, if that is possible.

        `tensor`, if given, keeps its value until `copy_near` is done with it.
        """
        self.session = session
        self._entry, self._copy_to, self._tensor = entry, copy_to, tensor
        claimed = MUST_CALL if session.puts is None else session.puts.claim(entry)
        self._claim: Claim | None = None
        if isinstance(claimed, Claim):
            self._claim, claimed = claimed, CLAIMED
        self.state = claimed
        self._reply: Any = None  # to a Reserve that was sent already
        self._held: Pin | None = None  # the extent's, from before the put is done
        self._taken = threading.Lock()

    def is_taken_up(self) -> bool:
        """Whether this caller, and no earlier one, has to end the put and release its session."""
        return self._taken.acquire(blocking=False)

    def send_reserve(self) -> None:
        """Begin the put by calls, and do not wait for the answer."""
        self._reply = self.session.calls.later("reserve", self._reserve_request())

    def write(self) -> None:
        """Write the claimed memory, unless it is written. Raises what `copy_to` raises."""
        if self.state is CLAIMED:
            self._step()

    def finish(self) -> PutState:
        """Do all that is left: write, wait for the answer, or make the calls.

        Returns STORED, ALREADY_STORED or BEING_WRITTEN. Raises EcdError and what `copy_to` raises.
        """
        near = self.session.near
        if near is None or self._tensor is None or self._tensor.device != near.device:
            self._tensor = None
        try:
            if self._claim is not None:
                self._hold(self._claim)
            while self.state in PUT:
                self._step()
        except BaseException:
            self._let_go()
            raise
        return self.state

    def copy_near(self, then: Callable[[], None]) -> None:
        """Have a copy made in the device pool too, after `finish`: of the tensor, if it lies there.

        `then` is called once the tensor is not read any more.
        """
        near, is_stored = self.session.near, self.state is STORED
        key = self._entry.namespace, self._entry.mm_hash
        if near is None or not is_stored or self._tensor is None or self._held is None:
            try:
                self._let_go()
            finally:
                then()
            if near is not None and is_stored:
                near.promote_soon(self.session, key)
            return
        from ecd_client.device.pool import JustPut  # imports CUDA's driver, as `near` has

        near.promote_soon(self.session, key, just_put=JustPut(self._tensor, self._held, then))

    def _hold(self, extent: Extent) -> None:
        """Hold the extent, so that an entry there is this put until the hold ends."""
        if self._tensor is not None:
            self._held = self.session.pin_own(extent)

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.end()

    # -- the steps -----------------------------------------------------------------------------

    def _step(self) -> None:
        state = _STEPS[self.state](self)
        if state not in PUT[self.state]:
            raise AssertionError(f"a put that is {self.state.name} became {state.name}")
        self.state = state

    def _write(self) -> PutState:
        assert self._claim is not None
        assert self.session.puts is not None
        return self.session.puts.write(self._claim, self._copy_to)

    def _await_answer(self) -> PutState:
        assert self._claim is not None
        assert self.session.puts is not None
        return self.session.puts.answer(self._claim, self.session.calls.timeout_s)

    def _reserve_request(self) -> pb.ReserveRequest:
        entry = self._entry
        content = pb.Content(
            dtype=entry.dtype,
            shape=entry.shape,
            nbytes=entry.nbytes,
            metadata=entry.metadata,
            cost_s=entry.cost_s,
        )
        key = to_key((entry.namespace, entry.mm_hash))
        item = pb.ReserveItem(key=key, content=content)
        return pb.ReserveRequest(session=self.session.token, items=[item])

    def _put_by_calls(self) -> PutState:
        """Reserve, unless that was sent already, then copy and commit."""
        self._let_go()  # what a claim held: the entry will lie elsewhere
        if self._reply is None:
            reply = self.session.calls.now("reserve", self._reserve_request())
        else:
            reply = result_of(self._reply)
        entry, outcome = self._entry, reply.outcomes[0]
        match outcome.WhichOneof("outcome"):
            case "reserved":
                self._copy_and_commit(outcome.reserved)
                return STORED
            case "already_stored":
                return PutState.ALREADY_STORED
            case "being_written":
                return BEING_WRITTEN
            case "pool_full":
                full = outcome.pool_full
                held = full.held_bytes, full.largest_free_bytes, full.quota_bytes
                raise PoolFull(
                    f"{size_text(full.nbytes)} do not fit: {pool_full(entry.namespace, *held)}"
                )
            case "entry_too_large":
                large = outcome.entry_too_large
                why = too_large(entry.namespace, large.pool_bytes, large.quota_bytes)
                raise EntryTooLarge(f"{size_text(large.nbytes)}, and {why}")
            case _:
                limit = outcome.limit_reached
                raise limit_reached(limit.what, limit.limit)

    def _copy_and_commit(self, reserved: pb.Reserved) -> None:
        session, reservations = self.session, [reserved.reservation]
        try:
            self._hold(reserved.extent)
            self._copy_to(session.pools.of(reserved.extent), reserved.extent)
        except BaseException:
            abort = pb.AbortRequest(session=session.token, reservations=reservations)
            session.calls.now("abort", abort)
            raise
        commit = pb.CommitRequest(session=session.token, reservations=reservations)
        if not session.calls.now("commit", commit).committed[0]:
            raise DaemonUnavailable("the daemon took the reservation back meanwhile")


_STEPS: dict[PutState, Callable[[Put], PutState]] = {
    CLAIMED: Put._write,
    PutState.UNANSWERED: Put._await_answer,
    MUST_CALL: Put._put_by_calls,
}
