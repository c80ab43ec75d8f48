"""vLLM's API server, which says in its log when it calls a model's processor for media.

    SLOWED_BY=FILE python counting_server.py ARGUMENTS...

FILE has the seconds that it then takes longer, which a test may change; without it there are none.
"""

import os
import runpy
import time
from pathlib import Path

from vllm.multimodal.processing import InputProcessingContext

call = InputProcessingContext.call_hf_processor


def call_and_say(self, hf_processor, data, *arguments, **named):
    if any(data.get(media) for media in ("images", "videos")):
        print("media are preprocessed", flush=True)
        if file := os.environ.get("SLOWED_BY"):
            time.sleep(float(Path(file).read_text()))
    return call(self, hf_processor, data, *arguments, **named)


InputProcessingContext.call_hf_processor = call_and_say
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
