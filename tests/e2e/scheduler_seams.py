"""Drives the scheduler's role through what no engine does at will. In a vLLM environment.

    python scheduler_seams.py ADDRESS MODEL

The connector is real and so is the daemon; requests are no more than what the connector reads of
them. Prints what came of each case, as JSON.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Collection
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.media import MediaWithBytes
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from ecd_client import Client
from ecd_client.shared.puts import Claim, NewEntry
from ecd_client.vllm.base import description
from ecd_client.vllm.base.compat import CAN_LEAVE_OUT_MEDIA
from ecd_client.vllm.base.names import stored_name
from ecd_client.vllm.base.outputs import room_for_loads
from ecd_client.vllm.base.reports import RankReports, Reports
from ecd_client.vllm.middleware.fetching import MediaFetcher
from ecd_client.vllm.middleware.media import Look, Medium
from ecd_client.vllm.middleware.reuse import ReuseMiddleware
from ecd_client.vllm.scheduler import encodes, loads
from ecd_proto.placeholders import Placeholder
from ecd_proto.shm.files import elsewhere_offset, lock_byte, unlock_byte
from support.waiting import HANG_S, value_of

WAIT_S = 1.0
address, model = sys.argv[1:]
transfer_config = ECTransferConfig(
    ec_connector="EcdConnector",
    ec_connector_module_path="ecd_client.vllm.connector",
    ec_role="ec_both",
    ec_connector_extra_config={"ecd_address": address, "ecd_load_timeout_s": WAIT_S},
)
config = EngineArgs(model=model, ec_transfer_config=transfer_config).create_engine_config()
at_start = BufferingHandler(100)
description.logger.addHandler(at_start)
on_gpu = {"is_cuda": lambda: True, "get_device_total_memory": lambda: 80 << 30}
with patch.multiple(current_platform, **on_gpu):
    connector = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
role = connector._scheduler
role._client.wait_connected(HANG_S)
STEP = SimpleNamespace(total_num_scheduled_tokens=8)


def feature(
    name: str,
    length: int,
    offset: int = 0,
    bare: bool = False,
    modality: str = "image",
    said: dict[str, torch.Tensor] | None = None,
    by_cpu: Collection[str] = ("image_grid_thw", "video_grid_thw"),
):
    data = MultiModalKwargsItem.dummy()
    if bare:
        said = {f"{modality}_grid_thw": torch.tensor([1, 2, 2 * length])}
    if said is not None:
        elements = {
            field: MultiModalFieldElem(value, MultiModalBatchedField(keep_on_cpu=field in by_cpu))
            for field, value in said.items()
        }
        data = MultiModalKwargsItem(elements)
    return SimpleNamespace(
        identifier=name,
        mm_position=SimpleNamespace(offset=offset, length=length, get_num_embeds=lambda: length),
        modality=modality,
        data=data,
    )


def request(
    name: str, *features: SimpleNamespace, params: dict | None = None, salt: str | None = None
) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        mm_features=list(features),
        num_preemptions=0,
        cache_salt=salt,
        ec_transfer_params=params,
        resumable=False,
        structured_output_request=None,
        status=None,
        block_hashes=[],
        update_block_hashes=lambda: None,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
        num_computed_tokens=0,
    )


def settled(asked: SimpleNamespace, computed: int = 0, *others: SimpleNamespace) -> str:
    """The connector's last word on the request, when there is one: it goes on, or fails.

    Every step asks for all requests that wait.
    """

    def word() -> str:
        if connector.ensure_cache_available(asked, computed):
            return "goes on"
        if asked.status is not None or asked.request_id in role._readiness.failed:
            return "fails"
        for other in others:
            connector.ensure_cache_available(other, 0)
        connector.build_connector_meta(STEP)
        return ""

    return value_of(word)


def placed(length: int, modality: str = "image") -> bytes:
    """The metadata of the entry of such a bare item."""
    placeholder = Placeholder.of(modality, {f"{modality}_grid_thw": [1, 2, 2 * length]})
    assert placeholder is not None
    return placeholder.packed


def put(name: str, length: int, metadata: bytes = b"") -> None:
    with Client(address, namespace=role.namespace) as client:
        rows = torch.zeros(length, 128, dtype=config.model_config.dtype)
        client.put(name, rows, metadata=metadata)


done: dict[str, object] = {}

put("given", 8, placed(8))
half = request("half", feature("given", 8, bare=True))
assert settled(half) == "goes on"
assert connector.has_cache_item("given")
connector.update_state_after_alloc(half, 0)
connector.build_connector_meta(STEP)
connector.weights_changed("a reset")
done["given to a load before weights changed"] = settled(half, 4)
connector.request_finished(half)
worker = RankReports(role.reports.place, 0)
worker.done(1)
(_, ours), (theirs, _) = role.reports.place, Reports(1).place
try:
    RankReports((theirs, ours), 0)
    done["reports go to another engine"] = True
except FileNotFoundError:
    done["reports go to another engine"] = False

moves = role.moves
worker.forgot(moves - 1)
worker.end_step(1)
connector.build_connector_meta(STEP)
done["a report of before the last move is ignored"] = role.moves == moves
worker.forgot(moves)
worker.end_step(2)
connector.build_connector_meta(STEP)
done["a report of this move is not"] = role.moves == moves + 1


def load(name: str) -> bool:
    """Whether a load of a new item begins; its request ends meanwhile."""
    put(name, 4)
    asked = request(name, feature(name, 4))
    settled(asked)
    begins = connector.has_cache_item(name)
    connector.update_state_after_alloc(asked, 0)
    connector.request_finished(asked)
    return begins


said = logging.Handler()
logged: list[str] = []
said.emit = lambda record: logged.append(record.getMessage())
loads.logger.addHandler(said)
begun = [load("a first")]
loads.UNSURE_S, unsure_s = 0.0, loads.UNSURE_S
begun.append(load("while no worker reports"))
done["and that is said"] = "no worker has reported a load" in value_of(lambda: logged)[0]
worker.done(2)
worker.end_step(3)
connector.build_connector_meta(STEP)
begun.append(load("after that"))
loads.UNSURE_S = unsure_s
done["loads while none is reported"] = begun
loads.MAX_LOAD_S, max_load_s = 0.0, loads.MAX_LOAD_S
done["a lost load ends without a step"] = value_of(lambda: not len(role._loads))
loads.MAX_LOAD_S = max_load_s
done["and lets go of its item"] = value_of(lambda: not len(role._items))

encodes.MAKING_S, making_s = 0.0, encodes.MAKING_S
new = request("new", feature("new", 4))
assert settled(new) == "goes on"
assert not connector.has_cache_item("new")
connector.update_state_after_alloc(new, 0)
step = connector.build_connector_meta(STEP).step
with Client(address, namespace=role.namespace) as other:
    role._client.lock("ends in time", 0.0)
    value_of(lambda: not other.is_locked("ends in time"))
    done["locked while its step runs"] = other.is_locked("new")
    worker.end_step(step)
    connector.build_connector_meta(STEP)
    done["and not for long after that"] = value_of(lambda: not other.is_locked("new"))
    connector.request_finished(new)
    encodes.MAKING_S = making_s

    other.lock("elsewhere", 10 * HANG_S)
    late = request("late", feature("elsewhere", 4))
    connector.ensure_cache_available(late, 0)
    role._requests["late"].deadline_s = 0.0
    done["goes on while another encodes"] = connector.ensure_cache_available(late, 0)
    put("elsewhere", 4)
    done["once that is stored"] = settled(late), connector.has_cache_item("elsewhere")
    connector.request_finished(late)

    full = request("full", feature("not begun", 4))  # as its KV finds no room
    assert settled(full) == "goes on"

    def goes_on() -> bool:
        ready = connector.ensure_cache_available(full, 0)
        connector.build_connector_meta(STEP)
        return ready

    done["locked by one that does not begin"] = other.is_locked("not begun")
    took = value_of(lambda: goes_on() and other.lock("not begun", 10 * HANG_S))
    done["another takes over from it"] = took, value_of(lambda: not goes_on())
    put("not begun", 4)
    done["and stores for it"] = settled(full), connector.has_cache_item("not begun")
    connector.request_finished(full)

    role._client._connection.session().may_bring = True  # as that of a daemon with peers
    just = request("just", feature("just stored", 4))
    connector.ensure_cache_available(just, 0)
    connector.build_connector_meta(STEP)
    value_of(lambda: role._items.get("just stored").answer.done())
    put("just stored", 4)  # by the daemon, which had waited for another node until then
    done["stored after the answer"] = settled(just), connector.has_cache_item("just stored")
    connector.request_finished(just)

    other.put("another", torch.zeros(4, 128, dtype=config.model_config.dtype))
    vain = request("vain", feature("put in vain", 4))
    connector.ensure_cache_available(vain, 0)
    connector.build_connector_meta(STEP)
    value_of(lambda: role._items.get("put in vain").answer.done())
    puts = other._connection.session().puts
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    nbytes = 4 * 128 * config.model_config.dtype.itemsize
    entry = NewEntry(role.namespace, "put in vain", dtype, (4, 128), nbytes, b"", 0.0)

    def claimed() -> Claim | None:
        claim = puts.claim(entry)
        return claim if isinstance(claim, Claim) else None

    unfinished = value_of(claimed)
    done["shown, and not stored"] = other.is_shown("put in vain")
    done["goes on without it"] = connector.ensure_cache_available(vain, 0)
    puts.leave(unfinished)
    connector.request_finished(vain)

    taken_back: list[str] = []
    stop_making = role._client.stop_making

    def stop(names: list[str]) -> None:
        taken_back.extend(names)
        stop_making(names)

    role._client.stop_making = stop
    left = request("left", feature("left alone", 4))
    byte = elsewhere_offset(role.namespace, "left alone")
    held = other._connection.session().key_locks._fd, byte  # by a daemon that waits for a node
    connector.ensure_cache_available(left, 0)
    connector.build_connector_meta(STEP)
    lock_byte(*held)
    value_of(lambda: role._items.get("left alone").answer.done())
    done["waits for another node"] = not connector.ensure_cache_available(left, 0)
    connector.request_finished(left)
    done["what it said is taken back with its request"] = taken_back
    unlock_byte(*held)
    role._client.stop_making = stop_making

    byte = elsewhere_offset(role.namespace, "far away")
    held = other._connection.session().key_locks._fd, byte  # by a daemon that waits for a node
    for when in ("after", "before"):
        asked = request(when, feature("far away", 4))
        if when == "before":
            lock_byte(*held)
        connector.ensure_cache_available(asked, 0)
        connector.build_connector_meta(STEP)
        if when == "after":
            lock_byte(*held)
        wanted, state = role._items.get("far away"), role._requests[when]
        value_of(lambda wanted=wanted: wanted.answer is None or wanted.answer.done())
        state.deadline_s = 0.0
        done[f"another node encodes it, known {when} the question"] = (
            connector.ensure_cache_available(asked, 0),
            other.is_locked("far away"),
        )
        if when == "after":
            unlock_byte(*held)
            done["once that has ended"] = settled(asked), other.is_locked("far away")
        else:
            state.awaits_until_s = 0.1
            done["once it has waited long enough"] = settled(asked)
            unlock_byte(*held)
        connector.request_finished(asked)
    role._client._connection.session().may_bring = False
    done["items that came in vain"] = role.stats.data.get("awaited_in_vain")
    role._encodes._rests_until_s = 0.0

put("said", 4)
for name, more in {"whole": {}, "of a stream": {"resumable": True}}.items():
    asked = request(name, feature("said", 4, modality="audio"))
    vars(asked).update(more)
    settled(asked)
    done[f"sound that is {name} is had"] = connector.has_cache_item(asked.mm_features[0].identifier)
    connector.request_finished(asked)

put("one name", 6, placed(6, "video"))
contested = [
    request("with media", feature("one name", 4)),
    request("without", feature("one name", 6, bare=True, modality="video")),
]
connector.ensure_cache_available(contested[1], 0)
done["media of another size than the entry"] = settled(contested[0], 0, contested[1])
both = request("both", feature("one name", 4), feature("one name", 6, 10, True, "video"))
for asked in contested:
    connector.request_finished(asked)
done["one request with both"] = settled(both)
connector.request_finished(both)

named = request(
    "named",
    *(feature(name, 4, bare=True) for name in ("\ud800", "x" * 5000)),
    params={"ecd_consumers": ["10.0.0.1:9465"]},
)
done["names that are no text"] = settled(named)
connector.request_finished(named)
for name in ("ec_items", "ecd: gone when this cache is emptied"):
    asked = request(name, feature(name, 4))
    settled(asked)
    done[f"finishes with the name {name}"] = isinstance(connector.request_finished(asked), tuple)
connector.build_connector_meta(STEP)

for name in ("of a tenant", stored_name("of a tenant", "one")):
    put(name, 8, placed(8))
for salt in (None, "one", "other"):
    asked = request(f"salt {salt}", feature("of a tenant", 8, bare=True), salt=salt)
    done[f"a name alone, of {salt}"] = settled(asked)
    hint = {"ecd_node": "10.0.0.1:9465"}
    again = request(f"hinted {salt}", feature("a", 8), params={"a": hint}, salt=salt)
    settled(again)
    hinted = [hint.node for hint in role._items.get(stored_name("a", salt)).hints]
    done[f"the hint of a request of {salt}"] = hinted
    for each in (asked, again):
        answer = connector.request_finished(each)[1]
        done.setdefault("names in answers", []).extend(answer)

core = object.__new__(EngineCore)
core.scheduler, core.mm_receiver_cache = SimpleNamespace(ec_connector=connector), None
init_none_hash(sha256)
core.request_block_hasher = get_request_block_hasher(16, sha256)


def blocks(salt: str | None, prompt: range, answer: range) -> list[bytes]:
    """The names of a request's blocks, the second of which has the picture's end."""
    place = PlaceholderRange(offset=12, length=8)
    item = MultiModalFeatureSpec(None, "image", "of a conversation", place)
    engine_request = EngineCoreRequest(
        request_id=f"{salt} {prompt}",
        prompt_token_ids=list(prompt),
        mm_features=[item],
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )
    made, _ = core.preprocess_add_request(engine_request)
    connector.name_items(made)  # which is too late for the blocks of the prompt
    made.append_output_token_ids(list(answer))
    return made.block_hashes


for salt in (None, "one"):
    turns = [blocks(salt, range(50), range(0)), blocks(salt, range(21), range(21, 50))]
    done[f"blocks of an answer, of {salt}"] = [len(turns[0]), turns[0] == turns[1]]
otherwise = request("made otherwise", feature("of another way", 8), salt="one")
otherwise.block_hashes = [b"with vLLM's name"]
settled(otherwise)
done["blocks of a request that vLLM made in another way"] = otherwise.block_hashes
connector.request_finished(otherwise)

if CAN_LEAVE_OUT_MEDIA:
    grid, other = [1, 4, 8], [1, 8, 4]
    placeholder = Placeholder.of("image", {"image_grid_thw": grid})
    put("described", 8, placeholder.packed)
    dtype = config.model_config.dtype
    wrong = {
        "a float": torch.tensor([1.0, 4.0, 8.0]),
        "a bool": torch.tensor([True, True, True]),
        "negative": torch.tensor([1, -4, -8]),
        "half a row": torch.tensor([1, 1, 32]),
        "four": torch.tensor([1, 1, 4, 8]),
        "many": torch.ones(1 << 20, dtype=torch.int64),
        "not finite": torch.tensor([1.0, float("nan"), 8.0]),
    }
    for name, said in {"right": torch.tensor(grid), **wrong}.items():
        asked = request(name, feature("described", 8, said={"image_grid_thw": said}))
        done[f"metadata: {name}"] = settled(asked)
        connector.request_finished(asked)
    for name, (rows, width, of, sides) in {
        "right": (8, 128, dtype, [1, 4, 8]),
        "of another width": (8, 64, dtype, [1, 4, 8]),
        "of more rows": (9, 128, dtype, [1, 4, 8]),
        "of integers": (8, 128, torch.int64, [1, 4, 8]),
        "of 8 bits": (8, 128, torch.float8_e4m3fn, [1, 4, 8]),
        "beside a float": (8, 128, dtype, [1.0, 4.0, 8.0]),
        "not a number": (8, 128, dtype, [1, 4, 8]),
        "huge": (8, 128, dtype, [1, 4, 8]),
    }.items():
        value = {"not a number": float("nan"), "huge": 3e38}.get(name, 0)
        said = {
            "image_embeds": torch.full((rows, width), value).to(of),
            "image_grid_thw": torch.tensor(sides),
        }
        asked = request(name, feature("described", 8, said=said))
        done[f"brought embeddings: {name}"] = settled(asked)
        if name == "right":
            failing = role, role._lookup, role._readiness
            for each in failing:
                each._fails = True
            again = request("brought to one that fails", feature("described", 8, said=said))
            done["brought embeddings: right, without an encoder"] = settled(again)
            connector.request_finished(again)
            for each in failing:
                each._fails = False
            done["what was brought is looked up"] = connector.has_cache_item("described")
            done["what was brought is stored"] = role._sharing.includes(
                asked.mm_features[0].identifier
            )
        connector.request_finished(asked)
    for name, rows in {"right, a video": 8, "of more rows, a video": 9}.items():
        said = {
            "video_embeds": torch.zeros(rows, 128, dtype=dtype),
            "video_grid_thw": torch.tensor([1, 4, 8]),
        }
        asked = request(name, feature("described", 8, modality="video", said=said))
        done[f"brought embeddings: {name}"] = settled(asked)
        connector.request_finished(asked)

    def computed(name: str, grid: list[int], **more: object) -> list[object]:
        """What comes of a request whose tokens others computed, and whether it may have them."""
        said = {"image_grid_thw": torch.tensor(grid), **more.pop("media", {})}
        asked = request(f"{name} {grid}", feature(name, 8, said=said))
        tokens = more.pop("tokens", 8)
        vars(asked).update(more)
        if not connector.ensure_cache_available(asked, tokens) and asked.skip_reading_prefix_cache:
            tokens = 0
        end = settled(asked, tokens)
        connector.request_finished(asked)
        return [end, not asked.skip_reading_prefix_cache]

    put("computed", 8, placeholder.packed)
    put("computed, without metadata", 8)
    put("computed in two ways", 8, placeholder.packed)
    role._computed.remember("computed, and evicted", placeholder.stored)
    for sides in (other, grid):
        said = Placeholder.of("image", {"image_grid_thw": sides})
        role._computed.remember("computed in two ways", said.stored)
    done["tokens of others, computed in two ways"] = computed("computed in two ways", grid)
    done["tokens of others, of a half"] = [
        computed("computed, and evicted", each, tokens=4) for each in (other, grid)
    ]
    for name in ("computed", "computed, and evicted", "computed, without metadata"):
        done[f"tokens of others, {name}"] = [computed(name, each) for each in (other, grid, other)]
    media = {"pixel_values": torch.zeros(32, 7)}
    done["tokens of others, with media"] = computed("computed", grid, media=media)
    for seconds in (0.5, 1.0):
        timed = {
            "video_grid_thw": torch.tensor([1, 4, 8]),
            "second_per_grid_ts": torch.tensor(seconds),
        }
        name, whole = f"of {seconds} s", {**timed, "pixel_values_videos": torch.zeros(32, 7)}
        asked = request(name, feature(name, 8, modality="video", said=whole))
        settled(asked)
        connector.update_state_after_alloc(asked, 0)
        connector.build_connector_meta(STEP)
        connector.request_finished(asked)
        del timed["second_per_grid_ts"]
        asked = request(f"a video {name}", feature(name, 8, modality="video", said=timed))
        connector.ensure_cache_available(asked, 8)
        done[f"tokens of others, a video {name}"] = not asked.skip_reading_prefix_cache
        connector.request_finished(asked)
    put("of a video", 8, Placeholder.of("video", {"video_grid_thw": [1, 4, 8]}).packed)
    sides, second = torch.tensor([1, 4, 8]), torch.tensor(1.0)
    for name, (sized, timed) in {
        "of 0.5 s": (sides, torch.tensor(0.5)),
        "of 1.0 s": (sides, second),
        "of two times": (sides, torch.ones(2)),
        "of no time": (sides, torch.ones(0)),
        "of a time in a list": (sides, [1.0]),
        "of times in lists": (sides, [[1.0], [1.0, 1.0]]),
        "of a number": (sides, 1.0),
        "of a grid in a grid": (sides[None], second),
        "of a larger grid": (2 * sides, second),
        "of a list": ([1, 4, 8], second),
    }.items():
        said = {"video_grid_thw": sized, "second_per_grid_ts": timed}
        asked = request(name, feature("of a video", 8, modality="video", said=said, by_cpu=said))
        done[f"metadata: by tokens, {name}"] = settled(asked)
        connector.request_finished(asked)
    for name, by_cpu in {"on the CPU": ["image_grid_thw"], "on the device": []}.items():
        said = {"image_grid_thw": torch.tensor(grid)}
        asked = request(name, feature("described", 8, said=said, by_cpu=by_cpu))
        done[f"metadata: by tokens, {name}"] = settled(asked)
        connector.request_finished(asked)
    for name, data in {"an empty item": MultiModalKwargsItem({}), "no item": None}.items():
        asked = request(name, feature("described", 8))
        asked.mm_features[0].data = data
        done[f"metadata: by tokens, {name}"] = settled(asked)
        connector.request_finished(asked)
    whole_config = role._metadata._model_config
    for rotates in (True, False):
        role._metadata._model_config = SimpleNamespace(uses_mrope=rotates)
        said = {"audio_sizes": torch.tensor([4, 8])}
        asked = request(
            f"of M-RoPE: {rotates}",
            feature("of a video", 8, modality="audio", said=said, by_cpu=said),
        )
        done[f"metadata: none, and M-RoPE: {rotates}"] = settled(asked)
        connector.request_finished(asked)
    role._metadata._model_config = whole_config
    asked = request(
        "preempted", feature("computed", 8, said={"image_grid_thw": torch.tensor(grid)})
    )
    done["tokens of others, before a preemption"] = settled(asked, 8)
    asked.num_computed_tokens = 8  # it takes them
    connector.ensure_cache_available(asked, 8)
    role._computed.remember("computed", b"others")
    asked.num_preemptions, asked.num_computed_tokens = 1, 0
    connector.ensure_cache_available(asked, 8)
    done["tokens of others, after it"] = not asked.skip_reading_prefix_cache
    connector.request_finished(asked)
    role._computed._takes_prefilled = True
    told = {"do_remote_prefill": True}
    done["tokens of others, of an engine that prefills"] = [
        computed(f"elsewhere {params}", grid, kv_transfer_params=params)
        for params in (told, {"do_remote_decode": True}, "do_remote_prefill")
    ]
    done["tokens of others, and those to be loaded"] = [
        computed("computed, and evicted", each, kv_transfer_params=told) for each in (grid, other)
    ]
    asked = request(
        "to be loaded", feature("not loaded", 8, said={"image_grid_thw": torch.tensor(grid)})
    )
    asked.kv_transfer_params = dict(told)
    done["tokens to be loaded"] = settled(asked, 8)
    role._computed.remember("not loaded", b"others")
    asked.kv_transfer_params["do_remote_prefill"] = False
    connector.ensure_cache_available(asked, 8)
    done["tokens of others, where none could be loaded"] = not asked.skip_reading_prefix_cache
    connector.request_finished(asked)
    role._computed._takes_prefilled = False
    for name, sides in (
        ("computed", grid),
        ("computed, without metadata", grid),
        ("computed", other),
    ):
        said = {"image_grid_thw": torch.tensor(sides), **media}
        asked = request(f"announced, {name}", feature(name, 8, said=said))
        settled(asked)
        answer = connector.request_finished(asked)[1]
        done[f"announced, {name} {sides}"] = answer[name]["metadata"]
    read, to_list = [0], torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: read.append(tensor.numel()) or to_list(tensor)
    asked = request("long", feature("computed", 8, said={"image_grid_thw": torch.ones(9999, 3)}))
    settled(asked)
    connector.request_finished(asked)
    torch.Tensor.tolist = to_list
    done["numbers that are read of a field of 29,997"] = max(read)
    misses = role.stats.data.get("misses", 0)
    for name, value in {"right": 0.0, "not a number": float("nan")}.items():
        said = {"embedding": torch.full((4, 128), value, dtype=dtype)}
        asked = request(name, feature("a prompt's", 4, modality="prompt_embeds", said=said))
        done[f"brought prompt: {name}"] = settled(asked)
        connector.update_state_after_alloc(asked, 0)
        if name == "right":
            [item] = asked.mm_features
            done["a prompt's embeddings are looked up"] = len(role._items)
            done["a prompt's embeddings are stored"] = role._sharing.includes(item.identifier)
        connector.request_finished(asked)
    done["a prompt's embeddings are misses"] = role.stats.data.get("misses", 0) - misses
    done["a prompt's embeddings are encoded rows"] = role._encoded_rows
connector.build_connector_meta(STEP)


async def fetched() -> list[object]:
    """What is had of three pictures of a request when one of them cannot be fetched."""
    whole = asyncio.Event()

    async def load(medium: Medium) -> object:
        if medium.url == "whole":
            whole.set()
            return MediaWithBytes(SimpleNamespace(size=(1, 1)), b"bytes")
        await (whole if medium.url == "absent" else asyncio.Event()).wait()
        raise OSError("absent")

    parts = [{"image_url": {"url": name}} for name in ("whole", "absent", "slow")]
    look = Look(b"", media=[Medium(part, "image_url") for part in parts])
    fetcher = MediaFetcher(config.model_config)
    fetcher._loader = lambda: load
    return [await fetcher.fetch(look), *(part["image_url"]["url"][:5] for part in parts)]


async def connected() -> bool:
    """Whether the middleware has a session when it says that it works."""
    config.model_config.multimodal_config.enable_mm_embeds = True
    args = SimpleNamespace(model=model, served_model_name=None, api_key=None, port=None)
    middleware = ReuseMiddleware(None)
    await middleware._start(SimpleNamespace(vllm_config=config, args=args))
    is_connected = middleware._reuse._client._connection.current is not None
    await middleware._reuse.close()
    return is_connected


async def begun() -> list[str]:
    """In which order requests get to vLLM that come, a hop's first, while the middleware begins."""
    served: list[str] = []

    async def app(scope: dict, *_: object) -> None:
        served.append(scope["sender"])

    async def ask(sender: str, body: bytes) -> None:
        async def receive() -> dict:
            return {"type": "http.request", "body": body}

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        await middleware({**scope, "sender": sender}, receive, None)

    middleware, begins = ReuseMiddleware(app), asyncio.Event()
    middleware._starting = asyncio.ensure_future(begins.wait())
    hop = asyncio.ensure_future(ask("a hop", b'{"ecd_decoding": "digest"}'))
    await asyncio.ensure_future(ask("a client", b"{}"))
    begins.set()
    await hop
    return served


if CAN_LEAVE_OUT_MEDIA:
    done["served as the middleware begins"] = asyncio.run(begun())
    done["the middleware is connected"] = asyncio.run(connected())
    done["fetched"] = asyncio.run(fetched())
    parser = MULTIMODAL_REGISTRY.create_processor(config.model_config).info.data_parser
    said = {
        "right": {},
        "embeddings": {"image_embeds": torch.zeros(8, 128)},
        "pixels": {"pixel_values": torch.zeros(32, 7)},
        "both": {"image_embeds": torch.zeros(8, 128), "pixel_values": torch.zeros(32, 7)},
        "huge": {"image_grid_thw": torch.tensor([[1, 65536, 65536]])},
    }
    for name, more in said.items():
        fields = {"image_grid_thw": torch.tensor([[1, 4, 8]]), **more}
        try:
            done[f"may come: {name}"] = bool(parser.parse_mm_data({"image": fields}))
        except ValueError as error:
            done[f"may come: {name}"] = "media" not in str(error) and "prompt" not in str(error)
rows = MultiModalBudget(config, MULTIMODAL_REGISTRY).encoder_cache_size
is_sized = bool(config.cache_config.kv_cache_memory_bytes)  # by its platform, on a CPU
nbytes = rows * 128 * config.model_config.dtype.itemsize
room = room_for_loads(nbytes, 80 << 30, is_kv_sized=is_sized)
said_at_start = [record.getMessage() for record in at_start.buffer]
done["what loads may take is said"] = said_at_start.count(f"ecd: {room}")
done["left over"] = [len(role._items), len(role._requests), len(role._loads)]
print("RESULT", json.dumps(done))
connector.shutdown()
