"""Agents with both APIs: answers, streams, a tool and a form."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import ANN, ANSWER, ASK, WAY, Person, read_sensor
from openai import AsyncOpenAI


async def main() -> None:
    set_tracing_disabled(True)
    for api in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        way = {
            "name": "toy",
            "model": api("toy", AsyncOpenAI(**WAY)),
            "model_settings": ModelSettings(temperature=0, max_tokens=90),
        }
        assert (await Runner.run(Agent(**way), "Hello")).final_output == ANSWER
        stream = Runner.run_streamed(Agent(**way), "Hello")
        kinds = {event.type async for event in stream.stream_events()}
        assert stream.final_output == ANSWER
        assert "raw_response_event" in kinds
        agent = Agent(**way, tools=[function_tool(read_sensor)])
        found = await Runner.run(agent, ASK[0]["content"], max_turns=4)
        assert "tool_call_output_item" in {item.type for item in found.new_items}
        assert found.final_output
        person = Agent(**way, output_type=Person)
        assert (await Runner.run(person, ANN)).final_output.name == "Ann"


asyncio.run(main())
