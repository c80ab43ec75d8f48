"""Writes short videos, in a vLLM environment, whose OpenCV makes them.

    python clips.py DIRECTORY COUNT RATE [FRAMES WIDTH HEIGHT]

Each has 40 frames of 56x56 unless others are asked for, of coarse blocks of random colors.
"""

import sys

import cv2
import numpy as np

FRAMES, SIDE, BLOCKS = 40, 56, 7


def write_clip(
    file: str, seed: int, rate: float, frames: int = FRAMES, width: int = SIDE, height: int = SIDE
) -> None:
    random = np.random.default_rng(seed)
    code = cv2.VideoWriter_fourcc(*"mp4v")
    writer = cv2.VideoWriter(file, code, rate, (width, height))
    assert writer.isOpened(), "this OpenCV writes no MPEG-4"
    for _ in range(frames):
        blocks = random.integers(0, 256, (BLOCKS, BLOCKS, 3), dtype=np.uint8)
        writer.write(blocks.repeat(height // BLOCKS, 0).repeat(width // BLOCKS, 1))
    writer.release()


if __name__ == "__main__":
    for seed in range(int(sys.argv[2])):
        size = map(int, sys.argv[4:])
        write_clip(f"{sys.argv[1]}/{seed}.mp4", seed, float(sys.argv[3]), *size)
