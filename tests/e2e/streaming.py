"""A session that gets its prompt in parts, each with a picture. In a vLLM environment.

    python streaming.py MODEL ADDRESS PICTURES

With an ADDRESS the engine uses that daemon. PICTURES are JSON. Prints the answers' tokens and
ecd's counters.
"""

import asyncio
import json
import sys

from vllm import SamplingParams
from vllm.config import ECTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

from e2e.prompts import prompt


async def ask(engine: AsyncLLM, pictures: list[list[int]]) -> list[int]:
    sampling = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    parts = [prompt({"text": "what is in this picture?", "images": [each]}) for each in pictures]
    inputs = await engine.renderer.render_cmpl_async(parts)
    answered = asyncio.Event()
    said: list[int] = []

    async def come():
        for number, each in enumerate(inputs, 1):
            yield StreamingInput(prompt=each)
            while len(said) < 4 * number:
                answered.clear()
                await answered.wait()

    async for output in engine.generate(come(), sampling, "a session"):
        said += output.outputs[0].token_ids
        answered.set()
    return said


async def main(model: str, address: str, pictures: str) -> None:
    transfer = ECTransferConfig(
        ec_connector="EcdConnector",
        ec_connector_module_path="ecd_client.vllm",
        ec_role="ec_both",
        ec_connector_extra_config={"ecd_address": address, "ecd_load_timeout_s": 600},
    )
    arguments = AsyncEngineArgs(
        model=model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 4, "video": 0},
        ec_transfer_config=transfer if address else None,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    tokens = await ask(engine, json.loads(pictures))
    counted = {
        m.name.removeprefix("vllm:ecd_"): m.value
        for m in get_metrics_snapshot()
        if m.name.startswith("vllm:ecd_")
    }
    print("RESULT", json.dumps({"tokens": tokens, "counted": counted}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
