"""vLLM's API server, which says in its log what it does for a request's media.

    GATE=FILE python counting_server.py ARGUMENTS...

It tells of each video and sound that is decoded, of each call of a model's processor for media,
which then passes the gate if there is one (`e2e.gates.Gate`), when ecd's middleware gets a request,
and how long it had it before the next one got it. With CALM media rest for longer after a request
that failed without them, it holds for longer what it has told of, and a call has no bound but what
ecd gives it.
"""

import os
import runpy
from pathlib import Path
from timeit import default_timer

from vllm.multimodal.media import audio
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.processing import InputProcessingContext

from e2e.gates import pass_gate
from ecd_client import Client
from ecd_client.vllm.middleware import answers, rests
from ecd_client.vllm.middleware.reuse import ReuseMiddleware
from ecd_proto.backoff import Backoff
from support.waiting import HANG_S

call = InputProcessingContext.call_hf_processor
begin, serve = ReuseMiddleware.__init__, ReuseMiddleware.__call__
load_bytes, load_base64, load_audio = (
    VideoMediaIO.load_bytes,
    VideoMediaIO.load_base64,
    audio.load_audio,
)


def call_and_say(self, hf_processor, data, *arguments, **named):
    brought = [data.get(media, ()) for media in ("images", "videos", "audio", "audios")]
    # A list, an array, or one picture.
    if any(each is not None and (not hasattr(each, "__len__") or len(each)) for each in brought):
        print("media are preprocessed", flush=True)
        if gate := os.environ.get("GATE"):
            pass_gate(Path(gate))
    return call(self, hf_processor, data, *arguments, **named)


def load_bytes_and_say(self, data):
    print("a video is decoded", flush=True)
    return load_bytes(self, data)


def load_base64_and_say(self, media_type, data):
    if media_type == "video/jpeg":
        print("a video is decoded", flush=True)
    return load_base64(self, media_type, data)


def load_audio_and_say(*arguments, **named):
    print("a sound is decoded", flush=True)
    return load_audio(*arguments, **named)


def begin_before_a_clock(self, app):
    async def clock(scope, receive, send):
        if "came_s" in scope:
            took_s = default_timer() - scope["came_s"]
            print(f"ecd had a request for {took_s:.6f} s", flush=True)
        await app(scope, receive, send)

    begin(self, clock)


async def serve_with_a_clock(self, scope, receive, send):
    if scope["type"] == "http":
        print("ecd has a request", scope["path"], flush=True)
        scope["came_s"] = default_timer()
    await serve(self, scope, receive, send)


InputProcessingContext.call_hf_processor = call_and_say
VideoMediaIO.load_bytes, VideoMediaIO.load_base64 = load_bytes_and_say, load_base64_and_say
audio.load_audio = load_audio_and_say
ReuseMiddleware.__init__ = begin_before_a_clock
ReuseMiddleware.__call__ = serve_with_a_clock
if os.environ.get("CALM"):
    Client.__init__.__kwdefaults__["call_timeout"] = 10 * HANG_S
    rests.RESTS, answers.STAYS_S = Backoff(10 * HANG_S, 10 * HANG_S), HANG_S
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
