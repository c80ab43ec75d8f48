"""Answers in place of an engine that only encodes, for requests whose media ecd has."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.item import Item
from ecd_client.vllm.base.compat import collect_ec_item_metadata
from ecd_client.vllm.base.hints import add_hints, consumers_in
from ecd_client.vllm.base.metadata import NoFields
from ecd_client.vllm.middleware.media import FoundMedium, Look

STAYS_S = 10.0
"""How long the entries of an answer are held, for its consumer to come."""
MAX_STAYING = 256
"""Entries held so: half of the pins that a session has."""


class _Staying(NamedTuple):
    item: Item
    until_s: float
    caller: str


class Answers:
    """Makes the answers, and holds the entries that they name."""

    def __init__(self, client: Client, model: str, *, announces_node: bool) -> None:
        """`model` is the served one's name."""
        self._client, self._model = client, model
        self._announces_node = announces_node
        self._staying: OrderedDict[tuple[str, str], _Staying] = OrderedDict()

    @staticmethod
    def knows(look: Look) -> bool:
        """Whether the answer is known: vLLM may place media of several kinds in another order."""
        return look.is_whole and len({medium.kind for medium in look.media}) == 1

    def answer(self, look: Look, caller: str) -> dict[str, Any]:
        """The answer to a request whose media are stored; they stay stored for STAYS_S."""
        features = [
            SimpleNamespace(identifier=found.name, modality=found.medium.kind, data=None)
            for found in look.found
        ]
        params: dict[str, Any] = collect_ec_item_metadata(features, NoFields)
        for found in look.found:
            params[found.name]["metadata"] = dict(found.fields)
        namespace = look.found[0].item.namespace
        stored = {found.name: found.item.mm_hash for found in look.found}
        with contextlib.suppress(EcdError):
            if self._announces_node:
                hints = {
                    name: self._client.hint(key, namespace=namespace)
                    for name, key in stored.items()
                }
                add_hints(params, {name: hint for name, hint in hints.items() if hint})
            if consumers := consumers_in(look.request.get("ec_transfer_params")):
                self._client.offer(list(stored.values()), consumers, namespace=namespace)
        self._have_stay(look.found, caller)
        return {
            "id": f"chatcmpl-{clock.secret(16)}",
            "object": "chat.completion",
            "created": int(clock.unix_s()),
            "model": look.request.get("model") or self._model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            "ec_transfer_params": params,
        }

    def _have_stay(self, found: list[FoundMedium], caller: str) -> None:
        """Hold each entry once, until STAYS_S after the last answer that names it.

        Beyond MAX_STAYING the caller with the most entries loses its oldest.
        """
        until_s = clock.now_s() + STAYS_S
        for each in found:
            key = each.item.namespace, each.item.mm_hash
            before = self._staying.pop(key, None)
            if before is not None:
                before.item.close()
            self._staying[key] = _Staying(each.item, until_s, caller)
        while len(self._staying) > MAX_STAYING:
            held = Counter(staying.caller for staying in self._staying.values())
            [(most, _)] = held.most_common(1)
            oldest = next(key for key, each in self._staying.items() if each.caller == most)
            self._staying.pop(oldest).item.close()
        asyncio.get_running_loop().call_later(STAYS_S, self._let_go, until_s)

    def _let_go(self, until_s: float) -> None:
        """Release entries held until `until_s` at most; no clock: uvloop's timers are early."""
        while self._staying and next(iter(self._staying.values())).until_s <= until_s:
            self._staying.popitem(last=False)[1].item.close()
