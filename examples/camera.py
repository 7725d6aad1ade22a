"""One question about each frame of a camera, with an answer in JSON.

    python examples/camera.py BUNDLE [--frames 8] [--camera 0] [--ask "What is seen?"]

BUNDLE is of a model that reads images (docs/images.md). Without --camera the frames are
made: a box of some colour. With it OpenCV reads them (pip install opencv-python). While
a text is written, a thread encodes the next frame.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

import jetdraft

Frame = npt.NDArray[np.uint8]
COLOURS = {"red": (220, 30, 30), "green": (30, 190, 60), "blue": (40, 70, 220)}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": [*COLOURS, "other"]},
        "seen": {"type": "string", "maxLength": 40},
    },
    "required": ["colour", "seen"],
    "additionalProperties": False,
}


def made_frames() -> Iterator[Frame]:
    """Boxes on grey, uint8 [240, 320, 3], in turn in each colour."""
    random = np.random.default_rng(0)
    while True:
        for colour in COLOURS.values():
            frame = np.full((240, 320, 3), 128, np.uint8)
            top, left = random.integers(0, (120, 160))
            frame[top : top + 100, left : left + 140] = colour
            yield frame


def camera_frames(number: int) -> Iterator[Frame]:
    """The frames of a camera, until it gives none."""
    import cv2  # type: ignore[import-not-found, unused-ignore]

    camera = cv2.VideoCapture(number)
    while (read := camera.read())[0]:
        yield np.ascontiguousarray(read[1][..., ::-1])  # OpenCV has blue first


def answer(model: jetdraft.Model, frame: Frame, question: str) -> jetdraft.Result:
    """What the model says of a frame, as JSON of the schema."""
    parts = [{"type": "image", "image": frame}, {"type": "text", "text": question}]
    ask = [{"role": "user", "content": parts}]
    return model.chat(ask, max_new_tokens=96, json_schema=SCHEMA)


def main() -> None:
    """Ask about each frame, and encode the next frame meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--camera", type=int)
    parser.add_argument("--ask", default="Which colour has the box? Answer in JSON.")
    given = parser.parse_args()
    count = given.frames + 1  # The last frame is encoded only.
    frames = made_frames() if given.camera is None else camera_frames(given.camera)
    with jetdraft.load(given.bundle) as model, ThreadPoolExecutor(1) as thread:
        for number, (frame, following) in enumerate(pairwise(islice(frames, count))):
            start = time.perf_counter()
            ahead = thread.submit(model.encode_image, following)
            result = answer(model, frame, given.ask)
            ahead.result()
            ms, drafted = 1e3 * (time.perf_counter() - start), sum(result.from_draft)
            line = {"frame": number, "text": result.text, "drafted": drafted}
            print(json.dumps({**line, "ms": round(ms)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
