"""The Python client: put and get tensors by mm_hash.

from ecd_client import Client

with Client(namespace="my-model") as client:
    client.put(mm_hash, tensor)
    with client.get(mm_hash) as item:
        embedding = item.to("cuda")
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING

from ecd_client.calls import CALL_TIMEOUT_S, resolve
from ecd_client.errors import InvalidArgument
from ecd_client.item import Item
from ecd_client.reader import Key, Nodes, Reader, to_key
from ecd_client.session import Session
from ecd_client.writer import Writer, describe_entry
from ecd_proto.contract import Hint
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    import torch


class Client:
    """A connection to this node's daemon. Thread-safe; one per process is enough.

    A client, with its items and futures, belongs to the process that made it. A child that needs
    one is started with multiprocessing's spawn or forkserver, or forked before its parent has one.

    After a restart of the daemon it connects again by itself; until then calls raise
    DaemonUnavailable at once.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        namespace: str = "default",
        name: str = "python",
        connect_timeout: float = 5.0,
        call_timeout: float = CALL_TIMEOUT_S,
        prefault: bool = False,
    ) -> None:
        """Connect to `address`, by default `ECD_ADDRESS` or this user's daemon.

        `namespace` is what keys are in unless a call says otherwise; `name` is shown to
        operators. Waits `connect_timeout` seconds for the daemon, then raises
        DaemonUnavailable; with 0 it returns at once and connects in the background. A call,
        waits apart, that the daemon does not answer within `call_timeout` seconds fails.
        `prefault` fills this process's page tables on a side thread whenever it connects, so
        that copies find no page for the first time: for processes that live long.
        """
        self.address = resolve(address)
        self.namespace = namespace
        self._session = Session(self.address, name, prefault, call_timeout)
        self._reader = Reader(self._session)
        self._writer = Writer(self._session, self._reader)
        if connect_timeout > 0:
            try:
                self._session.conversation(connect_timeout)
            except BaseException:
                self.close()
                raise

    @property
    def connected(self) -> bool:
        return self._session.current is not None

    @property
    def incarnation(self) -> str:
        """Which life of the daemon this is. Raises DaemonUnavailable."""
        return self._session.conversation().incarnation

    @property
    def node(self) -> str:
        """Where other nodes reach this daemon, host:port; "" if nowhere. Raises DaemonUnavailable.

        Whoever wants this node's entries elsewhere gives it as `nodes` to a `get` there.
        """
        return self._session.conversation().node

    def hint(self, mm_hash: str, *, namespace: str | None = None) -> Hint | None:
        """This node, and where the entry lies here if memory shows that: for `nodes` elsewhere.

        It says nothing about how long that stays so. None: other nodes do not reach this one.
        Raises DaemonUnavailable.
        """
        return self._reader.hint(self._key(mm_hash, namespace))

    def wait_connected(self, timeout: float) -> None:
        """Wait until the daemon answers. Raises DaemonUnavailable after `timeout` seconds."""
        self._session.conversation(timeout)

    # -- writing -------------------------------------------------------------------------------

    def put(
        self,
        mm_hash: str,
        tensor: torch.Tensor,
        *,
        cost: float = 0.0,
        metadata: bytes = b"",
        namespace: str | None = None,
        timeout: float = CALL_TIMEOUT_S,
    ) -> bool:
        """Store a tensor of any shape, on any device. False: the key was there already.

        Returns once every client on the node can see the entry. `cost` is the seconds it took
        to encode, `metadata` up to 4 KiB that come back with every get. While another client is
        writing the key, waits for it at most `timeout` seconds. Raises EcdError.
        """
        from ecd_client.tensors import Source, describe

        dtype, shape = describe(tensor)
        what = describe_entry(self._key(mm_hash, namespace), dtype, shape, cost, metadata)
        return self._writer.put(what, Source(tensor).copy_to, timeout)

    def put_bytes(
        self,
        mm_hash: str,
        data: bytes | memoryview,
        dtype: str,
        shape: Sequence[int],
        *,
        cost: float = 0.0,
        metadata: bytes = b"",
        namespace: str | None = None,
        timeout: float = CALL_TIMEOUT_S,
    ) -> bool:
        """`put` without torch: `data` is the dense tensor of that dtype and shape."""
        shape = tuple(shape)
        what = describe_entry(self._key(mm_hash, namespace), dtype, shape, cost, metadata)
        if len(data) != what.nbytes:
            raise InvalidArgument(
                f"{dtype} of shape {shape} has {what.nbytes} bytes, not {len(data)}"
            )

        def copy_to(view: memoryview) -> None:
            view[:] = data

        return self._writer.put(what, copy_to, timeout)

    def put_async(
        self,
        mm_hash: str,
        tensor: torch.Tensor,
        *,
        cost: float = 0.0,
        metadata: bytes = b"",
        namespace: str | None = None,
    ) -> Future[bool]:
        """`put` without waiting: the space is asked for at once, the copy made on the side.

        What is small and on the host is copied before this returns, if memory was granted for it:
        that takes less than handing it over. The tensor must not be written to until the future
        is done, and it cannot be cancelled. A key that another client is writing is left to it
        (False). Raises InvalidArgument, DaemonUnavailable, and EcdError when MAX_PENDING_PUTS are
        in flight; the future raises EcdError.
        """
        from ecd_client.tensors import Source, describe

        dtype, shape = describe(tensor)
        what = describe_entry(self._key(mm_hash, namespace), dtype, shape, cost, metadata)
        return self._writer.put_async(what, Source(tensor).copy_to, tensor.is_cpu)

    # -- reading -------------------------------------------------------------------------------

    def get(
        self,
        mm_hash: str,
        timeout: float = 0.0,
        *,
        namespace: str | None = None,
        nodes: Nodes = (),
    ) -> Item | None:
        """A lease on the entry, waiting up to `timeout` seconds for somebody to store it.

        With a timeout, and a daemon that has peers, an entry that is not on this node is brought
        from another: from `nodes` (host:port, or what `hint` said there), which are likely to have
        it, or from wherever the daemon's directory knows it. None: it is not there. Raises
        EcdError.
        """
        return self._reader.get(self._key(mm_hash, namespace), timeout, nodes)

    def get_now(self, mm_hash: str, *, namespace: str | None = None) -> tuple[Item | None, bool]:
        """`get` of what is found in memory, in microseconds whatever the daemon does.

        None, and whether `get_async` could find it by asking: somebody may be writing it, other
        nodes may have it, or only a call can tell. Raises DaemonUnavailable.
        """
        return self._reader.get_now(self._key(mm_hash, namespace))

    def get_async(
        self,
        mm_hashes: Sequence[str],
        timeout: float = 0.0,
        *,
        only_if_written: bool = False,
        namespace: str | None = None,
        nodes: Sequence[Nodes] = (),
    ) -> list[Future[Item | None]]:
        """`get` of many, without waiting: one future each, done at most `timeout` s later.

        With `only_if_written` the wait is only for keys that somebody is writing now, or that are
        being brought from another node. `nodes`, if given, has the likely nodes of each key. A
        future that is cancelled ends its wait. Raises InvalidArgument and DaemonUnavailable.
        """
        keys = [self._key(mm_hash, namespace) for mm_hash in mm_hashes]
        return self._reader.get_async(keys, timeout, only_if_written, nodes)

    def offer(
        self, mm_hashes: Sequence[str], nodes: Sequence[str], *, namespace: str | None = None
    ) -> None:
        """Tell `nodes` (host:port) of these keys, now or when they are stored here.

        They bring the entries to themselves ahead of need. Advice: nobody waits for it, and what
        is not stored within a minute is forgotten. Raises DaemonUnavailable.
        """
        keys = [self._key(mm_hash, namespace) for mm_hash in mm_hashes]
        request = pb.OfferRequest(keys=map(to_key, keys), nodes=nodes)
        told = self._session.conversation().calls.later("offer", request)
        told.add_done_callback(lambda _: None)  # grpc cancels a call that nobody refers to

    def contains(self, mm_hashes: Sequence[str], *, namespace: str | None = None) -> list[bool]:
        """Which of the keys are stored on this node now. Raises EcdError."""
        return self._reader.contains(self.namespace if namespace is None else namespace, mm_hashes)

    def is_shown(self, mm_hash: str, *, namespace: str | None = None) -> bool:
        """Whether memory shows the entry stored here, or being copied to where it will lie.

        No call is made: what only the daemon could tell is not shown. Raises DaemonUnavailable.
        """
        return self._reader.is_shown(self._key(mm_hash, namespace))

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the puts in flight and end the session. Items of this client end with it."""
        if self._session.is_cut_off:
            return
        self._writer.close()
        self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _key(self, mm_hash: str, namespace: str | None) -> Key:
        return self.namespace if namespace is None else namespace, mm_hash
