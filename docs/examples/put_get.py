"""Store a tensor and read it back. Needs a running daemon: `ecd serve`."""

import torch

from ecd_client import Client, EcdError

embedding = torch.randn(192, 128).bfloat16()

with Client(namespace="my-model") as client:
    try:
        stored = client.put(
            "a-content-hash", embedding, cost=0.05, metadata=b'{"grid": [1, 24, 32]}'
        )
    except EcdError as error:  # a full pool, a daemon that is away: go on without
        stored = False
        print(error)
    print("stored" if stored else "was there already")

    item = client.get("a-content-hash", timeout=1.0)  # wait up to a second for somebody to store it
    if item is None:
        print("a miss: encode it")
    else:
        with item:  # the bytes stay what they are until here ends
            print(item.dtype, item.shape, item.metadata)
            view = item.tensor  # zero copy, for reading only
            assert torch.equal(view, embedding)
            mine = item.to("cpu")  # a private copy; "cuda" works as well
    print(client.contains(["a-content-hash", "another"]))

    futures = [client.put_async(f"image-{i}", torch.full((4, 4), i)) for i in range(3)]
    print([future.result(timeout=10) for future in futures])
