"""The Python client: put and get tensors by mm_hash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ecd_client import arguments, forks
from ecd_client.acquire import NO_NODES, Nodes
from ecd_client.device.pinned import Pinning
from ecd_client.errors import InvalidArgument
from ecd_client.item import Handle, Item
from ecd_client.locate import Located, encoders, locate
from ecd_client.reader import Reader
from ecd_client.session.channel import CALL_TIMEOUT_S, resolve
from ecd_client.session.connection import Connection
from ecd_client.values import Key, to_key
from ecd_client.writer import Writer, describe_entry
from ecd_proto.contract import BENCH_NAMESPACE, Hint
from ecd_proto.encoders import RegisteredEncoder
from ecd_proto.engines import Engine

if TYPE_CHECKING:
    import torch


class Client:
    """Puts and gets entries by this node's daemon. Thread-safe; one per process is enough.

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
        uses_puts: bool = False,
    ) -> None:
        """Connect to `address`, by default `ECD_ADDRESS` or this user's daemon.

        Keys are in `namespace` unless a call names another; `name` is shown to operators. Waits
        `connect_timeout` seconds for the daemon, up to a minute for one that is still populating
        its pool, then raises DaemonUnavailable; with 0 it returns at once and connects in the
        background. A call, waits apart, that the daemon does not answer within `call_timeout`
        seconds fails. `uses_puts`: this process uses what it puts, so that each `get` of that
        counts as an encode saved; else the first `get` counts as handed over.
        """
        self.address = resolve(address)
        self.namespace = arguments.text(namespace, "namespace")
        name = arguments.text(name, "client's name")
        connect_timeout = arguments.seconds(connect_timeout, "connect_timeout")
        call_timeout = arguments.seconds(call_timeout, "call_timeout")
        about = not namespace.startswith(BENCH_NAMESPACE), uses_puts, namespace
        self._connection = Connection(self.address, name, call_timeout, *about)
        self._reader = Reader(self._connection)
        self._writer = Writer(self._connection, self._reader)
        if connect_timeout > 0:
            try:
                self._connection.start(connect_timeout)
            except BaseException:
                self.close()
                raise

    @property
    def connected(self) -> bool:
        """Whether the client has a session with the daemon now."""
        return self._connection.current is not None

    @property
    def incarnation(self) -> str:
        """The daemon's incarnation, another one after each restart. Raises DaemonUnavailable."""
        return self._connection.session().incarnation

    @property
    def node(self) -> str:
        """The address for other nodes, host:port; "" if they cannot reach this daemon.

        A client elsewhere passes it as `nodes` to `get` entries. Raises DaemonUnavailable.
        """
        return self._connection.session().node

    def hint(self, mm_hash: str, *, namespace: str | None = None) -> Hint | None:
        """This node, and the entry's extent if memory shows it: for `nodes` elsewhere.

        The extent may change at any time. None: no node reaches this one. Raises DaemonUnavailable.
        """
        return self._reader.hint(self._key(mm_hash, namespace))

    def wait_connected(self, timeout: float) -> None:
        """Wait until the daemon answers. Raises DaemonUnavailable after `timeout` seconds."""
        self._connection.session(arguments.seconds(timeout, "timeout"))

    def describe(self, engine: Engine, on_apart: Callable[[Engine], None] | None = None) -> None:
        """Tell operators, and other engines of its model, which engine this client is of.

        Every client of the daemon can read it; a later call replaces it. `on_apart` is called, on
        another thread and once a session, with an engine of the same model that stores under
        another namespace, where no other engine stores under this one's. Raises InvalidArgument.
        """
        arguments.engine(engine)
        self._connection.describe(engine, on_apart)

    def register(self, engine: str, url: str, active: int = 0) -> None:
        """Register an encoder's API server and its load, until `close`. Raises InvalidArgument."""
        self._connection.register(arguments.encoder(engine, url, active))

    def encoders(self, *, namespace: str | None = None) -> list[RegisteredEncoder]:
        """The encoders that are registered here and on other nodes. Raises EcdError."""
        return encoders(self._connection.session(), self._namespace(namespace))

    def pin(self, device: torch.device | str = "cuda") -> None:
        """Pin the daemon's pools in this process, in the background, for copies of this GPU.

        Takes about 0.03 s for a GiB and as long in pauses, more while other engines pin, and again
        after a restart of the daemon; else the first copy begins it. Does nothing without such a
        GPU, or with `ECD_PIN=off`. Copies of memory that is not pinned take three times as long.
        """
        self._connection.pin(arguments.device(device))

    @property
    def pinning(self) -> Pinning:
        """What this process has pinned of the pool; all zero until that has ended."""
        session = self._connection.current
        return Pinning() if session is None else session.pools.granted.pinning

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

        A tensor of a GPU is copied once the work that is queued on the current stream is done.
        Returns once every client on the node can see the entry. `cost` is the seconds it took
        to encode, `metadata` up to 4 KiB that come back with every get. While another client is
        writing the key, waits for it at most `timeout` seconds. Raises EcdError.
        """
        from ecd_client.tensors import TensorSource, describe

        dtype, shape = describe(tensor)
        entry = describe_entry(self._key(mm_hash, namespace), dtype, shape, cost, metadata)
        return self._writer.put(entry, TensorSource(tensor).copy_to, timeout)

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
        """`put` without torch: `data` is the dense tensor of that dtype and shape.

        It may be any object that has its bytes in one piece. Raises EcdError.
        """
        content = arguments.buffer(data)
        entry = describe_entry(self._key(mm_hash, namespace), dtype, shape, cost, metadata)
        return self._writer.put_bytes(entry, content, timeout)

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

        A small tensor on the host is copied before this returns, if memory was granted for it. A
        tensor of a GPU is read after the work that is queued on the current stream now, on a stream
        of its own; the entry is stored once that copy was seen to be over. The copy for the GPU's
        device pool, if there is one, is made of the tensor too, before the future is done. Do not
        write to the tensor until the future is done, which cannot be cancelled. A key that another
        client is writing is left to it (False). Raises InvalidArgument, DaemonUnavailable, and
        EcdError when MAX_PENDING_PUTS are in flight; the future raises EcdError.
        """
        from ecd_client.tensors import TensorSource, describe

        dtype, shape = describe(tensor)
        entry = describe_entry(self._key(mm_hash, namespace), dtype, shape, cost, metadata)
        return self._writer.put_async(entry, TensorSource(tensor))

    # -- reading -------------------------------------------------------------------------------

    def get(
        self,
        mm_hash: str,
        timeout: float = 0.0,
        *,
        namespace: str | None = None,
        nodes: Nodes = NO_NODES,
        is_use: bool = True,
    ) -> Item | None:
        """The entry, held until the item is closed; waits up to `timeout` seconds for it.

        With a timeout, an entry that is not in memory is brought from the daemon's disk tier, or
        from another node: from `nodes` (host:port, or a `hint` of theirs), which are likely to
        have it, or from a node that the daemon's directory names. None: a miss. Without `is_use`
        nothing is counted until `Item.count_use` or `count_miss`. Raises EcdError.
        """
        return self._reader.get(self._key(mm_hash, namespace), timeout, nodes, is_use)

    def get_now(
        self, mm_hash: str, *, namespace: str | None = None, is_use: bool = True
    ) -> tuple[Item | None, bool]:
        """`get` without a call, in microseconds whatever the daemon does.

        For an entry that memory does not show: None, and whether `get_async` could find it, as
        somebody may be writing it, the daemon's disk or other nodes may have it, or only a call
        can tell. Raises DaemonUnavailable.
        """
        return self._reader.get_now(self._key(mm_hash, namespace), is_use)

    def count_miss(self, *, namespace: str | None = None) -> None:
        """Count a miss of lookups without `is_use`. Does nothing while the daemon is away."""
        self._reader.count_miss("" if namespace is None else self._namespace(namespace))

    def hold(self, mm_hash: str, handle: Handle, *, namespace: str | None = None) -> Item | None:
        """An item of this process's own, of an entry that another process holds by `handle`.

        Makes no call and counts no use. None: the entry lies elsewhere by now, or this process
        cannot hold it without a call. Raises InvalidArgument.
        """
        if not isinstance(handle, Handle):
            raise InvalidArgument(f"a handle is what Item.handle returns, not {handle!r:.80}")
        return self._reader.hold(self._whole_key(mm_hash, namespace), handle)

    def get_async(
        self,
        mm_hashes: Sequence[str],
        timeout: float = 0.0,
        *,
        only_if_written: bool = False,
        namespace: str | None = None,
        nodes: Sequence[Nodes] = (),
        makes: Sequence[float | None] = (),
        is_use: bool = True,
    ) -> list[Future[Item | None]]:
        """`get` of many, without waiting: one future each, done at most `timeout` s later.

        With `only_if_written`, waits only for keys that are being written, or fetched from another
        node. `nodes`, if given, has the likely nodes of each key. `makes`, if given, has a number
        for each key that this client makes if no node has it, else None: the seconds that it waits
        if another node makes the key. The daemon waits so long even if `timeout` is shorter. With
        several keys it must be 0, as two clients that each make one would wait for each other.
        Cancelling a future ends its wait. Raises InvalidArgument and DaemonUnavailable.
        """
        names = arguments.many(mm_hashes, "get_async")
        keys = [(self._namespace(namespace), arguments.string(name, "key")) for name in names]
        return self._reader.get_async(keys, timeout, only_if_written, nodes, makes, is_use)

    def offer(
        self, mm_hashes: Sequence[str], nodes: Sequence[str], *, namespace: str | None = None
    ) -> None:
        """Tell `nodes` (host:port) of these keys, now or when they are stored here.

        They fetch the entries ahead of need. An offer is advice: nobody waits for it, and the
        daemon forgets a key that is not stored within a minute. Raises InvalidArgument and
        DaemonUnavailable.
        """
        keys = self._whole_keys(mm_hashes, namespace, "offer")
        self._writer.offer(keys, arguments.node_names(nodes, "offer"))

    def contains(self, mm_hashes: Sequence[str], *, namespace: str | None = None) -> list[bool]:
        """Which of the keys are stored on this node now.

        Raises InvalidArgument for one string in place of a list, and EcdError.
        """
        keys = self._keys(mm_hashes, namespace, "contains")
        return self._reader.contains(self._namespace(namespace), [mm_hash for _, mm_hash in keys])

    def locate(self, mm_hashes: Sequence[str], *, namespace: str | None = None) -> Located:
        """The nodes that hold these keys, by this daemon's index and its directory.

        At most 1,024 keys a call, which takes a second where the directory is slow. Raises
        InvalidArgument for one string in place of a list, and EcdError.
        """
        keys = self._keys(mm_hashes, namespace, "locate")
        return locate(self._connection.session(), keys)

    def is_shown(self, mm_hash: str, *, namespace: str | None = None) -> bool:
        """Whether memory shows the entry as stored here, or as being copied into the pool.

        No call is made: an entry that only the daemon knows is not shown. Raises
        DaemonUnavailable.
        """
        return self._reader.is_shown(self._key(mm_hash, namespace))

    def shown_metadata(self, mm_hash: str, *, namespace: str | None = None) -> bytes | None:
        """The metadata of an entry that memory shows as stored here, or as being copied here.

        No call is made. They are empty, too, where memory has no room for them. None: memory does
        not show the entry. Raises DaemonUnavailable.
        """
        return self._reader.shown_metadata(self._key(mm_hash, namespace))

    # -- making --------------------------------------------------------------------------------

    def lock(self, mm_hash: str, seconds: float, *, namespace: str | None = None) -> bool:
        """Lock a key among this node's clients, which agree in this way on who makes it.

        False: another client has locked it. The lock is advice: it keeps nobody from putting the
        key. It ends after `seconds`, some tenths of a second late, or with this client. A client
        has MAX_LOCKS; with more, its oldest ends. Meanwhile other nodes wait for a key that this
        node has said it makes (`makes`). No call is made. Raises EcdError.
        """
        key = self._whole_key(mm_hash, namespace)
        seconds = arguments.seconds(seconds, "seconds")
        return self._connection.session().key_locks.take(*key, seconds)

    def is_locked(self, mm_hash: str, *, namespace: str | None = None) -> bool:
        """Whether another client of this node has locked the key. Raises EcdError."""
        key = self._whole_key(mm_hash, namespace)
        return self._connection.session().key_locks.is_taken(*key)

    def is_made_elsewhere(self, mm_hash: str, *, namespace: str | None = None) -> bool:
        """Whether the daemon waits for another node that makes the key, for a client (`makes`).

        No call is made. Raises EcdError.
        """
        key = self._whole_key(mm_hash, namespace)
        return self._connection.session().key_locks.is_made_elsewhere(*key)

    def unlock(self, mm_hash: str, *, namespace: str | None = None) -> None:
        """End this client's lock of the key, if it has one. Raises EcdError."""
        key = self._whole_key(mm_hash, namespace)
        self._connection.session().key_locks.release(*key)

    def unlock_all(self) -> None:
        """End all of this client's locks. Raises DaemonUnavailable."""
        self._connection.session().key_locks.release_all()

    def stop_making(self, mm_hashes: Sequence[str], *, namespace: str | None = None) -> None:
        """Tell other nodes that wait that these keys are not made (`makes`) after all.

        The daemon waits for no other node any more that makes them, unless another client has it
        wait. Nobody waits for this. Raises InvalidArgument and DaemonUnavailable.
        """
        keys = self._whole_keys(mm_hashes, namespace, "stop_making")
        self._connection.session().stop_making(list(map(to_key, keys)))

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the puts in flight, then end the session and with it the items of this client."""
        if self._connection.is_cut_off or forks.is_uncut():
            return
        self._writer.close()
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "connected" if self.connected else "not connected"
        return f"<Client of {self.address}, namespace {self.namespace!r}, {state}>"

    def _namespace(self, namespace: str | None) -> str:
        return self.namespace if namespace is None else arguments.text(namespace, "namespace")

    def _key(self, mm_hash: str, namespace: str | None) -> Key:
        if namespace is None and type(mm_hash) is str and mm_hash.isascii():
            return self.namespace, mm_hash  # as below, without its calls: every hit is here
        return self._namespace(namespace), arguments.text(mm_hash, "key")

    def _whole_key(self, mm_hash: str, namespace: str | None) -> Key:
        """A key that the daemon accepts, for calls whose answer would not report another."""
        return arguments.key(*self._key(mm_hash, namespace))

    def _keys(self, mm_hashes: Sequence[str], namespace: str | None, call: str) -> list[Key]:
        return [self._key(name, namespace) for name in arguments.many(mm_hashes, call)]

    def _whole_keys(self, mm_hashes: Sequence[str], namespace: str | None, call: str) -> list[Key]:
        return [self._whole_key(name, namespace) for name in arguments.many(mm_hashes, call)]
