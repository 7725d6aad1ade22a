"""An agent with three tools, which recalls how it answered similar requests.

    python examples/agent.py [BUNDLE] [--store FILE]

It asks for the same sensors in each of its rounds. From the second one on most of
what it writes, calls and answers, is drafted from what it wrote before, so that a pass
brings several tokens. A wrong draft costs time, never text. The toy calls the right
sensor, but is too small to read the number that comes back: a larger BUNDLE can.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jetdraft
from jetdraft.testing import toy_bundle

Schema = dict[str, Any]
Message = dict[str, Any]

SENSORS = {
    "battery": 80,
    "distance": 15,
    "light": 40,
    "pressure": 30,
    "speed": 20,
    "temperature": 21,
}
REQUESTS = ("What is the battery?", "Tell me the speed.", "How is the light?")
ROUNDS = 3
# A pass of the toy bundle is too short for a length that follows the clock to draft
# much. Leave num_draft_tokens out with a real model.
DRAFTS: dict[str, Any] = {"method": "recall", "num_draft_tokens": 8}


def read_sensor(sensor: str) -> Message:
    """A simulated reading, which is another one each time."""
    SENSORS[sensor] += 1
    return {sensor: SENSORS[sensor]}


def add(a: int, b: int) -> Message:
    """The sum."""
    return {"sum": a + b}


def clock() -> Message:
    """The time of day."""
    return {"time": time.strftime("%H:%M")}


def record(**properties: Schema) -> Schema:
    """The schema of an object that has these and nothing else."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# Bounded, so that every call ends.
NUMBER: Schema = {"type": "integer", "minimum": -9999, "maximum": 9999}
TOOLS: dict[str, tuple[Callable[..., Message], Schema]] = {
    "read_sensor": (read_sensor, record(sensor={"enum": list(SENSORS)})),
    "add": (add, record(a=NUMBER, b=NUMBER)),
    "clock": (clock, record()),
}
# A call that keeps to this needs no checking: the tool and its arguments exist.
CALL: Schema = {
    "anyOf": [
        record(name={"const": name}, arguments=arguments)
        for name, (_, arguments) in TOOLS.items()
    ]
}
# What the model is shown. In short, for the toy was trained on short prompts; a model
# of your own wants the whole schema as "parameters".
SHOWN = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                each: kind.get("type", "string")
                for each, kind in arguments["properties"].items()
            },
        },
    }
    for name, (_, arguments) in TOOLS.items()
]


class Agent:
    """Answers each request by one call of a tool; `stats` are those of all its texts.

    print(Agent(model).answer("What is the battery?"))
    """

    def __init__(self, model: jetdraft.Model) -> None:
        self.model = model
        self.stats = jetdraft.Stats(method="recall", exact=True, prompt_tokens=0)

    def answer(self, request: str) -> str:
        """A call, its result as a tool's message, and what the model makes of it."""
        said: list[Message] = [{"role": "user", "content": request}]
        call = json.loads(self._write(said, json_schema=CALL))
        found = self._use(call)
        print(f"  {request} {json.dumps(call)} -> {json.dumps(found)}")
        said.append({"role": "assistant", "tool_calls": [{"function": call}]})
        said.append({"role": "tool", "content": json.dumps(found)})
        return self._write(said)

    def _write(self, said: list[Message], **options: Any) -> str:
        """The model's next message."""
        prompt = self.model.chat_prompt(said, tools=SHOWN)
        result = self.model.generate(
            token_ids=prompt, max_new_tokens=96, **DRAFTS, **options
        )
        self.stats.merge(result.stats)
        return result.text

    def _use(self, call: Message) -> Message:
        """What a tool finds."""
        tool, _ = TOOLS[call["name"]]
        return tool(**call["arguments"])


def patrol(model: jetdraft.Model) -> None:
    """The same requests again and again, and what each round of them cost."""
    for number in range(1, ROUNDS + 1):
        agent = Agent(model)
        print(f"round {number}")
        for request in REQUESTS:
            print(f"    {agent.answer(request)}")
        stats = agent.stats
        print(
            f"  {stats.new_tokens} tokens in {stats.target_passes} passes: "
            f"{stats.tokens_per_pass:.1f} a pass, {stats.accepted_tokens} drafted"
        )


def main() -> None:
    """Patrol with a store that lasts as long as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--store", type=Path, help="default: one for this run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = given.store or Path(folder) / "said.sqlite"
        with jetdraft.load(given.bundle or toy_bundle(), store=store) as model:
            patrol(model)


if __name__ == "__main__":
    main()
