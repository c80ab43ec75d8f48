"""The settings of this process's SGLang, as far as they change an embedding."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any

from ecd_client.errors import InvalidArgument

NAMESPACE_VARIABLE = "ECD_SGLANG_NAMESPACE"
_NAME = re.compile(r"[A-Za-z0-9._+:/@-]{1,128}")


def namespace() -> str:
    """The encoder's namespace, without its dtype: `sglang|version|name|digest`.

    The name is the operator's, for SGLang says nothing of the weights behind the model's path. The
    digest holds all that SGLang has published of the model, of media, and of the kernels. Raises
    InvalidArgument where either is missing, or where the encoder has other ranks.
    """
    name = os.environ.get(NAMESPACE_VARIABLE, "")
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{NAMESPACE_VARIABLE} is {name!r}; it must name the model and its weights, in 1 to "
            "128 letters, digits or ._+:/@-, such as qwen2.5-vl-7b@cc59489"
        )
    import sglang
    from sglang.srt.runtime_context import get_exec, get_mm, get_model, get_parallel

    try:
        groups = [get_model(), get_mm(), get_exec().kernel, get_exec().features]
        ranks = get_parallel().tp_size
    except (AttributeError, ValueError) as error:
        raise InvalidArgument(
            f"SGLang {sglang.__version__} does not tell its settings ({error}), so nothing can be "
            f"shared. Unset {NAMESPACE_VARIABLE} to start without ecd"
        ) from error
    if ranks > 1:
        raise InvalidArgument(
            f"ecd serves an encoder of one rank, and --tp-size is {ranks}: SGLang loads no plugins "
            f"in the others. Use --tp-size 1, or unset {NAMESPACE_VARIABLE}"
        )
    described = json.dumps([_values(group) for group in groups], sort_keys=True, default=repr)
    digest = hashlib.sha256(described.encode()).hexdigest()[:32]
    return f"sglang|{sglang.__version__}|{name}|{digest}"


def _values(group: Any) -> dict[str, Any]:
    """The settings of a group, those of the groups in it too, without watermarks' secrets."""
    return {
        name: _values(value) if type(value) is type(group) else value
        for name, value in vars(group).items()
        if not name.startswith(("_", "watermark"))
    }
