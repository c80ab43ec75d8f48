"""What a connector costs vLLM's scheduler, for each item: ecd beside the example connector.

    python benchmarks/connector.py [--rounds N] [--output FILE.md]

The calls that a scheduler makes for a request, from its arrival to its end, on the real connector
classes in vLLM's environment, with a real daemon; what the worker does is not in it. Each round
takes one request with so many items, all stored or none. Needs `make vllm`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from common import MIB, end_daemon, report, start_daemon
from peers import EXAMPLE, run_for

from ecd_client import Client

ITEMS = (1, 8, 32)
STORED = 64
"""Items that are there; a round takes the next ones."""
TOKENS, WIDTH = 64, 128
NAMESPACE = "connector"
PIXELS = {"pixel_values": SimpleNamespace(data=b"")}
"""The media of an item, which no call reads."""
Request = Any


def request_of(number: int, identifiers: list[str]) -> Request:
    features = []
    for index, identifier in enumerate(identifiers):
        position = SimpleNamespace(
            offset=index * TOKENS, length=TOKENS, get_num_embeds=lambda: TOKENS
        )
        features.append(
            SimpleNamespace(
                identifier=identifier, modality="image", data=PIXELS, mm_position=position
            )
        )
    return SimpleNamespace(
        request_id=f"request-{number}",
        mm_features=features,
        num_preemptions=0,
        ec_transfer_params=None,
        get_num_encoder_embeds=lambda index: TOKENS,
    )


def connector_of(name: str, place: str) -> Any:
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    if name == EXAMPLE:
        from vllm.distributed.ec_transfer.ec_connector.example_connector import (
            ECExampleConnector as Connector,
        )

        extra = {"shared_storage_path": place}
    else:
        from ecd_client.vllm import EcdConnector as Connector

        extra = {"ecd_address": place, "ecd_namespace": NAMESPACE}
    config = SimpleNamespace(
        ec_transfer_config=ECTransferConfig(
            ec_connector=name.split()[-1],
            ec_role="ec_consumer",
            ec_connector_extra_config=extra,
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            dtype="torch.float32",
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=4, video_pruning_rate=None),
            hf_config=SimpleNamespace(),
            get_inputs_embeds_size=lambda: WIDTH,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        lora_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    return Connector(config, ECConnectorRole.SCHEDULER)


def steps(connector: Any, request: Request, hit: bool) -> tuple[float, float]:
    """What a scheduler calls for one request, in vLLM's order.

    Seconds in the step that schedules it, the longest, and in all of them.
    """
    started_s = time.perf_counter()
    assert connector.ensure_cache_available(request, 0)
    for index, feature in enumerate(request.mm_features):
        assert connector.has_cache_item(feature.identifier) == hit
        connector.update_state_after_alloc(request, index)
    metadata = connector.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=1))
    scheduled_s = time.perf_counter()
    if hasattr(metadata, "loads"):  # ecd's: its leases end when the only rank reports them
        done = {f"0/{load.id}" for load in metadata.loads}
        reported = SimpleNamespace(finished_recving=done, ec_connector_worker_meta=None)
        connector.update_connector_output(reported)
    connector.request_finished(request)
    return scheduled_s - started_s, time.perf_counter() - started_s


def work(name: str, place: str, rounds: int) -> dict[str, float]:
    """Microseconds for each item, by items of a request and whether they are stored."""
    connector = connector_of(name, place)
    took: dict[str, list[float]] = {}
    number = 0
    for _ in range(rounds):
        for items in ITEMS:
            for hit in (True, False):
                number += 1
                prefix = "stored" if hit else f"none-{number}"
                keys = [f"{prefix}-{(number + index) % STORED}" for index in range(items)]
                request = request_of(number, keys)
                way = f"{items} {'stored' if hit else 'missing'}"
                step_s, all_s = steps(connector, request, hit)
                took.setdefault(f"step|{way}", []).append(step_s / items * 1e6)
                took.setdefault(f"all|{way}", []).append(all_s / items * 1e6)
    connector.shutdown()
    return {way: median(values) for way, values in took.items()}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds; the medians are shown.")] = 200,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ecd-bench-") as name:
        directory = Path(name)
        daemon, address = start_daemon(directory, "ecd", 256 * MIB)
        try:
            tensor = torch.zeros(TOKENS, WIDTH)
            with Client(address, namespace=NAMESPACE) as client:
                for index in range(STORED):
                    client.put(f"stored-{index}", tensor)
                    file = directory / f"stored-{index}" / "encoder_cache.safetensors"
                    file.parent.mkdir()
                    file.touch()
                results["ecd"] = run_for(
                    EXAMPLE, "connector", "work", "EcdConnector", address, rounds
                )
                results[EXAMPLE] = run_for(
                    EXAMPLE, "connector", "work", EXAMPLE, str(directory), rounds
                )
        finally:
            end_daemon(daemon)
    ways = [f"{items} {what}" for items in ITEMS for what in ("stored", "missing")]
    rows = [["items of a request", *ways]]
    for name, took in results.items():
        for part, text in (("step", "the step that schedules it"), ("all", "from arrival to end")):
            figures = (f"{took[f'{part}|{way}']:.1f} us" for way in ways)
            rows.append([f"{name}, {text}", *figures])
    title = "The scheduler's calls for one item, medians."
    report(title, rows, output, width=120)


if __name__ == "__main__":
    typer.run(main)
