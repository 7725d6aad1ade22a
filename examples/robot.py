"""A robot that asks a model what to do next and never waits for it too long.

    python examples/robot.py [BUNDLE] [--ticks 8] [--period 0.25] [--simulate]

Every tick ends with an action: the model's where it was whole in time, else STOP. When
the bumper is hit the robot stops at once and the model is interrupted. A pass that
takes longer than a tick costs the next ticks their answers, never their time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jetdraft
from jetdraft.testing import toy_bundle

Action = dict[str, Any]

# Bounded everywhere: what max_new_tokens cuts off is no JSON.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "action": {"enum": ["forward", "left", "right", "stop"]},
        "speed": {"type": "integer", "minimum": 0, "maximum": 5},
        "why": {"type": "string", "minLength": 24, "maxLength": 48},
    },
    "required": ["action", "speed", "why"],
    "additionalProperties": False,
}
STOP: Action = {"action": "stop", "speed": 0, "why": "there is no answer of the model"}
SHARE = 0.8
"""Of a tick, for the model: it ends between passes, so the last one needs room."""
WALL = 3
"""The tick in which this simulated robot hits one."""


@dataclass(frozen=True)
class Decision:
    """What the robot does, and because of whom or what."""

    action: Action
    by: str


class Brain:
    """Asks a model, one question at a time, for at most `seconds` each."""

    def __init__(self, model: jetdraft.Model, seconds: float) -> None:
        self.model, self.seconds = model, seconds
        self.speaking = asyncio.Event()
        self.ends: Counter[str] = Counter()
        self._stream: jetdraft.AsyncStream | None = None
        # The first constraint reads the whole vocabulary; no tick has time for that.
        model.generate("Warm up", json_schema=SCHEMA, max_new_tokens=1)

    async def ask(self, prompt: str) -> Decision:
        """The model's action, or STOP where it did not come to its end."""
        text = ""
        async with self.model.astream(
            prompt, json_schema=SCHEMA, max_seconds=self.seconds, max_new_tokens=200
        ) as self._stream:
            async for piece in self._stream:
                text += piece.text
                self.speaking.set()
        self.speaking.clear()
        reason = self._stream.stats.finish_reason
        self.ends[reason] += 1
        # Any other end than "stop" leaves half an object.
        whole = reason == "stop"
        return Decision(json.loads(text), "model") if whole else Decision(STOP, reason)

    def interrupt(self) -> None:
        """End what is being said at its next pass; any thread may call this."""
        if self._stream is not None:
            self._stream.cancel()


class Robot:
    """Acts once in every `period` seconds, whatever the model does."""

    def __init__(self, brain: Brain, period: float, simulated: bool = False) -> None:
        self.brain, self.period, self.simulated = brain, period, simulated
        self.bumped = asyncio.Event()
        self.decisions: list[Decision] = []
        self._thinking: asyncio.Task[Decision] | None = None
        self._wall: asyncio.Task[None] | None = None

    async def run(self, ticks: int) -> None:
        """Tick by tick; each has its own time from the start, so none drifts."""
        start = time.monotonic()
        for tick in range(ticks):
            until = start + (tick + 1) * self.period
            if tick == WALL:
                self._wall = asyncio.create_task(self._hit_a_wall())
            decision = await self.decide(sensors(tick), until - time.monotonic())
            self.decisions.append(decision)
            print(f"tick {tick} {decision.by}: {json.dumps(decision.action)}")
            await self._rest(until)
        await self._settle()
        if self._wall is not None:
            self._wall.cancel()  # if the model never came to speak

    async def decide(self, prompt: str, seconds: float) -> Decision:
        """An action after at most `seconds`, and at once when the bumper is hit."""
        if self._thinking is not None and not self._thinking.done():
            return Decision(STOP, "busy")
        self._thinking = asyncio.create_task(self.brain.ask(prompt))
        hit = asyncio.create_task(self.bumped.wait())
        waited = {self._thinking, hit}
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hit.cancel()
        if self.bumped.is_set():
            self.bumped.clear()
            return Decision(STOP, "bumper")
        done = self._thinking.done()
        return self._thinking.result() if done else Decision(STOP, "late")

    def bump(self) -> None:
        """Called by the bumper: stop now, what the model says is void."""
        self.brain.interrupt()
        self.bumped.set()

    async def _hit_a_wall(self) -> None:
        """Where it shows: while the model speaks."""
        await self.brain.speaking.wait()
        self.bump()

    async def _rest(self, until: float) -> None:
        """To the end of the tick; a simulated clock jumps there."""
        if self.simulated:
            await self._settle()
        else:
            await asyncio.sleep(max(0.0, until - time.monotonic()))

    async def _settle(self) -> None:
        """Until the model is free."""
        if self._thinking is not None:
            await asyncio.wait({self._thinking})


def sensors(tick: int) -> str:
    """What the model is told."""
    return f"Distance {30 - 3 * tick} meters, battery {80 - tick} percent. Next: "


async def main() -> None:
    """Drive, and say who decided."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--ticks", type=int, default=8)
    parser.add_argument("--period", type=float, default=0.25, help="seconds a tick")
    parser.add_argument("--simulate", action="store_true", help="wait for no tick")
    given = parser.parse_args()
    with jetdraft.load(given.bundle or toy_bundle(), threads=1) as model:
        robot = Robot(Brain(model, SHARE * given.period), given.period, given.simulate)
        await robot.run(given.ticks)
    decided = Counter(decision.by for decision in robot.decisions)
    print("decided by", dict(decided), "texts ended by", dict(robot.brain.ends))


if __name__ == "__main__":
    asyncio.run(main())
