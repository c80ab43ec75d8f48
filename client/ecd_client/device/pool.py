"""The device pool of this process's GPU: copies of entries, which loads read instead of the host's.

The daemon owns the memory and does nothing with it; docs/gpu-rules.md has the rules. An entry here
is a copy of one that the host pool has, under a number of its own. It is found in the index by its
key and the pool's number, and held by a pin as any entry is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from ecd_client import clock
from ecd_client.device import completions, driver
from ecd_client.device.copies import Copies
from ecd_client.errors import DeviceBusy, DeviceError, EcdError
from ecd_client.shared.index import AskDaemon, OnMiss
from ecd_client.values import to_key
from ecd_proto.contract import shown
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from ecd_client.session.leases import Pin
    from ecd_client.session.session import Session
    from ecd_client.tensors import TensorSource
    from ecd_client.values import Extent, Key, Parts

logger = logging.getLogger(__name__)

MAX_PROMOTIONS = 64
"""Copies queued; further ones are dropped: a later load asks again."""
REFUSED_S = 0.1
"""Pause of promotion after the daemon had no room, or another client was faster."""
LISTED_WITHIN_S = 0.1
"""How long a promotion of an entry that was just put waits for the daemon to list it."""
LOOK_AGAIN_S = 0.5e-3


class HeldCopy(NamedTuple):
    """A copy in a device pool: its memory, and what ends the hold."""

    parts: Parts
    end: Callable[[], None]


class JustPut:
    """A tensor of this GPU that was just put: the copy's source, instead of the host's memory."""

    def __init__(self, tensor: TensorSource, held: Pin, then: Callable[[], None]) -> None:
        """`held` is of the extent that it was put to, since before the put could be seen.

        So an entry of the key that lies there is this put. `then` is called once the tensor is
        not read any more.
        """
        self.tensor = tensor
        self._held, self._then = [held], [then]
        self._extent = held.extent

    def is_at(self, extent: Extent) -> bool:
        """Whether the put is at this place."""
        return (self._extent.pool, self._extent.offset) == (extent.pool, extent.offset)

    def let_go(self) -> None:
        """End the hold: the entry is held by its number now."""
        with contextlib.suppress(IndexError):  # it has ended
            self._held.pop().end()

    def end(self) -> None:
        """End the holds that are left: the tensor is no longer read."""
        try:
            self.let_go()
        finally:
            with contextlib.suppress(IndexError):
                self._then.pop()()


class DevicePool:
    """One device pool, mapped in this process: for reading, and for writing once it is written."""

    def __init__(self, number: int, nbytes: int, fd: int, copies: Copies) -> None:
        """Map the pool, and own `fd`, by which it is mapped. Raises DeviceError."""
        self.number, self.nbytes, self.copies = number, nbytes, copies
        self._fd = fd
        self._writable: int | None = None
        self._slots = threading.BoundedSemaphore(MAX_PROMOTIONS)
        self._side = ThreadPoolExecutor(1, thread_name_prefix="ecd-promote")
        self._quiet_until_s = 0.0  # the daemon had no room
        self._has_failed = False
        try:
            self._readable = self._map(writable=False)
        except BaseException:
            os.close(fd)
            raise
        try:
            self._side.submit(int)  # its only thread, before anything depends on it
        except RuntimeError:
            self._quiet_until_s = math.inf

    @property
    def device(self) -> int:
        return self.copies.device

    def _map(self, writable: bool) -> int:
        with driver.on(self.device):
            return driver.map_memory(self._fd, self.nbytes, self.device, writable)

    def hold(self, session: Session, key: Key, entry: int, nbytes: int) -> HeldCopy | None:
        """Hold this pool's copy of an entry that the session holds. None: there is none."""
        index = session.index
        if index is None or self._has_failed or not session.ref():
            return None
        found = None
        try:
            with contextlib.suppress(AskDaemon):
                found = index.pin_copy(*key, entry, self.number)
        finally:
            if found is None:
                session.unref()
        if found is None:
            return None
        row, pin = found
        held = [pin]

        def end() -> None:
            with contextlib.suppress(IndexError):  # it has ended
                index.unpin(held.pop())
                session.unref()

        if row.nbytes != nbytes or row.offset + nbytes > self.nbytes:
            end()
            return None
        return HeldCopy([(self._readable + row.offset, nbytes)], end)

    def fail(self, error: BaseException) -> None:
        """Stop using the pool in this process's session."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("the device pool is not used any more: %s", error)

    def close(self) -> None:
        """Unmap the pool, in the background. No copy may be under way (R4)."""
        self._side.shutdown(wait=False)
        os.close(self._fd)
        completions.aside(self._unmap)

    def _unmap(self) -> None:
        for address in (self._readable, self._writable):
            try:
                if address is not None:
                    with driver.on(self.device):
                        driver.unmap_memory(address, self.nbytes)
            except DeviceError as error:
                logger.warning("a device pool stays mapped in this process: %s", error)

    def cut_off(self) -> None:
        """In a forked child: release the memory."""
        os.close(self._fd)

    # -- promotion -----------------------------------------------------------------------------

    def promote_soon(
        self, session: Session, key: Key, entry: int = 0, just_put: JustPut | None = None
    ) -> None:
        """Have a copy of the entry made here, on the side, if the daemon has room for it.

        `entry`: its number in the index; 0 for one that was put a moment ago and is not listed yet.
        `just_put` is ended, whatever comes of it.
        """
        if not self._submit(session, key, entry, just_put) and just_put is not None:
            just_put.end()

    @property
    def _is_quiet(self) -> bool:
        return self._has_failed or clock.now_s() < self._quiet_until_s

    def _submit(self, session: Session, key: Key, entry: int, just_put: JustPut | None) -> bool:
        if self._is_quiet or not self._slots.acquire(blocking=False):
            return False
        if not session.ref():
            self._slots.release()
            return False
        try:
            self._side.submit(self._promote_aside, session, key, entry, just_put)
        except RuntimeError:  # the interpreter ends
            self._slots.release()
            session.unref()
            return False
        return True

    def _promote_aside(
        self, session: Session, key: Key, entry: int, just_put: JustPut | None
    ) -> None:
        try:
            if not self._is_quiet:  # as it was when this began to wait
                self._promote(session, key, entry, just_put)
        except DeviceBusy as error:
            logger.debug("%s was not promoted: %s", shown(key[1]), error)
        except DeviceError as error:
            self.fail(error)
        except Exception as error:  # a call that was not answered may have reserved: no more
            self._quiet_until_s = math.inf
            logger.debug("nothing is promoted any more: %s", error)
        finally:
            try:
                if just_put is not None:
                    just_put.end()
            finally:
                self._slots.release()
                session.unref()

    def _promote(self, session: Session, key: Key, entry: int, just_put: JustPut | None) -> None:
        original = _listed(session, key, entry, just_put)
        if original is None:
            return
        if just_put is not None:
            just_put.let_go()
        if not 0 < original.extent.nbytes <= self.nbytes:
            original.end()
            return
        try:
            request = pb.PromoteRequest(
                session=session.token,
                key=to_key(key),
                entry=original.entry,
                pool=self.number,
            )
            reply = session.calls.later("promote", request).result()
            if reply.HasField("reserved"):
                self._copy_and_commit(session, original, reply.reserved, just_put)
            else:
                self._quiet_until_s = clock.now_s() + REFUSED_S
        finally:
            original.end()

    def _copy_and_commit(
        self,
        session: Session,
        original: Pin,
        reserved: pb.Reserved,
        just_put: JustPut | None,
    ) -> None:
        token, reservations = session.token, [reserved.reservation]
        try:
            if reserved.extent.offset + reserved.extent.nbytes > self.nbytes:
                raise EcdError("the extent lies outside of the device pool")
            if self._writable is None:
                self._writable = self._map(writable=True)
            original.pool.note_device_write()
            to = self._writable + reserved.extent.offset
            if just_put is None:
                self.copies.move(original.pool.load_parts(original.extent), to)  # W2
            else:
                just_put.tensor.copy_near(to)  # W1, W2, W3
                just_put.end()
        except BaseException:
            abort = pb.AbortRequest(session=token, reservations=reservations)
            session.calls.later("abort", abort).result()
            raise
        commit = pb.CommitRequest(session=token, reservations=reservations)
        session.calls.later("commit", commit).result()


def _listed(session: Session, key: Key, entry: int, just_put: JustPut | None) -> Pin | None:
    """Hold the entry of this number, or the key's once it is listed. None: it has gone.

    With `just_put` it must be that put.
    """
    until_s = clock.now_s() + LISTED_WITHIN_S
    while True:
        try:
            pin = session.pin(*key, OnMiss.GO_ON, is_use=False)
        except AskDaemon:
            return None
        if pin is None:
            return None
        is_right = entry in (0, pin.entry) and (just_put is None or just_put.is_at(pin.extent))
        if pin.entry and is_right:
            return pin
        is_over = bool(pin.entry or entry) or clock.now_s() >= until_s
        pin.end()
        if is_over:
            return None
        clock.sleep(LOOK_AGAIN_S)
