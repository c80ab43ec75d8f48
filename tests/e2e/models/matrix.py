"""One architecture of the matrix, in a vLLM environment: engines answer its rows.

    python matrix.py ARCHITECTURE DIRECTORY ADDRESS chats|none ROW...

With "chats" rows that have videos or sounds are asked in chats, too.

The engines are forks of this process, so that what all need is imported once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.model_executor.models import registry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import InputProcessingContext

try:
    from vllm.renderers.chat_utils.item_tracker import _get_embeds_data
except ImportError:  # before 0.33
    from vllm.renderers.chat_utils import _get_embeds_data

from e2e.engine_process import daemons, forget, runner
from e2e.models import families, weights  # noqa: F401, as they fill the table and models
from e2e.models.checkpoint import Checkpoint
from e2e.models.items import by_kind, medium
from e2e.models.server import Server
from e2e.models.table import ARCHITECTURES, CHAT, CHAT_AGAIN, MEDIA, Architecture
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.middleware.outline import Outline
from ecd_client.vllm.middleware.outlines import Outlines
from support.waiting import HANG_S, eventually

TOKENS = 3


registry._run_in_subprocess = lambda inspect: inspect()  # which imports vLLM anew: ten seconds


# -- one engine ------------------------------------------------------------------------------


class Kept(Outlines):
    """Keeps the outlines of all items, packed, and takes each where an item has a name alone."""

    def __init__(self, metadata: PlaceholderMetadata) -> None:
        super().__init__(metadata.of_outline, self._keep)
        self._metadata = metadata
        self._packed: dict[str, bytes] = {}
        self.latest: dict[str, list[str]] = {}
        """The names of the items that were processed since it was cleared, by kind."""

    @property
    def are_needed(self) -> bool:
        return True

    def _keep(self, entry: tuple[str, str], outline: Outline) -> None:
        self._packed[entry[1]] = outline.pack()

    def note(self, name: str, item: Any, updates: Any) -> None:
        kind = updates[0].modality
        self.latest.setdefault(kind, []).append(name)
        if self._metadata.needs_outline(kind) and item is not None:
            with self.wanting({name: ("", name)}):
                super().note(name, item, updates)

    def given(self, name: str) -> Outline | None:
        packed = self._packed.get(name)
        return None if packed is None else Outline.unpack(packed, 1 << 20)


class Engine:
    def __init__(self, tried: Architecture, directory: Path, role: str, address: str) -> None:
        self._tried, self.forwards, self.processed = tried, 0, 0
        transfer = None
        if role != "plain":
            transfer = ECTransferConfig(
                ec_connector="EcdConnector",
                ec_connector_module_path="ecd_client.vllm",
                ec_role=tried.encoder if role == "encoder" else role,
                ec_connector_extra_config={
                    "ecd_address": address,
                    "ecd_load_timeout_s": HANG_S,
                    **({"ecd_namespace": role} if role == "ec_both" else {}),
                },
            )
        how: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 64 << 20,
            "skip_mm_profiling": True,
            "limit_mm_per_prompt": tried.limits(),
            "runner": "pooling" if tried.pools else "generate",
            **tried.engine,
        }
        self._llm = LLM(model=str(directory), ec_transfer_config=transfer, **how)
        self._processor = MULTIMODAL_REGISTRY.create_processor(self._llm.model_config)
        self._count()
        if has_ec_transfer():
            eventually(lambda: all(daemons(self._llm)), "both roles have a session")

    def _count(self) -> None:
        model = runner(self._llm).get_model()
        encode = model.embed_multimodal

        def counted(**items: Any) -> Any:
            self.forwards += 1
            return encode(**items)

        model.embed_multimodal = counted
        call = InputProcessingContext.call_hf_processor

        def called(context: Any, processor: Any, data: Any, *arguments: Any, **named: Any) -> Any:
            self.processed += any(key in data for key in ("images", "videos", "audio"))
            return call(context, processor, data, *arguments, **named)

        InputProcessingContext.call_hf_processor = called

    @cached_property
    def outlines(self) -> Kept:
        """The outlines of items, which this process's processors give from now on."""
        outlines = Kept(PlaceholderMetadata(self._llm.model_config))
        outlines.install()
        return outlines

    def by_outline(self, items: list[str]) -> dict | None:
        """The answer to the items that were asked for last, by outlines. None: some have none."""
        named = self.outlines.latest
        known = [*filter(self.outlines.given, chain(*named.values()))]
        if not items or len(known) < len(items):
            return None
        made = self.prompt(items, None)
        made.pop("mm_processor_kwargs", None)  # which are in names
        made["multi_modal_uuids"] = named
        made["multi_modal_data"] = {kind: [None] * len(each) for kind, each in named.items()}
        return self.ask(items, made=made) | {"processed": self.processed}

    def prompt(self, items: list[str], names: dict[str, dict] | None) -> dict:
        """A prompt with these items; with names by these, and their metadata, in place of media."""
        marks = [self._processor.dummy_inputs.get_dummy_text({MEDIA[i][0]: 1}) for i in items]
        made: dict[str, Any] = {"prompt": f"so {' '.join(marks)} what is it?"}
        if items:
            made["multi_modal_data"] = by_kind(items, [medium(item) for item in items])
        if self._tried.engine.get("tokenizer_mode") == "mistral":  # marks are tokens, not text
            kinds = Counter(MEDIA[item][0] for item in items)
            media = made.get("multi_modal_data", {})
            said = self._processor.get_dummy_inputs(2048, kinds, {}, media)
            return {"prompt_token_ids": said.prompt, "multi_modal_data": media}
        rates = [MEDIA[item][2] for item in items if MEDIA[item][0] == "video"]
        if rates and names is None and self._tried.rate_by_option:
            made["mm_processor_kwargs"] = {"fps": rates[0]}
        if names is not None:
            uuids = [at for at, _ in sorted(indices(names), key=lambda each: each[1])]
            said = by_kind(items, [names[uuid]["metadata"] for uuid in uuids])
            made["multi_modal_uuids"] = by_kind(items, uuids)
            made["multi_modal_data"] = {
                kind: _get_embeds_data(kind, each, self._processor) for kind, each in said.items()
            }
        return made

    def ask(
        self, items: list[str], names: dict[str, dict] | None = None, made: dict | None = None
    ) -> dict:
        """The answer to these items, forgotten before, and the forwards that it took."""
        return self._counted(
            lambda: self._answer(self.prompt(items, names) if made is None else made)
        )

    def chats(self, rows: dict[str, list[str]]) -> dict[str, dict]:
        """The answers to rows that are asked in chats; twice where there is a middleware."""
        marks = {
            kind: self._processor.dummy_inputs.get_dummy_text({kind: 1})
            for kind in self._tried.media
        }
        server = Server(self._llm, marks, has_middleware=has_ec_transfer())
        times = (CHAT, CHAT_AGAIN) if has_ec_transfer() else (CHAT,)
        found = {}
        for name, items in rows.items():
            for time in times:
                if time == CHAT_AGAIN:  # or vLLM itself preprocesses nothing again
                    self._llm.llm_engine.reset_mm_cache()
                answer = self._counted(lambda items=items: server.ask(items, TOKENS))
                found[f"{name}, {time}"] = answer | {"processed": self.processed}
        self._llm.llm_engine.reset_mm_cache()
        server.close()
        return found

    def _counted(self, answer: Callable[[], dict]) -> dict:
        forget(self._llm)
        self.forwards = self.processed = 0
        try:
            found = answer() | {"forwards": self.forwards}
            self._await_saves()
            return found
        except Exception as error:
            if self._llm.llm_engine.has_unfinished_requests():
                raise  # the engine has ended
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"[:300], "forwards": self.forwards}

    def _await_saves(self) -> None:
        """Wait until what the encoder made is stored, for whoever asks next."""
        if has_ec_transfer():
            saves = get_ec_transfer()._worker._saves
            eventually(lambda: all(future.done() for _, future, _ in saves), "it is stored")

    def _answer(self, prompt: dict) -> dict:
        if task := self._tried.pools:
            [output] = self._llm.encode([prompt], pooling_task=task, use_tqdm=False)
            vectors = output.outputs.data.flatten().tolist()
            return {"values": vectors, "tokens": [], "names": names_in(output)}
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3)
        [output] = self._llm.generate([prompt], sampling, use_tqdm=False)
        [made] = output.outputs
        best = [sorted(each.logprob for each in place.values()) for place in made.logprobs or ()]
        return {
            "reason": made.finish_reason,
            "tokens": list(made.token_ids),
            "values": [value for place in best for value in place],
            "names": names_in(output),
        }

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def names_in(output: Any) -> dict[str, dict] | None:
    return getattr(output, "ec_transfer_params", None)


def indices(names: dict[str, dict]) -> list[tuple[str, int]]:
    return [(name, at) for name, about in names.items() for at in about["item_indices"]]


# -- all engines -----------------------------------------------------------------------------


class Fork:
    """Work that a fork of this process does; its result is JSON."""

    def __init__(self, work: Callable[[], Any]) -> None:
        read, write = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                result = work()
            except BaseException:
                traceback.print_exc()
                result = {"ended": traceback.format_exc()[-3000:]}
            with os.fdopen(write, "w") as out:
                json.dump(result, out)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.close(write)
        self._read = os.fdopen(read)

    def result(self) -> Any:
        """What the work returned, or how it `ended`."""
        with self._read:
            written = self._read.read()
        _, status = os.waitpid(self._child, 0)
        return json.loads(written) if written else {"ended": f"its process: status {status}"}


def answers(
    tried: Architecture,
    directory: Path,
    address: str,
    role: str,
    rows: dict[str, list[str]],
    named: dict[str, dict] | None = None,
    chats: dict[str, list[str]] | None = None,
) -> dict[str, dict]:
    """The answers of an engine of this role; a consumer's also by what the encoder `named`.

    Those of `chats` are asked first: the middleware is not to meet this module's own outlines.
    """
    engine = Engine(tried, directory, role, address)
    found = engine.chats(chats) if chats else {}
    for name, items in rows.items():
        if role == "ec_both":
            engine.outlines.latest.clear()
        found[name] = engine.ask(items)
        if role == "ec_both":
            if outlined := engine.by_outline(items):
                found[f"{name}, by outline"] = outlined
            found[f"{name}, repeated"] = engine.ask(items)
        if named is not None and (names := names_of(items, named.get(name, {}))):
            found[f"{name}, by metadata"] = engine.ask(items, names)
            kinds = "unknown: " + " ".join(sorted({MEDIA[item][0] for item in items}))
            if kinds not in found:
                unknown = {f"unknown-{at}": about for at, about in enumerate(names.values())}
                found[kinds] = engine.ask(items, unknown)
    found["the next"] = engine.ask([])
    engine.close()
    return found


def names_of(items: list[str], answer: dict) -> dict[str, dict] | None:
    """What the encoder's answer says of the items, if it has metadata of all."""
    names = answer.get("names") or {}
    all_named = len(indices(names)) == len(items) > 0
    return names if all_named and all(each.get("metadata") for each in names.values()) else None


def main(name: str, directory: str, address: str, how: str, *chosen: str) -> dict:
    tried = ARCHITECTURES[name]
    rows = tried.rows(chosen)
    chats = tried.chats(chosen) if how == "chats" else {}
    Path(directory).mkdir()
    to = Checkpoint(Path(directory), tried.kind)
    here = tried, to.directory, address
    if tried.fails:

        def fail() -> dict:
            tried.make(to)
            return answers(*here, "plain", rows)

        return {"plain": Fork(fail).result()}
    tried.make(to)
    with contextlib.suppress(Exception):  # or each engine imports it anew, and fails
        registry.ModelRegistry.models[tried.kind].load_model_cls()
    plain = Fork(lambda: answers(*here, "plain", rows, chats=chats))
    producer = Fork(lambda: answers(*here, "encoder", rows))
    both = Fork(lambda: answers(*here, "ec_both", rows, chats=chats))
    named = producer.result()
    consumer = Fork(lambda: answers(*here, "ec_consumer", rows, named))
    return {
        "plain": plain.result(),
        "encoder": named,
        "ec_consumer": consumer.result(),
        "ec_both": both.result(),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)  # what is imported needs no end: seconds
