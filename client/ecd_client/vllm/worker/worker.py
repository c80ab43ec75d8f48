"""The worker's role: ecd's items into vLLM's encoder cache, and the encoder's outputs into ecd."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.compat import TELLS_WHAT_TO_SAVE
from ecd_client.vllm.base.reports import RankReports
from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.base.stats import EcdStats
from ecd_client.vllm.base.transfer import EcdMetadata, Load
from ecd_client.vllm.worker.encode_time import EncodeTime
from ecd_client.vllm.worker.loader import Loader
from ecd_proto.contract import shown

logger = init_logger(f"vllm.{__name__}")

MAX_SAVES = 128
MAX_SAVING_BYTES = 1 << 30
"""Encoder outputs kept alive until they are copied out; outputs beyond are not stored."""
MARK: Any = object()
"""A key in vLLM's encoder cache, which is emptied as a whole only when weights change.

It is no string, so that no client can name it.
"""
SEEN_WITHIN_S = 0.1
"""Longest wait of a step until memory shows the items that it saved."""
LOOK_AGAIN_S = 1e-3
"""Pause between two looks: a save is shown before its future is done, which may be late."""
MAX_ORIGINS = 1 << 14
"""Items whose origins are remembered, in case they have to be stored again."""


class Origin(NamedTuple):
    """Where an item of the encoder cache comes from: the `move`, and what its entry says of it."""

    move: int
    cost_s: float
    metadata: bytes


class WorkerRole:
    """One per worker process; called from its model runner's thread only, but for saves' ends."""

    def __init__(self, settings: Settings, *, is_producer: bool, is_consumer: bool) -> None:
        self._settings = settings
        self._is_producer, self._only_encodes = is_producer, is_producer and not is_consumer
        self._client = Client(
            settings.address,
            name="vllm worker",
            connect_timeout=0.0,
            uses_puts=is_consumer,
        )
        self._stats = EcdStats()
        self._loader = Loader(
            self._client, settings.load_timeout_s, self._stats, settings.device_views
        )
        self._loader.pin()
        self._saves: deque[tuple[str, Future[bool], int]] = deque()
        self._saving_bytes = 0
        self._origins: OrderedDict[str, Origin] = OrderedDict()
        self._placeholders: dict[str, bytes] = {}  # of this step's outputs
        self._is_answered = True  # whether the last save was seen, or done, in time
        self._encode_time = EncodeTime(lambda: self._loader.device)
        self._encoded_rows = 0  # by the encoder of this step
        self._rank: int | None = None
        self._namespace: str | None = None
        self._encoder_cache: dict[str, torch.Tensor] | None = None
        self._reports: RankReports | None = None
        self._place, self._step = ("", ""), 0
        self._is_apart = False  # from the scheduler's machine
        self._move = -1
        self._marked = -1  # the move for which MARK was put there
        self.forgotten = -1
        """The move since which the encoder cache was emptied, unknown to the scheduler; or -1."""

    def close(self) -> None:
        self._client.close()

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(self, step: EcdMetadata) -> None:
        """Take the scheduler's message: where outputs are stored from now on, if anywhere.

        Its `move` differs whenever the weights may have changed, or are known again. vLLM 0.28
        does not show the encoder cache at this point: the one seen last stands for it.
        """
        self._encoded_rows = step.encoded_rows if self._is_producer else 0
        self._encode_time.begin(self._encoded_rows)
        if step.namespace is not None:
            self._client.namespace = step.namespace
        if step.move != self._move:
            self._move, self.forgotten = step.move, -1
        self._namespace, self._place = step.namespace, step.reports
        self._step = step.step
        self._placeholders = step.placeholders
        if self._is_producer and not TELLS_WHAT_TO_SAVE and self._encoder_cache is not None:
            self.begin_saves(step, self._encoder_cache)

    def begin_saves(self, step: EcdMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Store and keep the items that the scheduler's message names."""
        self._check_mark(encoder_cache)
        self._keep(step.keeps, encoder_cache)
        self._save_again(step.saves, encoder_cache)
        self._encode_time.begin(self._encoded_rows)

    def end_step(self) -> None:
        """Report the work done since the last call."""
        if self._only_encodes:
            self._wait_seen()
        self._reap()
        if self._reports is None and not self._is_apart:
            try:
                self._reports = RankReports(self._place, self._loading_rank())
            except OSError as error:
                self._is_apart = True
                logger.warning(
                    "ecd: this worker cannot report to its scheduler (%s), which takes its loads "
                    "for unfinished. Both must run on one machine, and see each other's /proc",
                    error,
                )
        if self._reports is None:
            return
        for load in self._loader.take_done():
            self._reports.done(load)
        self._reports.forgot(self.forgotten)
        if not self._stats.is_empty():
            self._reports.add(self._stats.take())
        self._reports.end_step(self._step)

    def _check_mark(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Note whether the cache was emptied, which means that the weights changed.

        If the scheduler knows of it, there was a move. Otherwise nothing is stored until there is
        one.
        """
        if self._move != self._marked:
            self._marked = self._move
            encoder_cache[MARK] = torch.empty(0)
        self.forgotten = -1 if MARK in encoder_cache else self._move

    # -- loading -------------------------------------------------------------------------------

    def load(self, loads: list[Load], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put every item into `encoder_cache`, whole for what the step does next."""
        self._encoder_cache = encoder_cache
        self._check_mark(encoder_cache)
        new = {}
        for load in loads:
            if load.identifier in encoder_cache or load.identifier in new:
                self._loader.note_done(load.id)
            else:
                new[load.identifier] = load
        self._loader.load(new.values(), encoder_cache)
        for load in new.values():
            self._note_origin(load.identifier, load.cost_s, load.metadata)
            self._stats.count("loads")
            self._stats.count("loaded_bytes", load.handle.nbytes)
        self._encode_time.begin(self._encoded_rows)

    # -- saving --------------------------------------------------------------------------------

    def save(self, identifier: str, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Store an encoder output, if others use it; a long copy is made beside the step."""
        if not self._is_producer:
            return
        self._encoder_cache = encoder_cache
        self._check_mark(encoder_cache)
        output = encoder_cache[identifier]
        cost_s = self._encode_time.cost_s(output.shape[0])
        metadata = self._placeholders.get(identifier, b"")
        self._note_origin(identifier, cost_s, metadata)
        self._save(identifier, output, cost_s, metadata)

    def _save_again(self, identifiers: list[str], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Store the items that the encoder cache still has from these weights."""
        for identifier in identifiers:
            origin = self._origins.get(identifier)
            if origin and origin.move == self._move and identifier in encoder_cache:
                output = encoder_cache[identifier]
                self._save(identifier, output, origin.cost_s, origin.metadata)

    def _keep(self, identifiers: list[str], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Copy items from ecd into the encoder cache, where vLLM's scheduler takes them to be."""
        for identifier in identifiers:
            with contextlib.suppress(EcdError):
                item, _ = self._client.get_now(identifier, is_use=False)
                if item is not None:
                    with item:
                        encoder_cache[identifier] = item.to(self._loader.device, non_blocking=True)
                        self._note_origin(identifier, item.cost_s, item.metadata)

    def _note_origin(self, identifier: str, cost_s: float, metadata: bytes) -> None:
        if self.forgotten >= 0:  # its weights are unknown
            self._origins.pop(identifier, None)
            return
        self._origins[identifier] = Origin(self._move, cost_s, metadata)
        while len(self._origins) > MAX_ORIGINS:
            self._origins.popitem(last=False)

    def _wait_seen(self) -> None:
        """Wait until memory shows this step's saves, so that the scheduler's answers name them.

        Most saves go to memory that was granted ahead, and are shown at once. The others need the
        daemon's answer, which is waited for unless the last one did not come in time.
        """
        deadline_s = clock.now_s() + (SEEN_WITHIN_S if self._is_answered else 0.0)
        for identifier, future, _ in self._saves:
            while not (is_seen := future.done() or self._is_shown(identifier)):
                if clock.now_s() >= deadline_s:
                    break
                wait([future], LOOK_AGAIN_S)
            self._is_answered = is_seen

    def _note_done(self, begun_s: float) -> None:
        """Wait for saves again once one was done in time, even if no step waited for it."""
        if clock.now_s() - begun_s < SEEN_WITHIN_S:
            self._is_answered = True

    def _is_shown(self, identifier: str) -> bool:
        with contextlib.suppress(EcdError):
            return self._client.is_shown(identifier)
        return False

    def _save(self, identifier: str, output: torch.Tensor, cost_s: float, metadata: bytes) -> None:
        if (
            self._namespace is None
            or self._loading_rank() != 0
            or not self._settings.shares(identifier)
        ):
            return
        self._reap()
        if self.forgotten >= 0:
            self._drop(identifier, "weights may have changed")
            return
        nbytes = output.numel() * output.element_size()
        if len(self._saves) >= MAX_SAVES or self._saving_bytes + nbytes > MAX_SAVING_BYTES:
            self._drop(identifier, "too many are on the way")
            return
        begun_s = clock.now_s()
        try:
            future = self._client.put_async(identifier, output, cost=cost_s, metadata=metadata)
        except EcdError as error:
            self._drop(identifier, error)
            return
        if not future.done():
            future.add_done_callback(lambda _: self._note_done(begun_s))
        self._saves.append((identifier, future, nbytes))
        self._saving_bytes += nbytes

    def _reap(self) -> None:
        """Count the saves that are over."""
        while self._saves and self._saves[0][1].done():
            identifier, future, nbytes = self._saves.popleft()
            self._saving_bytes -= nbytes
            error = future.exception()
            if error is not None:
                self._drop(identifier, error)
            elif future.result():
                self._stats.count("saves")
                self._stats.count("saved_bytes", nbytes)
            else:
                self._stats.count("duplicates")

    def _drop(self, identifier: str, cause: object) -> None:
        self._stats.count("dropped_saves")
        logger.debug("ecd: %s is not stored: %s", shown(identifier), cause)

    def _loading_rank(self) -> int:
        """This worker's number among those of the pipeline's first stage, which load and encode."""
        if self._rank is None:
            from vllm.distributed.parallel_state import get_pcp_group, get_tp_group

            tensor, context = get_tp_group(), get_pcp_group()
            self._rank = context.rank_in_group * tensor.world_size + tensor.rank_in_group
        return self._rank
