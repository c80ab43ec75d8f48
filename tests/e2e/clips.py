"""Writes short videos, in a vLLM environment, whose OpenCV makes them.

    python clips.py DIRECTORY COUNT RATE

Each has 40 frames of coarse blocks of random colors.
"""

import sys

import cv2
import numpy as np

FRAMES, SIDE, BLOCKS = 40, 56, 7


def write_clip(file: str, seed: int, rate: float) -> None:
    random = np.random.default_rng(seed)
    code = cv2.VideoWriter_fourcc(*"mp4v")
    writer = cv2.VideoWriter(file, code, rate, (SIDE, SIDE))
    assert writer.isOpened(), "this OpenCV writes no MPEG-4"
    for _ in range(FRAMES):
        blocks = random.integers(0, 256, (BLOCKS, BLOCKS, 3), dtype=np.uint8)
        writer.write(blocks.repeat(SIDE // BLOCKS, 0).repeat(SIDE // BLOCKS, 1))
    writer.release()


if __name__ == "__main__":
    for seed in range(int(sys.argv[2])):
        write_clip(f"{sys.argv[1]}/{seed}.mp4", seed, float(sys.argv[3]))
