"""Has vLLM lay out the workers of engines, and each tell its number. In a vLLM environment.

Prints, for each layout, the numbers that the workers of the first pipeline stage of each engine
report under, and how many the scheduler listens to, as JSON. vLLM makes the groups, as in the
process of each worker in turn; none is started.
"""

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from ecd_client.vllm.base.reports import loading_ranks
from ecd_client.vllm.worker.worker import WorkerRole

SIZES = "tensor", "pipeline", "prefill_context", "decode_context", "data"
LAYOUTS = [
    *((1, 1, 1, 1, 1), (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), (2, 2, 1, 1, 2)),
    *((4, 1, 1, 2, 1), (4, 2, 1, 4, 1)),
    *((1, 1, 2, 1, 1), (2, 2, 2, 1, 1), (2, 1, 4, 4, 1), (2, 2, 2, 4, 1)),
]

CONFIG = VllmConfig()


class Group:
    """A worker's group in one dimension of a layout."""

    def __init__(self, ranks: list[list[int]], rank: int) -> None:
        [group] = [each for each in ranks if rank in each]
        self.world_size, self.rank_in_group = len(group), group.index(rank)

    def destroy(self) -> None:
        pass


def place_of(rank: int, parallel: ParallelConfig) -> tuple[int, int, int]:
    """The worker's engine, its pipeline stage, and the number that it would report under."""
    world = parallel.world_size * parallel.data_parallel_size
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    state: Any = parallel_state
    state.get_world_group = lambda: SimpleNamespace(local_rank=rank)
    state.init_model_parallel_group = lambda ranks, *_, **__: Group(ranks, rank)
    CONFIG.parallel_config = parallel
    with set_current_vllm_config(CONFIG):
        state.initialize_model_parallel(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
            "fake",
        )
    worker = object.__new__(WorkerRole)
    worker._rank = None
    engine, stage = state.get_dp_group().rank_in_group, state.get_pp_group().rank_in_group
    found = engine, stage, worker._loading_rank()
    state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return found


done = {}
for sizes in LAYOUTS:
    told = {f"{name}_parallel_size": size for name, size in zip(SIZES, sizes, strict=True)}
    parallel = ParallelConfig(**told)
    numbers: dict[int, list[int]] = defaultdict(list)
    for rank in range(parallel.world_size * parallel.data_parallel_size):
        engine, stage, number = place_of(rank, parallel)
        if stage == 0:
            numbers[engine].append(number)
    listens = loading_ranks(parallel)
    done[" ".join(map(str, sizes))] = [sorted(each) for each in numbers.values()], listens
print("RESULT", json.dumps(done))
