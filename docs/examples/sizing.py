"""How large entries are: rows (tokens) of an image, times the values in a row, times 2 bytes.

`docs/reference.py` writes both tables into docs/sizing.md.
"""

from __future__ import annotations

from itertools import accumulate
from math import ceil
from pathlib import Path

MODELS = {  # pixels of a row's side, or a fixed number of rows; values in a row
    "Qwen2.5-VL-3B": (28, 0, 2048),
    "Qwen2.5-VL-7B": (28, 0, 3584),
    "Qwen2.5-VL-72B": (28, 0, 8192),
    "Qwen3-VL-8B": (32, 0, 4 * 4096),  # the row itself and three DeepStack levels
    "LLaVA-1.5-7B": (0, 576, 4096),
    "Gemma-3-27B": (0, 256, 5376),
}
IMAGES = ((448, 448), (896, 896), (1920, 1080))
SERVEGEN = Path(__file__).parents[2] / "benchmarks" / "servegen_image_tokens.csv"


def rows(side: int, fixed: int, width_px: int, height_px: int) -> int:
    """Rows of an image whose sides the processor rounds to multiples of `side`."""
    return fixed or round(width_px / side) * round(height_px / side)


def entry_bytes(model: str, image_rows: int) -> int:
    return image_rows * MODELS[model][2] * 2


def servegen() -> tuple[int, int, int]:
    """Rows of an image in production, by ServeGen: mean, median, 99th percentile."""
    lines = [one for one in SERVEGEN.read_text().splitlines() if not one.startswith("#")]
    shares = dict(tuple(map(int, one.split(","))) for one in lines)
    total = sum(shares.values())
    sums = list(accumulate(shares.values()))
    at = [next(r for r, s in zip(shares, sums, strict=True) if s >= p * total) for p in (0.5, 0.99)]
    return round(sum(r * n for r, n in shares.items()) / total), *at


def size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def entries() -> str:
    """The sizes of entries."""
    rows_of = {
        model: [*(rows(side, fixed, *image) for image in IMAGES), fixed or servegen()[0]]
        for model, (side, fixed, _) in MODELS.items()
    }
    heads = ["model", *(f"{w} x {h}" for w, h in IMAGES), "ServeGen's mean image"]
    lines = [[m, *(size(entry_bytes(m, n)) for n in found)] for m, found in rows_of.items()]
    return table(heads, lines)


def pool_gib(images_a_day: int, model: str, hours: float = 1, busiest: float = 2) -> int:
    """GiB that hold every new image for `hours`, at `busiest` times the day's mean rate."""
    return ceil(images_a_day / 24 * busiest * hours * entry_bytes(model, servegen()[0]) / 2**30)


def pools() -> str:
    """The sizes of pools that hold ServeGen's images for an hour."""
    models = ["Qwen2.5-VL-7B", "Qwen3-VL-8B"]
    lines = [
        [f"{images:,}", *(f"{pool_gib(images, model):,} GiB" for model in models)]
        for images in (20_000, 100_000, 1_000_000)
    ]
    return table(["new images a day", *models], lines)


def table(heads: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(one)} |\n" for one in (heads, ["---"] * len(heads), *lines))


if __name__ == "__main__":
    print(entries(), pools(), sep="\n")
    print("ServeGen's images, in rows: mean, median, 99th percentile:", *servegen())
