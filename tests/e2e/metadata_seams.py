"""Says what is announced of items, and what vLLM's server takes of it. In a vLLM environment.

    python metadata_seams.py DIRECTORY

Items are made by the models' own processors, of tiny models without weights in the directory. Where
that needs code of the hub they have the fields that vLLM's code names. Prints JSON.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.model_executor.models as models
from PIL import Image
from transformers import MiniCPMV4_6Config
from vllm.config import ECTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

try:
    from vllm.renderers.chat_utils.item_tracker import _get_embeds_data
except ImportError:  # before 0.33
    from vllm.renderers.chat_utils import _get_embeds_data

from e2e.models.checkpoint import Checkpoint
from e2e.models.families.qwen import qwen2_5_omni
from e2e.tiny_models import MODELS, token_ids, write_tokenizer
from ecd_client.vllm.base.compat import refuse_undeclared
from ecd_client.vllm.base.fields import ASSUMED, ENCODERS_OWN
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_proto.placeholders import Placeholder

READ = {"timestamps", "num_frames", "use_vit_merger", "video_use_vit_merger"}
"""Fields that servers or models read of items without media, or may read."""
FRAMES = 8
MARK = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
directory = Path(sys.argv[1])
registry._run_in_subprocess = lambda inspect: inspect()  # which imports vLLM anew


def minicpmv4_6(to: Path) -> None:
    tokenizer = write_tokenizer(to, ["<image>", "</image>", "<slice>", "</slice>", "<unk>"])
    ids = token_ids(tokenizer)
    text = {"model_type": "qwen3_5_text", "vocab_size": len(tokenizer), "num_hidden_layers": 2}
    named = {name: ids[name] for name in ("image_token_id", "video_token_id")}
    config = MiniCPMV4_6Config(text_config=text, **named)
    config.architectures = ["MiniCPMV4_6ForConditionalGeneration"]
    config.save_pretrained(to)


def omni(to: Path) -> None:
    qwen2_5_omni(Checkpoint(to, "Qwen2_5OmniForConditionalGeneration"))


class Model:
    """A tiny model's processor, and what an engine of it announces."""

    def __init__(self, kind: str) -> None:
        path = directory / kind
        path.mkdir()
        {**MODELS, "minicpmv4_6": minicpmv4_6, "qwen2_5_omni": omni}[kind](path)
        transfer = ECTransferConfig(ec_connector="ExampleConnector", ec_role="ec_consumer")
        args = EngineArgs(model=str(path), ec_transfer_config=transfer, enable_mm_embeds=True)
        config = args.create_engine_config().model_config
        self.processor = MULTIMODAL_REGISTRY.create_processor(config)
        self.metadata = PlaceholderMetadata(config)
        refuse_undeclared(config)

    def made(self, modality: str, media: Any) -> SimpleNamespace:
        """The item that a processor makes, as a connector is shown it."""
        items = self.processor.info.parse_mm_data({modality: [media]})
        made = self.processor(f"{MARK[modality]}what", mm_items=items)
        [data], [place] = made["mm_kwargs"][modality], made["mm_placeholders"][modality]
        return SimpleNamespace(identifier=modality, modality=modality, data=data, mm_position=place)

    def announced(self, *features: SimpleNamespace) -> dict[str, Any] | list[Any]:
        """What an answer says of items that are stored, and their entries, if they say more."""
        stored = {feature.identifier: self.metadata.packed(feature) for feature in features}
        answer = self.metadata.of(list(features), stored)
        found = []
        for feature in features:
            entry, metadata = stored[feature.identifier], answer[feature.identifier]["metadata"]
            said = Placeholder.of(feature.modality, metadata)
            is_same = not entry if said is None else said.is_of(entry)
            whole = self.metadata.of_item(feature)
            more = dict(whole.fields) if whole and whole.is_of(entry) else repr(entry)
            found.append(metadata if is_same else [metadata, more])
        return found[0] if len(found) == 1 else found

    def takes(self, modality: str, said: dict[str, Any]) -> str:
        """What vLLM's server says of an item's fields. Empty: it takes them."""
        try:
            fields = _get_embeds_data(modality, [said], self.processor)
            self.processor.info.parse_mm_data({modality: fields})
        except Exception as error:
            return str(error)
        return ""


def item(modality: str, **fields: torch.Tensor) -> SimpleNamespace:
    elements = {
        name: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
        for name, value in fields.items()
    }
    return SimpleNamespace(
        identifier=modality,
        modality=modality,
        data=MultiModalKwargsItem(elements),
        mm_position=SimpleNamespace(get_num_embeds=lambda: 4),
    )


def video(rate: float) -> tuple[np.ndarray, dict[str, Any]]:
    frames = np.random.default_rng(0).integers(0, 256, (FRAMES, 56, 84, 3), dtype=np.uint8)
    return frames, {
        "fps": rate,
        "duration": FRAMES / rate,
        "total_num_frames": FRAMES,
        "frames_indices": list(range(FRAMES)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def unclassified() -> Iterator[str]:
    """Fields of items whose models take metadata, of which nobody has said who reads them."""
    inherits = {"qwen2_5_vl": {"video"}, "minicpmv4_6": {"image", "video"}}
    for source in Path(models.__file__).parent.glob("*.py"):
        text = source.read_text()
        modalities, fields = inherits.get(source.stem, set()), set(READ | ENCODERS_OWN | {*ASSUMED})
        for declared in re.findall(r"\n    embedding_fields = \{(.*?)\n    \}", text, re.DOTALL):
            modalities = modalities | set(re.findall(r'"(image|video|audio)": ?\{', declared))
            fields |= set(re.findall(r'"(\w+)": "(?:values|metadata)"', declared))
        made = re.findall(r'\b(?!field=)(\w+)=MultiModalFieldConfig\.\w+\(\s*"(\w+)"', text)
        inherited = {f"{modality}_embeds" for modality in modalities}
        inherited |= {"video_image_sizes", "video_grid_thw"}
        for name, modality in made:
            if modality in modalities and name not in fields | inherited:
                yield f"{source.stem}: {name}"


said: dict[str, Any] = {}
taken: dict[str, str] = {}
more: dict[str, str] = {}

for kind in ("qwen2_5_vl", "qwen3_vl"):
    model = Model(kind)
    picture = model.made("image", Image.new("RGB", (112, 84)))
    said[f"{kind}: a picture"] = model.announced(picture)
    taken[f"{kind}: a picture"] = model.takes("image", said[f"{kind}: a picture"])
    for rate in (1.0, 2.0, 8.0):
        name = f"{kind}: a video, {rate:g} frames a second"
        said[name] = model.announced(model.made("video", video(rate)))
        if isinstance(said[name], dict):
            taken[name] = model.takes("video", said[name])
    grids = {"image_grid_thw": [1, 6, 8]}, {"video_grid_thw": [4, 4, 6]}
    times = {"timestamps": [0.25, 1.25, 2.25, 3.25]} if kind == "qwen3_vl" else {}
    for modality, bare, field, value in (
        ("image", grids[0], "timestamps", torch.zeros(4)),
        ("image", grids[0], "pixel_values", torch.zeros(0, 1176)),
        ("video", grids[1] | times, "second_per_grid_ts", torch.tensor(2.0)),
        ("video", grids[1] | times, "pixel_values_videos", torch.zeros(0, 1176)),
        *([("video", grids[1], "timestamps", torch.zeros(4))] if not times else []),
    ):
        assert not model.takes(modality, bare)
        more[f"{kind}: {modality} and {field}"] = model.takes(modality, {**bare, field: value})
    if kind == "qwen2_5_vl":
        grid = torch.tensor([4, 4, 6])
        shown = {
            "a field that nobody knows": {"second_per_grid": torch.tensor(1.0)},
            "frames alone": {"use_audio_in_video": torch.tensor(False)},
            "two grids": {"video_grid_thw": torch.stack([grid, grid])},
        }
        for name, fields in shown.items():
            said[name] = model.announced(item("video", **({"video_grid_thw": grid} | fields)))
        clip = item("video", video_grid_thw=grid, use_audio_in_video=torch.tensor(True))
        stored = {each.modality: model.metadata.packed(each) for each in (picture, clip)}
        answer = model.metadata.of([picture, clip], stored)
        said["beside a video with its sound"] = answer["image"]["metadata"]

model = Model("qwen2_audio")
sound = model.made("audio", (np.zeros(16000, dtype=np.float32), 16000))
said["qwen2_audio: a sound"] = model.announced(sound)
taken["qwen2_audio: a sound"] = model.takes("audio", said["qwen2_audio: a sound"])
for field in ("input_features", "feature_attention_mask"):
    fields = {"audio_num_tokens": [25], field: torch.zeros(0, 3000)}
    more[f"qwen2_audio: audio and {field}"] = model.takes("audio", fields)

model = Model("qwen2_5_omni")
clip = item("video", video_grid_thw=grid, second_per_grid_ts=torch.tensor([2.0]))
said["qwen2_5_omni: a video, 1 frame a second"] = model.announced(clip)

model = Model("minicpmv4_6")
sizes = torch.tensor([[84, 56], [84, 56]])
said["minicpmv4_6: a picture"] = model.announced(item("image", tgt_sizes=sizes))
said["minicpmv4_6: a video"] = model.announced(item("video", video_image_sizes=sizes))
said["minicpmv4_6: announces pictures"] = model.metadata.announces("image")

print("RESULT", json.dumps([said, taken, more, sorted(unclassified())]))
