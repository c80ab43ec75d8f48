"""vLLM's API server, which says in its log what it does for a request's media.

    SLOWED_BY=FILE python counting_server.py ARGUMENTS...

It tells of each call of a model's processor for media, and how long ecd's middleware had a request
before the next one got it. FILE has the seconds that such a call then takes longer, which a test
may change; without it there are none.
"""

import os
import runpy
import time
from pathlib import Path

from vllm.multimodal.processing import InputProcessingContext

from ecd_client.vllm.reuse import ReuseMiddleware

call = InputProcessingContext.call_hf_processor
begin, serve = ReuseMiddleware.__init__, ReuseMiddleware.__call__


def call_and_say(self, hf_processor, data, *arguments, **named):
    if any(data.get(media) for media in ("images", "videos")):
        print("media are preprocessed", flush=True)
        if file := os.environ.get("SLOWED_BY"):
            time.sleep(float(Path(file).read_text()))
    return call(self, hf_processor, data, *arguments, **named)


def begin_before_a_clock(self, app):
    async def clock(scope, receive, send):
        if "came_s" in scope:
            took_s = time.perf_counter() - scope["came_s"]
            print(f"ecd had a request for {took_s:.6f} s", flush=True)
        await app(scope, receive, send)

    begin(self, clock)


async def serve_with_a_clock(self, scope, receive, send):
    if scope["type"] == "http":
        scope["came_s"] = time.perf_counter()
    await serve(self, scope, receive, send)


InputProcessingContext.call_hf_processor = call_and_say
ReuseMiddleware.__init__ = begin_before_a_clock
ReuseMiddleware.__call__ = serve_with_a_clock
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
