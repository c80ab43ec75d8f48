"""The store that SGLang's encoder asks before it encodes, and to which it gives its outputs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch
from sglang.srt.mem_cache.embedding_store import EmbeddingStore

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError, InvalidArgument
from ecd_client.item import Item
from ecd_client.reader import close_unseen
from ecd_client.sglang.settings import namespace
from ecd_client.tensors import describe
from ecd_proto.contract import MAX_MM_HASH_BYTES

BATCH_S = 5.0
"""Longest wait of one batch for other nodes and writers. SGLang itself gives up after 60 s."""
CALL_S = 2.0
AT_ONCE = 64
"""Entries of a batch that are held at one time: a session has some hundred pins."""
QUIET_S = 60.0
"""Time between two messages about failures."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EcdEmbeddingStore(EmbeddingStore):
    """SGLang's `EmbeddingStore` over this node's daemon.

    SGLang names memory by addresses; they must lie in a buffer that it registered. An entry is kept
    as rows of that buffer's dtype and width, and one of another dtype or shape is a miss. So is
    whatever else goes wrong: no method raises once the buffers are registered.
    """

    def __init__(self) -> None:
        """Connect to `ECD_ADDRESS` in the background. Raises InvalidArgument."""
        self._settings = namespace()
        self._namespace = ""  # until a buffer tells the dtype
        self._buffers: list[torch.Tensor] = []
        self._client = Client(
            name="sglang", connect_timeout=0.0, call_timeout=CALL_S, uses_puts=True
        )
        self._failures = 0
        self._quiet_until_s = 0.0

    def register_buffer(self, tensor: torch.Tensor) -> None:
        """Allow copies from and to a host tensor of (rows, width). Raises InvalidArgument."""
        dtype, shape = describe(tensor)
        is_dense = tensor.is_contiguous() and tensor.numel() > 0
        if len(shape) != 2 or not is_dense or tensor.device.type != "cpu":
            raise InvalidArgument(
                f"a buffer must be dense rows on the host, not {shape} on {tensor.device}"
            )
        joined = f"{self._settings}|{dtype}"
        if self._namespace not in ("", joined):
            raise InvalidArgument(f"all buffers have one dtype: {self._namespace} and {joined}")
        if not self._namespace:
            logger.info("ecd's namespace is %s", joined)
        self._namespace = joined
        self._buffers.append(tensor)

    # -- SGLang's calls ------------------------------------------------------------------------

    def batch_is_exist(self, hashes: list[str]) -> list[bool]:
        """Which entries this node has, after fetching those that other nodes have."""
        names, found = list(filter(_is_key, hashes)), set[str]()
        deadline_s = clock.now_s() + BATCH_S
        try:
            found.update(itertools.compress(names, self._contains(names)))
            for batch in _batches([name for name in names if name not in found]):
                items = self._held(batch, deadline_s, is_use=False)
                for name, item in zip(batch, items, strict=True):
                    if item is None:
                        self._client.count_miss()
                    else:
                        found.add(name)
                        item.close()
        except EcdError as error:
            self._failed(error)
        return [name in found for name in hashes]

    def batch_get(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_get_into_multi_buffers(
            hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes]
        )

    def batch_put(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_put_from_multi_buffers(
            hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes]
        )

    def batch_get_into_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Copy each entry into its parts, in order. False: a miss, and the parts are undefined."""
        results = [False] * len(hashes)
        deadline_s = clock.now_s() + BATCH_S
        wanted = self._checked(hashes, ptrs, sizes)
        for batch in _batches(list(wanted)):
            try:
                items = self._held([hashes[index] for index in batch], deadline_s)
            except EcdError as error:
                self._failed(error)
                break
            for index, item in zip(batch, items, strict=True):
                if item is not None:
                    results[index] = self._copied(item, wanted[index])
        return results

    def batch_put_from_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Store each entry from its parts. True: it is stored, by this call or before."""
        results = [False] * len(hashes)
        deadline_s = clock.now_s() + BATCH_S
        for index, parts in self._checked(hashes, ptrs, sizes).items():
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            left_s = max(0.0, deadline_s - clock.now_s())
            try:
                self._client.put(hashes[index], whole, namespace=self._namespace, timeout=left_s)
                results[index] = True
            except EcdError as error:
                self._failed(error)
                if not self._client.connected:
                    break
        return results

    # -- entries -------------------------------------------------------------------------------

    def _contains(self, names: Sequence[str]) -> list[bool]:
        if not self._namespace:
            return [False] * len(names)
        return self._client.contains(names, namespace=self._namespace)

    def _held(
        self, names: Sequence[str], deadline_s: float, *, is_use: bool = True
    ) -> list[Item | None]:
        """The entries, each held; waits for those that are on their way. Raises EcdError."""
        if not self._namespace:
            return [None] * len(names)
        left_s = max(0.0, deadline_s - clock.now_s())
        futures = self._client.get_async(
            names, left_s, only_if_written=True, namespace=self._namespace, is_use=is_use
        )
        wait(futures, left_s + CALL_S)
        return [self._item(future) for future in futures]

    def _item(self, future: Future[Item | None]) -> Item | None:
        if not future.done() and not future.cancel():
            future.add_done_callback(close_unseen)
            return None
        if future.cancelled():
            return None
        error = future.exception()
        if error is not None:
            self._failed(error)
            return None
        return future.result()

    def _copied(self, item: Item, parts: Sequence[torch.Tensor]) -> bool:
        """Copy the entry into the parts and close it. False: it is of another dtype or shape."""
        with item:
            rows, dtype, width = sum(map(len, parts)), parts[0].dtype, parts[0].shape[1]
            try:
                source, copied = item.tensor, 0
                if source.dtype != dtype or source.shape != (rows, width):
                    return False
                for part in parts:
                    part.copy_(source[copied : copied + len(part)])
                    copied += len(part)
                item.check()  # it was held until the last byte was read
                return True
            except EcdError as error:
                self._failed(error)
                return False

    # -- SGLang's memory -----------------------------------------------------------------------

    def _checked(
        self, hashes: Sequence[str], ptrs: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> dict[int, list[torch.Tensor]]:
        """The parts of each entry, by its place in the batch; without those that are refused."""
        if not len(hashes) == len(ptrs) == len(sizes):
            self._failed(f"{len(hashes)} hashes, {len(ptrs)} addresses and {len(sizes)} sizes")
            return {}
        checked: dict[int, list[torch.Tensor]] = {}
        for index, name in enumerate(hashes):
            pieces = list(zip(ptrs[index], sizes[index], strict=False))
            parts = [rows for piece in pieces if (rows := self._rows(*piece)) is not None]
            if not len(parts) == len(ptrs[index]) == len(sizes[index]) != 0:
                self._failed(f"{pieces} are not rows of a registered buffer")
            elif len({part.shape[1] for part in parts}) == 1 and _is_key(name):
                checked[index] = parts
        return checked

    def _rows(self, address: int, nbytes: int) -> torch.Tensor | None:
        """The registered rows at an address. None: they are not whole rows of one buffer."""
        for buffer in self._buffers:
            row_bytes = buffer.shape[1] * buffer.element_size()
            first, before = divmod(address - buffer.data_ptr(), row_bytes)
            rows, after = divmod(nbytes, row_bytes)
            if before == after == 0 <= first and 0 < rows <= len(buffer) - first:
                return buffer[first : first + rows]
        return None

    def _failed(self, why: object) -> None:
        """Count a failure, and say so once a minute."""
        self._failures += 1
        now_s = clock.now_s()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + QUIET_S
            logger.warning("ecd: a miss (%d so far that failed): %s", self._failures, why)


def _is_key(name: object) -> bool:
    """Whether the daemon can have an entry of that name."""
    if not isinstance(name, str):
        return False
    try:
        return 0 < len(name.encode()) <= MAX_MM_HASH_BYTES
    except UnicodeEncodeError:
        return False


def _batches(things: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(things), AT_ONCE):
        yield things[start : start + AT_ONCE]
