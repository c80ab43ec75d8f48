"""Drives the names of videos and sounds beside vLLM's own code. In a vLLM environment.

    python media_seams.py DIRECTORY

A tiny model without weights, which takes pictures, videos and sounds, is made in the directory.
Prints JSON.
"""

import asyncio
import json
import os
import sys
import wave
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import soundfile
from PIL import Image
from transformers.video_utils import VideoMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.model_executor.models import registry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.parse import parse_mm_uuids
from vllm.multimodal.processing import PromptIndexTargets
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.chat_utils import parse_chat_messages

from e2e.clips import write_clip
from e2e.models.checkpoint import Checkpoint
from e2e.models.families.qwen import qwen2_5_omni
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.middleware import fetching
from ecd_client.vllm.middleware.answers import Answers
from ecd_client.vllm.middleware.fetching import MediaFetcher
from ecd_client.vllm.middleware.hop.headers import Headers
from ecd_client.vllm.middleware.kinds import kinds_of
from ecd_client.vllm.middleware.media import FoundMedium, Look, Medium
from ecd_client.vllm.middleware.naming import Names
from ecd_client.vllm.middleware.outline import Outline, Update
from ecd_client.vllm.middleware.outlines import Outlines, updates_of
from ecd_client.vllm.middleware.requests import _media
from ecd_proto.placeholders import Placeholder
from support.web import site

directory = Path(sys.argv[1])
registry._run_in_subprocess = lambda inspect: inspect()  # which imports vLLM anew
loop = asyncio.new_event_loop()


def sound(seconds: float = 0.5, rate: int = 16000) -> bytes:
    file, random = BytesIO(), np.random.default_rng(0)
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(random.integers(-999, 999, int(seconds * rate), dtype=np.int16).tobytes())
    return file.getvalue()


def frames(count: int = 4) -> str:
    shown = []
    for at in range(count):
        file = BytesIO()
        Image.new("RGB", (56, 56), (40 * at, 80, 120)).save(file, "jpeg")
        shown.append(b64encode(file.getvalue()).decode())
    return ",".join(shown)


def url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


write_clip(str(directory / "clip.mp4"), 0, 2.0)
CLIP, SOUND = (directory / "clip.mp4").read_bytes(), sound()
PARTS: dict[str, dict[str, Any]] = {
    "a video": {"type": "video_url", "video_url": {"url": url("video/mp4", CLIP)}},
    "frames": {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames()}"}},
    "a sound": {"type": "audio_url", "audio_url": {"url": url("audio/wav", SOUND)}},
    "a sound in JSON": {
        "type": "input_audio",
        "input_audio": {"data": b64encode(SOUND).decode(), "format": "wav"},
    },
}


FIELDS = {"video": {"video_grid_thw": [4, 4, 4]}, "audio": {"audio_feature_lengths": [50]}}


def config_of(**flags: Any) -> Any:
    args = EngineArgs(model=str(model), allowed_local_media_path=str(directory), **flags)
    config = args.create_engine_config().model_config
    config.multimodal_config.enable_mm_embeds = True
    config.multimodal_config.allow_missing_mm_embeddings = True  # as for an EC consumer
    return config


def entry(name: str) -> Any:
    return SimpleNamespace(namespace="", mm_hash=name, close=lambda: None)


model = directory / "model"
model.mkdir()
qwen2_5_omni(Checkpoint(model, "Qwen2_5OmniForConditionalGeneration"))
config = config_of()
kinds = ("image", "video", "audio")


def look_at(*parts: dict[str, Any]) -> Look:
    request = {"messages": [{"role": "user", "content": list(map(dict, parts))}]}
    look = Look(b"", request, _media(request["messages"], kinds) or [])
    assert len(look.media) == len(parts)
    return look


def looked(*parts: dict[str, Any]) -> tuple[Look, bool]:
    look = look_at(*parts)
    return look, loop.run_until_complete(MediaFetcher(config).fetch(look))


def named(medium: Medium, names: Names) -> str:
    medium.uuid = names.uuid(medium.kind, medium.content)
    medium.name = names.mm_hash(medium.kind, medium.uuid)
    return medium.name


def hashed(request: dict[str, Any], config: Any) -> dict[str, list[str]]:
    """vLLM's names of the media of a request that its server has read."""
    read = ChatCompletionRequest.model_validate(request)
    _, data, uuids = parse_chat_messages(read.messages, config, content_format="openai")
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    inputs = ProcessorInputs(
        prompt=[],
        mm_data_items=processor.info.parse_mm_data(data),
        mm_uuid_items=parse_mm_uuids(uuids),
        media_io_kwargs=config.multimodal_config.media_io_kwargs or {},
    )
    algorithm = config.multimodal_config.mm_hasher_algorithm
    return inputs.get_mm_hashes(config.model, algorithm)


said: dict[str, Any] = {}
io_kwargs = {"video": {"num_frames": 8}, "audio": {"audio_backend": "soundfile"}}
with_kwargs = config_of(media_io_kwargs=io_kwargs, limit_mm_per_prompt={"image": 0})

# Kinds that are looked up, and why others are not.
settings: Any = SimpleNamespace(keeps_private=lambda kind, is_streaming: False)
for each, only_encodes in ((config, False), (with_kwargs, False), (with_kwargs, True)):
    about = each, settings, PlaceholderMetadata(each), Names(each)
    looked_up, outlined, left_out = kinds_of(*about, only_encodes=only_encodes)
    said.setdefault("kinds", []).append((looked_up, outlined, left_out))

# What the part says is the item's name in the engine.
for how, each in (("plain", config), ("--media-io-kwargs", with_kwargs)):
    names, is_same = Names(each), {}
    for name, part in PARTS.items():
        look, is_whole = looked(part)
        [medium] = look.media
        expected, look.is_named = {medium.kind: [named(medium, names)]}, True
        placeholder = Placeholder.of(medium.kind, FIELDS[medium.kind])
        look.found = [FoundMedium(medium, entry(medium.name), placeholder)]
        bare = hashed(json.loads(look.rewritten()), each)
        look.settle()
        brought = hashed(json.loads(look.body), each)
        is_same[name] = is_whole and brought == bare == expected
        if how != "plain":
            is_same[name] = is_same[name] and medium.name != medium.uuid
    said[f"named as vLLM does: {how}"] = is_same

# Parts that vLLM refuses, or may read otherwise, stay as they came.
video, spoken = PARTS["a video"], PARTS["a sound in JSON"]
odd = [
    {**spoken, "input_audio": {**spoken["input_audio"], "format": "flac"}},
    {**video, "image_url": None},
    {**video, "type": "audio_url"},
    {"type": "video_url", "video_url": CLIP.hex()},
    {"type": "text", "text": "a", "video_url": video["video_url"]},
    {"type": "input_image", "image_url": {"url": ""}},
]
said["stay"] = [_media([{"content": [each]}, {"content": [video]}], kinds) is None for each in odd]

# Two requests that mean different entries by one name have no outline of each other's.
kept: list[Any] = []
outlines = Outlines(lambda kind, data: None, lambda entry, outline: kept.append(entry))
one, other = (Outline("image", (Update("replace", [5], [7] * n, None),)) for n in (1, 2))
updates = updates_of(one, None, None)
with outlines.giving({"n": one}), outlines.wanting({"n": ("space", "one")}):
    said["outlines of one"] = [outlines.given("n") == one, outlines.given("m")]
    outlines.note("n", None, updates)
    with outlines.giving({"n": other}), outlines.wanting({"n": ("space", "other")}):
        said["outlines of two"] = outlines.given("n")
        outlines.note("n", None, updates)
said["outlines kept"] = kept
away = PromptIndexTargets.prefix([1])
with outlines.wanting({"n": ("space", "one")}):
    outlines.note("n", None, [update.with_target(away) for update in updates])
said["no outlines of"] = sorted(outlines.impossible)


def has_other_fields(kind: str, data: Any) -> Any:
    raise ValueError(kind)


of_others = Outlines(has_other_fields, lambda entry, outline: kept.append(entry))
with of_others.wanting({"n": ("space", "one")}):
    of_others.note("n", None, updates)
said["one item without"] = sorted(of_others.impossible)
said["outlines of none"] = [outlines.given("n"), outlines.are_needed]

# The bytes are those that vLLM decodes.
media, contents = MediaConnector(), {}
for name, part in PARTS.items():
    look, _ = looked(part)
    [medium] = look.media
    contents[name] = medium.content
    theirs = SOUND if medium.kind == "audio" else media.fetch_video(medium.url).original_bytes
    said[f"bytes: {name}"] = medium.content.original_bytes == theirs

# A name says what decides the frames and the samples.


def uuid(name: str) -> str:
    return Names(config).uuid("audio" if "sound" in name else "video", contents[name])


before = {name: uuid(name) for name in PARTS}
said["names are stable"] = before == {name: uuid(name) for name in PARTS}
said["names differ"] = len(set(before.values())) == 3  # a sound is the same in both kinds of parts


def change() -> list[str]:
    """What is named otherwise now."""
    return [name for name, was in before.items() if uuid(name) != was]


cv2.__version__, was = "another", cv2.__version__
said["another OpenCV"] = change()
cv2.__version__ = was
soundfile.__libsndfile_version__, was = "another", soundfile.__libsndfile_version__
said["another libsndfile"] = change()
soundfile.__libsndfile_version__ = was
config.multimodal_config.media_io_kwargs = {"image": {"image_mode": "L"}}
said["other pixels of frames"] = change()
config.multimodal_config.media_io_kwargs = {"video": {"video_backend": "molmo2"}}
said["another loader"] = change()
config.multimodal_config.media_io_kwargs = {}
contents["frames"] = contents["frames"]._replace(is_frames=False)
said["the same bytes in one piece"] = change()

# What headers say of videos and sounds is what vLLM finds, and nothing is decoded for it.
names, sizes = Names(config), []
headers = Headers(config, names.loader, names.io_kwargs("video"), reads_times=True)
kwargs = {"video": {"video_backend": names.loader}}
for rate, count in ((2.0, 40), (30.0, 300), (30.0, 305), (25.0, 100), (1.0, 3)):
    write_clip(str(directory / "other.mp4"), 0, rate, count)
    clip = (directory / "other.mp4").read_bytes()
    taken = headers.frames(clip)
    decoded = MediaConnector(media_io_kwargs=kwargs).fetch_video(url("video/mp4", clip))
    pixels, about = decoded.media
    sampled = VideoMetadata(
        total_num_frames=about["total_num_frames"],
        fps=about["fps"],
        frames_indices=about["frames_indices"],
    )
    assert taken == (about["total_num_frames"], len(pixels), 56, 56, about["fps"])
    assert taken.rate_taken == sampled.sampled_fps
    sizes.append(headers.have_times(taken))
said["videos with times"] = sizes
said["headers of none"] = [headers.frames(SOUND), headers.frames(b""), headers.frames(CLIP[:99])]
of_sounds = [
    headers.size(look_at({**part, "uuid": "a"}).media[0], url("audio/wav", sound(seconds)))
    for part in (PARTS["a sound"],)
    for seconds in (1.0, 4.0)
]
said["tokens of sounds"] = [size.tokens for size in of_sounds]
[noise] = look_at({**PARTS["a sound"], "uuid": "a"}).media
said["no sound"] = headers.size(noise, url("audio/wav", b"no sound"))
[shown] = look_at(PARTS["frames"]).media
said["frames one by one"] = headers.size(shown, shown.url).has_times

# Limits are vLLM's, and what was fetched is what the name says.
os.environ["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"] = "1"
loud = {"type": "audio_url", "audio_url": {"url": url("audio/wav", bytes(2 << 20))}}
said["a sound beyond the limit"] = looked(loud)[1]
del os.environ["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"]
for name, path in (("within", directory / "clip.mp4"), ("outside", "/etc/hostname")):
    file = {"type": "video_url", "video_url": {"url": f"file://{path}"}}
    said[f"a file {name}"] = looked(file)[1]
with site() as (address, page):
    page["content"] = CLIP
    look, is_whole = looked({"type": "video_url", "video_url": {"url": address}})
    named(look.media[0], Names(config))
    look.is_named, page["content"] = True, b"others"
    look.settle()
    [sent] = json.loads(look.body)["messages"][0]["content"]
    theirs = media.fetch_video(sent["video_url"]["url"]).original_bytes
    said["fetched"] = [is_whole, page["asked"], look.fetched_bytes == len(CLIP), theirs == CLIP]
    # Beyond a request's bytes, or those of all, vLLM fetches for itself.
    page["content"], fetcher = CLIP, MediaFetcher(config)
    two = [{"type": "video_url", "video_url": {"url": f"{address}?{at}"}} for at in range(2)]
    fetching.MAX_FETCHED_BYTES = len(CLIP)
    both, one, other = look_at(*two), look_at(two[0]), look_at(two[1])
    said["beyond a request's bytes"] = [
        loop.run_until_complete(fetcher.fetch(both)),
        both.fetched_bytes in (0, len(CLIP)),  # the first goes on, where vLLM counts none
    ]
    fetcher.release(both)
    fetching.MAX_HELD_BYTES, page["asked"] = len(CLIP), 0
    said["beyond all bytes"] = [
        *(loop.run_until_complete(fetcher.fetch(look)) for look in (one, other)),
        fetcher._held_bytes == len(CLIP),
        page["asked"],
    ]
    fetcher.release(one)
    said["bytes that stay held"] = fetcher._held_bytes
    fetching.MAX_FETCHED_BYTES = len(CLIP) - 1
    file = {"type": "video_url", "video_url": {"url": f"file://{directory}/clip.mp4"}}
    said["beyond the bytes alone"] = [looked(part)[1] for part in (two[0], file)]


async def answered() -> Any:
    """What an encoder says again of a sound that a proxy has named."""
    look = look_at({**PARTS["a sound"], "uuid": "a name"})
    [medium] = look.media
    medium.name = "a name"
    placeholder = Placeholder.of("audio", FIELDS["audio"])
    look.found.append(FoundMedium(medium, entry("a name"), placeholder))
    answer = Answers(None, "model", announces_node=False).answer(look, "caller")
    item = answer["ec_transfer_params"]["a name"]
    return [item["item_indices"], item["metadata"]]


said["an encoder's answer"] = loop.run_until_complete(answered())
print("RESULT", json.dumps(said))
