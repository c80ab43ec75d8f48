"""The media and prompts of requests, as `engine_process.py` gets them. In a vLLM environment."""

import numpy as np
import torch
from PIL import Image

MARKS = "<|vision_start|><|{}_pad|><|vision_end|>"


def picture(spec: list[int]) -> Image.Image:
    """A picture of [width, height, seed]: coarse blocks of random colours."""
    width, height, seed = spec
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def video(spec: list[int], frames: int = 8) -> tuple[np.ndarray, dict]:
    """A video of [width, height, seed], at 2 frames a second, and what a loader says of it."""
    width, height, seed = spec
    shown = [np.asarray(picture([width, height, seed + at // 2])) for at in range(frames)]
    about = {
        "fps": 2.0,
        "duration": frames / 2,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return np.stack(shown), about


def prompt(request: dict) -> dict:
    images = [picture(spec) for spec in request.get("images", ())]
    videos = [video(spec) for spec in request.get("videos", ())]
    grids = request.get("grids", ())
    marks = MARKS.format("image") * (len(images) or len(grids))
    marks += MARKS.format("video") * len(videos)
    text = f"<|im_start|>user\n{marks}{request['text']}<|im_end|>\n<|im_start|>assistant\n"
    made: dict = {"prompt": text}
    if "cache_salt" in request:
        made["cache_salt"] = request["cache_salt"]
    if grids:  # nothing but the metadata: the embeddings are elsewhere
        made["multi_modal_data"] = {"image": {"image_grid_thw": torch.tensor(grids)}}
        made["multi_modal_uuids"] = {"image": request["uuids"]}
    elif images:
        made["multi_modal_data"] = {"image": images}
        if "uuids" in request:
            made["multi_modal_uuids"] = {"image": request["uuids"]}
        if "mm_processor_kwargs" in request:
            made["mm_processor_kwargs"] = request["mm_processor_kwargs"]
    if videos:
        made["multi_modal_data"] = {**made.get("multi_modal_data", {}), "video": videos}
    return made
