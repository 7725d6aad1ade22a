"""Kill swaps of a drafter's weights: python -m tests.swap_kills FOLDER KILLS."""

import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from jetdraft.learning.lessons import WeightSets
from jetdraft.train.learning import judged_weights, publish
from tests.kills import die

OLD, NEW, LATER = 1.0, 2.0, 3.0
OWN = "own"
STEPS: dict[str, tuple[bool, Callable[[WeightSets], object], set[object]]] = {
    "publish": (False, lambda sets: put(sets, NEW), {OLD, NEW}),
    "keep": (True, lambda sets: settle(sets, keep=True), {NEW}),
    "back": (True, lambda sets: settle(sets, keep=False), {NEW, OLD}),
    "clear": (True, WeightSets.clear, {NEW, OWN}),
}
"""For each step: whether new weights are on trial before it, the step, and what may
draft after a kill in it."""


def put(sets: WeightSets, value: float) -> str:
    arrays = {"matrix": np.full((64, 64), value, np.float32)}
    weights = {"weight": torch.full((64, 64), value)}
    name = publish(sets, arrays, weights, sets.read_choice().cleared)
    assert name is not None
    return name


def settle(sets: WeightSets, keep: bool) -> None:
    sets.settle(sets.read_choice().name, keep=keep)


def value(sets: WeightSets, name: str) -> object:
    arrays = sets.arrays(name)
    if not arrays:
        return OWN
    [only] = {float(x) for x in arrays["matrix"].flat}
    return only


def prepared(place: Path, on_trial: bool) -> WeightSets:
    place.mkdir()
    sets = WeightSets(place, "0" * 64)
    put(sets, OLD)
    settle(sets, keep=True)
    if on_trial:
        put(sets, NEW)
    return sets


def check(sets: WeightSets) -> object:
    choice = sets.read_choice()
    drafts = value(sets, choice.name)
    if choice.before is not None:
        value(sets, choice.before)
    judged_weights(sets)
    later = put(sets, LATER)
    assert value(sets, sets.read_choice().name) == LATER
    sets.settle(later, keep=True)
    left = sorted(f.name for f in sets.folder.iterdir())
    assert left == sorted([later, "choice.json", "lock"]), left
    return drafts


def kill(folder: Path, step: str, kills: int, draw: random.Random) -> dict[str, object]:
    on_trial, work, allowed = STEPS[step]
    calls, place = 1, folder / step
    sets = prepared(place, on_trial)
    profile: list[int] = []
    sys.setprofile(lambda frame, event, what: profile.append(event == "c_call"))
    work(sets)
    sys.setprofile(None)
    calls = sum(profile)
    shutil.rmtree(place)
    found: Counter[object] = Counter()
    for at in sorted(draw.sample(range(1, calls + 1), min(kills, calls))):
        sets = prepared(place, on_trial)
        die(lambda: work(sets), at)  # noqa: B023  # it is called at once
        found[check(sets)] += 1
        shutil.rmtree(place)
    assert set(found) <= allowed, found
    return {"calls": calls, "found": {str(k): n for k, n in found.items()}}


if __name__ == "__main__":
    os.fsync = lambda file: None
    torch.set_num_threads(1)
    draw = random.Random(0)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    print(json.dumps({step: kill(folder, step, kills, draw) for step in STEPS}))
