"""Looking wanted items up: in memory at once, the rest with one message to the daemon a step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from vllm.logger import init_logger

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable, EcdError
from ecd_client.vllm.base.compat import ASKS_OF_RUNNING
from ecd_client.vllm.base.outputs import Outputs
from ecd_client.vllm.base.settings import FAIL, Settings
from ecd_client.vllm.base.sharing import Sharing
from ecd_client.vllm.base.stats import EcdStats
from ecd_client.vllm.scheduler.encodes import NOTICED_S, Encodes
from ecd_client.vllm.scheduler.producer import Producer
from ecd_client.vllm.scheduler.request_items import RequestItems
from ecd_client.vllm.scheduler.wanted import WantedItem
from ecd_proto.contract import shown

logger = init_logger(f"vllm.{__name__}")

ENOUGH_LEFT = 1 / 2
"""Share of a lease's TTL that lets a request be scheduled: enough to load it a step later."""
ASK_AGAIN_S = 0.05


class Lookup:
    """Finds items without waiting, and notes the results in each `WantedItem`.

    It names items that memory does not show to a producer, which stores them again.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        sharing: Sharing,
        outputs: Outputs,
        stats: EcdStats,
        producer: Producer | None,
        encodes: Encodes,
    ) -> None:
        self._client, self._sharing, self._outputs = client, sharing, outputs
        self._wait_s = settings.load_timeout_s
        self._fails = settings.on_unavailable == FAIL
        self._stats, self._producer, self._encodes = stats, producer, encodes
        self._to_ask: dict[str, WantedItem] = {}
        self._is_away = False
        self._is_late = False  # away, with a session: memory alone does not show that it is back

    def forget(self) -> None:
        """Drop the questions of the next message: they are about items of other weights."""
        self._to_ask.clear()

    def is_asking(self, wanted: WantedItem) -> bool:
        """Whether the daemon was asked for the item, or will be with the next message."""
        return wanted.answer is not None or wanted.identifier in self._to_ask

    def has_peers(self) -> bool:
        """Whether the daemon may know of entries on other nodes."""
        with contextlib.suppress(DaemonUnavailable):
            return bool(self._client.node)
        return False

    def look(self, wanted: WantedItem) -> None:
        """Take an answer that has come, or read memory.

        What memory lacks is `absent`, and `take_on` goes on with it, if the engine can encode it;
        else the daemon is asked.
        """
        if wanted.answer is not None:
            self._take_answer(wanted)
        if wanted.missing and self._encodes.give_way(wanted):
            wanted.start_over(wanted.cause)  # others may have encoded it while this engine did not
        if wanted.item is not None and not wanted.has_left(ENOUGH_LEFT):
            wanted.give_up("its lease ran out: the daemon is away")
        if (
            wanted.item is not None
            or self.is_asking(wanted)
            or (wanted.missing and not wanted.bare)
            or (wanted.bare and not self._sharing.includes(wanted.identifier))
            or (wanted.ask_again_s and clock.now_s() < wanted.ask_again_s)
        ):
            return
        may_come = self._read(wanted)
        if may_come is None:
            return
        if self._producer is not None:
            self._producer.save(wanted.identifier)
        if self._fails or wanted.bare or wanted.hints:
            self._ask_later(wanted, may_come or (self._fails and not wanted.bare))
        else:
            wanted.absent, wanted.may_come = True, may_come

    def count_miss(self) -> None:
        """Count the miss of an item whose request fails for it."""
        self._client.count_miss()

    def take_on(self, absent: Sequence[WantedItem], request: RequestItems) -> None:
        """Continue with absent items of one request, unless another engine encodes one of them."""
        if not self._encodes.take_on(absent, request):
            return
        makes_s = self._encodes.makes_s(absent, request)
        has_time = makes_s is not None or clock.now_s() < request.deadline_s
        for wanted in absent:
            may_come = self._read(wanted)  # again: another engine may have stored it meanwhile
            if may_come is not None:
                self._ask_later(wanted, may_come and has_time, makes_s)

    def take_far(self, wanted: WantedItem) -> None:
        """Ask for an absent item that the next step does not encode; a later one takes it on."""
        if wanted.may_come or not ASKS_OF_RUNNING:
            self._ask_later(wanted, wanted.may_come)

    def _read(self, wanted: WantedItem) -> bool | None:
        """Read memory. Whether a call could find what it lacks; None: this is decided."""
        try:
            item, may_come = self._client.get_now(wanted.identifier, is_use=False)
        except EcdError as error:
            self._note_failure(wanted, error)
            return None
        if self._is_away and not self._is_late:
            self._note_back()
        if item is None:
            return may_come
        self._encodes.stored(wanted)
        wanted.take(item, self._outputs)
        return None

    def _ask_later(self, wanted: WantedItem, may_come: bool, makes_s: float | None = None) -> None:
        wanted.absent = False
        if may_come:
            wanted.makes_s, wanted.asked_s = makes_s, clock.now_s()
            self._to_ask[wanted.identifier] = wanted
            self._encodes.ask(wanted)
        else:
            self._note_miss(wanted, "nobody has stored it")

    def send(self) -> None:
        """Ask for all that this step did not find in memory: one message for each kind of wait.

        Items that an encoder could make are waited for only while they are being written.
        """
        asked, self._to_ask = self._to_ask, {}
        for is_bare in (False, True):
            unique = [w for w in asked.values() if w.expected and bool(w.bare) == is_bare]
            if unique:
                self._ask(unique, only_if_written=is_bare or not self._fails)

    def _ask(self, unique: list[WantedItem], *, only_if_written: bool) -> None:
        asked_s = clock.now_s()
        try:
            answers = self._client.get_async(
                [wanted.identifier for wanted in unique],
                self._wait_s,
                only_if_written=only_if_written,
                nodes=[wanted.hints for wanted in unique],
                makes=[wanted.makes_s for wanted in unique],
                is_use=False,
            )
        except EcdError as error:
            for wanted in unique:
                self._note_failure(wanted, error)
            return
        for wanted, answer in zip(unique, answers, strict=True):
            wanted.answer = answer
            wanted.asked_s = asked_s
            wanted.cause = "nobody has stored it"
            wanted.is_told |= wanted.makes_s is not None

    def _take_answer(self, wanted: WantedItem) -> None:
        answer = wanted.answer
        assert answer is not None
        if not answer.done():
            return
        wanted.answer = None
        error = answer.exception()
        if error is not None:
            self._note_failure(wanted, error, is_late=True)
            return
        self._note_back()
        item = answer.result()
        if item is None:
            if not self.goes_on(wanted):
                self._note_miss(wanted, wanted.cause)
            return
        self._encodes.found(wanted)
        wanted.take(item, self._outputs)

    # -- outcomes ------------------------------------------------------------------------------

    def goes_on(self, wanted: WantedItem) -> bool:
        """Whether the item is waited for on, as another node makes it, or has just made it.

        It is looked up again then, and to be taken on by this engine if the daemon waits no more.
        An item that a client of this node has not put to the end is not waited for.
        """
        if not wanted.makes_s:
            return False
        if self._encodes.is_made_elsewhere(wanted):
            self._encodes.wait_on(wanted)
            return True
        with contextlib.suppress(EcdError):
            # The daemon stores it before it says that no other node makes it.
            item, _ = self._client.get_now(wanted.identifier, is_use=False)
            if item is not None:
                self._encodes.wait_on(wanted)
                self._encodes.stored(wanted)
                wanted.take(item, self._outputs)
                return True
        return False

    def is_late(self, wanted: WantedItem, deadline_s: float) -> bool:
        """Whether a request's time for the item is over; a recent question gets a moment."""
        if wanted.makes_s is not None and self.is_asking(wanted):
            deadline_s = max(deadline_s, wanted.asked_s + NOTICED_S)
        return clock.now_s() >= deadline_s

    def note_late(self, wanted: WantedItem) -> None:
        """Give the item up, and count a daemon that did not answer in time."""
        if self._encodes.is_made_elsewhere(wanted):
            wanted.give_up("another node encodes it still")
            return
        self._stats.count("failures")
        self._note_away("it did not answer in time", is_late=True)
        wanted.give_up("ecd did not answer in time")

    def note_mismatch(self, wanted: WantedItem) -> None:
        """Log once why an existing entry cannot be used for all of the item's users."""
        assert wanted.item is not None
        wanted.cause = (
            f"the entry is {wanted.item.dtype} of shape {wanted.item.shape}, but "
            f"{set(wanted.counts)} embeddings of {self._outputs} are expected, or other "
            "metadata came with it: the model may encode a picture otherwise where others stand "
            "beside it, or a client has given one uuid to different media or stored something else"
        )
        if not wanted.mismatched:
            wanted.mismatched = True
            self._stats.count("mismatches")
            logger.warning("ecd: %s is a miss: %s", shown(wanted.identifier), wanted.cause)

    def _note_miss(self, wanted: WantedItem, cause: str) -> None:
        wanted.denied = True
        self._note_absent(wanted, cause)

    def _note_failure(
        self, wanted: WantedItem, error: BaseException, *, is_late: bool = False
    ) -> None:
        self._stats.count("failures")
        self._note_away(error, is_late=is_late)
        wanted.denied = False
        self._note_absent(wanted, str(error))

    def _note_absent(self, wanted: WantedItem, cause: str) -> None:
        wanted.cause = cause
        wanted.absent = False
        wanted.missing = not self._fails
        wanted.ask_again_s = clock.now_s() + ASK_AGAIN_S

    def _note_away(self, cause: object, *, is_late: bool) -> None:
        self._is_late = is_late
        if not self._is_away:
            self._is_away = True
            logger.warning("ecd: every item is a miss for now: %s", cause)

    def _note_back(self) -> None:
        self._is_late = False
        if self._is_away:
            self._is_away = False
            logger.info("ecd: the daemon answers again: items are found as before")
