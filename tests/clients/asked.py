"""What the scripts ask; each runs in the environment of its client, with an address."""

import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

ADDRESS = sys.argv[1]
WAY = {"base_url": f"{ADDRESS}/v1", "api_key": "none"}
HELLO = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello, I am a toy robot."
ASK = [{"role": "user", "content": "What is the temperature?"}]
ANN = "Give me Ann as JSON."
CHOICES = {"type": "object", "properties": {"sensor": {"enum": ["left", "right"]}}}
CHOICES |= {"required": ["sensor"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "read_sensor", "parameters": CHOICES}}


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=99)


def refusal(kind: type[Any], ask: Callable[[], object]) -> Any:
    """The error of a request that is refused."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError("it was not refused")


def read_sensor(sensor: Literal["left", "right"]) -> str:
    """Read a sensor."""
    return f"{sensor}: 7"
