"""Reads how large media are from their headers, with vLLM's own loaders.

These look for a video's end, and decode its last group of frames for that; nothing else is decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import pybase64
from vllm import envs
from vllm.logger import init_logger
from vllm.multimodal import video
from vllm.multimodal.media import audio

from ecd_client.vllm.base.fields import ASSUMED
from ecd_client.vllm.base.outputs import configs_in
from ecd_client.vllm.middleware.hop.sizes import (
    Frames,
    Size,
    of_bytes,
    of_sound,
    of_video,
    tokens_of,
)
from ecd_client.vllm.middleware.media import IMAGE, VIDEO, Medium, Raw
from ecd_proto.placeholders import STEP

logger = init_logger(f"vllm.{__name__}")

TAKEN_FRAMES = 32
"""Frames of a video that vLLM takes unless a loader or --media-io-kwargs say so."""
_GRID_FRAMES = "temporal_patch_size"
_HALF_STEP = 2.0**-25
"""A number that is nearer to 1.0 is 1.0 in a processor's tensors."""


class Headers:
    """Sizes of one server's media."""

    def __init__(
        self, model_config: Any, loader: str | None, kwargs: Mapping[str, Any], *, reads_times: bool
    ) -> None:
        """`loader` and `kwargs` load videos; `reads_times`: the model reads when a frame is."""
        self._longest, self._reads_times = model_config.max_model_len, reads_times
        sizes = (config.get(_GRID_FRAMES) for config in configs_in(model_config.hf_config))
        self._grid_frames = next((size for size in sizes if size), 2)
        self._kwargs = {"num_frames": TAKEN_FRAMES, **kwargs, "backend": "opencv"}
        self._kwargs.pop("video_backend", None)
        # Of other decoders' options OpenCV knows nothing.
        self._planner = _planner(loader) if kwargs.get("backend", "opencv") == "opencv" else None

    def frames(self, content: bytes | None) -> Frames | None:
        """The frames of a video. None: its header does not say, or is not read."""
        if content is None or self._planner is None:
            return None
        try:
            self._planner.load_bytes(content, **self._kwargs)
        except _Planned as planned:
            return planned.frames
        except Exception:  # vLLM will say what is wrong with it
            logger.debug("ecd: the header of a video is not read", exc_info=True)
        return None

    def have_times(self, frames: Frames | None) -> bool:
        """Whether the model reads when a video's frames are, and assumes otherwise."""
        if not self._reads_times:
            return False
        if frames is None or frames.rate_taken <= 0.0:
            return True
        apart_s = self._grid_frames / frames.rate_taken
        return bool(abs(apart_s - ASSUMED[STEP]) >= _HALF_STEP)

    def size(self, medium: Medium, url: str) -> Size | None:
        """The size of a medium with these bytes. None: its header makes no sense.

        vLLM will say why.
        """
        kind, nbytes, most = medium.kind, len(url) * 3 // 4, self._longest
        if kind == IMAGE:
            known = medium.content is not None
            return Size(tokens_of(*medium.content.media.size)) if known else of_bytes(kind, 0, most)
        content, estimate = _bytes_of(medium, url), of_bytes(kind, nbytes, most)
        if kind == VIDEO:
            frames = self.frames(content)
            if frames is None and content is not None and self._planner is not None:
                return None
            size = estimate if frames is None else of_video(frames, nbytes, most)
            return size._replace(has_times=self.have_times(frames))
        seconds, is_readable = (None, True) if content is None else _seconds(content)
        if seconds is not None:
            return of_sound(min(seconds, envs.VLLM_MAX_AUDIO_DECODE_DURATION_S), nbytes, most)
        return estimate if is_readable else None


def _bytes_of(medium: Medium, url: str) -> bytes | None:
    """A video's or a sound's bytes. None: they are frames one by one, or not what the URL says."""
    if isinstance(medium.content, Raw):
        return None if medium.content.is_frames else medium.content.original_bytes
    head, _, data = url.partition(",")
    with contextlib.suppress(ValueError):
        if head.lower().endswith(";base64") and "jpeg" not in head.lower():
            return bytes(pybase64.b64decode(data, validate=True))
    return None


class _Planned(Exception):
    """The frames that a loader would decode."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames


def _planner(name: str | None) -> Any:
    """A loader that ends before it decodes. None: of this loader there is none."""
    if name is None:
        return None
    loader = type(video.VIDEO_LOADER_REGISTRY.load(name))
    needs_gpu = video.VIDEO_LOADER_REGISTRY.backend_requires_gpu(name)
    if needs_gpu or not issubclass(loader, video.VideoBackend):
        return None

    def read_frames(_: Any, /, cap: Any, frame_idx: Any, total_frames_num: int, **__: Any) -> None:
        sides = video.cv2.CAP_PROP_FRAME_WIDTH, video.cv2.CAP_PROP_FRAME_HEIGHT
        width, height = (int(cap.get(side)) for side in sides)
        rate = float(cap.get(video.cv2.CAP_PROP_FPS))
        if min(total_frames_num, len(frame_idx), width, height) < 1:
            raise ValueError("its header has no size")
        raise _Planned(Frames(total_frames_num, len(frame_idx), width, height, rate))

    return type("Planner", (loader,), {"read_frames": classmethod(read_frames)})


def _seconds(content: bytes) -> tuple[float | None, bool]:
    """How long a sound is, as its header says, and whether it may be one.

    None: the header does not say, or no library here can tell.
    """
    may_be = True
    for read in (_by_soundfile, _by_pyav):
        try:
            return read(content), True
        except ImportError:
            pass
        except Exception:  # no sound, or of a format that another library reads
            may_be = False
    return None, may_be


def _by_soundfile(content: bytes) -> float:
    with audio.soundfile.SoundFile(BytesIO(content)) as sound:
        return float(sound.frames / sound.samplerate)


def _by_pyav(content: bytes) -> float | None:
    with audio.av.open(BytesIO(content)) as container:
        return None if container.duration is None else container.duration / 1e6
