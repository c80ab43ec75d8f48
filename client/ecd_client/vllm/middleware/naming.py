"""Names of media: vLLM's own of pictures, and the middleware's of videos and sounds.

vLLM names a video by its decoded frames and a sound by its samples, so that nobody can name them
without decoding. The middleware names them by their bytes, and by all that decides what a decoder
makes of these. The part carries that name as its `uuid`, and vLLM names the item by it.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from typing import Any

from vllm import envs
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import audio
from vllm.multimodal.media.connector import merge_media_io_kwargs
from vllm.multimodal.video import get_video_loader_backend_for_processor
from vllm.transformers_utils.processor import get_video_processor_cls_name

from ecd_client.vllm.middleware.media import AUDIO, IMAGE, VIDEO, Raw

_FORM = 1
"""Goes into each name, and counts up if its parts change."""
_MODULES = {
    VIDEO: ("cv2", "torchcodec", "PyNvVideoCodec"),
    AUDIO: ("soundfile", "av", "torchcodec", "torchaudio", "scipy", "soxr"),
}
"""Packages that decode videos, and packages that decode and resample sounds."""


class Names:
    """Names the media of one server's requests."""

    def __init__(self, model_config: Any) -> None:
        multimodal = model_config.multimodal_config
        self._algorithm, self._model = multimodal.mm_hasher_algorithm, model_config.model
        self._io_kwargs = merge_media_io_kwargs(multimodal.media_io_kwargs, None) or {}
        self.loader = self._loader(model_config)
        self._how = {
            VIDEO: {"loader": self.loader, **_versions(VIDEO)},
            AUDIO: _versions(AUDIO),
        }
        # vLLM's own names of videos do not say how it opens frames that come one by one.
        self._of_frames = {"image": self._io_kwargs.get(IMAGE, {}), "pillow": _version("pillow")}

    def has_io_kwargs(self, kind: str) -> bool:
        """Whether --media-io-kwargs change vLLM's names of the kind."""
        return bool(self._io_kwargs.get(kind))

    def io_kwargs(self, kind: str) -> dict[str, Any]:
        """The --media-io-kwargs for the kind."""
        return dict(self._io_kwargs.get(kind) or {})

    def decoding(self, kind: str) -> str | None:
        """A digest of what decides what becomes of a medium's bytes. None: vLLM names the kind."""
        if kind == IMAGE:
            return None
        how = self._how[kind] | (self._of_frames if kind == VIDEO else {})
        said = json.dumps([_FORM, kind, how, self.io_kwargs(kind)], sort_keys=True, default=str)
        return sha256(said.encode()).hexdigest()

    def uuid(self, kind: str, content: Any) -> str:
        """The name of a medium that no client has named."""
        if not isinstance(content, Raw):
            return self._hash(**{kind: content})
        how = self._how[kind] | (self._of_frames if content.is_frames else {})
        return self._hash(ecd=_FORM, how=how, **{kind: content.original_bytes})

    def mm_hash(self, kind: str, uuid: str) -> str:
        """vLLM's name of an item whose part says this `uuid` (`ProcessorInputs.get_mm_hashes`)."""
        if not self.has_io_kwargs(kind):
            return uuid
        return self._hash(**{kind: uuid}, media_io_kwargs={kind: self._io_kwargs[kind]})

    def _hash(self, **said: Any) -> str:
        name: str = MultiModalHasher.hash_kwargs(self._algorithm, model_id=self._model, **said)
        return name

    def _loader(self, model_config: Any) -> str:
        """The loader of videos, which samples their frames, as vLLM's media connector chooses it.

        --media-io-kwargs may set it, and --media-io-kwargs are in vLLM's own names.
        """
        chosen = self._io_kwargs.get(VIDEO, {})
        if "video_backend" in chosen:
            said = chosen["video_backend"]
        else:
            processor = get_video_processor_cls_name(model_config)
            said = get_video_loader_backend_for_processor(processor)
        return str(said or envs.VLLM_VIDEO_LOADER_BACKEND)


def _versions(kind: str) -> dict[str, str]:
    """The versions of all decoders of a kind: vLLM's server goes on to the next if one fails."""
    said = {module: _version(module) for module in _MODULES[kind]}
    if kind == AUDIO:
        said["libsndfile"] = str(
            getattr(sys.modules.get("soundfile"), "__libsndfile_version__", "")
        )
        said["torchcodec loads"] = str(audio.AudioDecoder is not None)
    return said


def _version(module: str) -> str:
    """The version of what is installed; of OpenCV, which vLLM has imported, that of the module."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(module)
    return str(getattr(sys.modules.get(module), "__version__", ""))
