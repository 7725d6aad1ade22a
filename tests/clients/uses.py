"""Requests of other people's clients, in the environment of each: CLIENT ADDRESS."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

CLIENT, ADDRESS = sys.argv[1:]
WAY = {"base_url": f"{ADDRESS}/v1", "api_key": "none"}
HELLO = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello, I am a toy robot."
ASK = [{"role": "user", "content": "What is the temperature?"}]
ANN = "Give me Ann as JSON."
ASK_ANN = [{"role": "user", "content": ANN}]
TEXT = "The robot sees"
CHOICES = {"type": "object", "properties": {"sensor": {"enum": ["left", "right"]}}}
CHOICES |= {"required": ["sensor"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "read_sensor", "parameters": CHOICES}}


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=99)


def refusal(kind: type[Any], ask: Callable[..., object], **fields: Any) -> Any:
    try:
        ask(**fields)
    except kind as error:
        return error
    raise AssertionError("it was not refused")


def read_sensor(sensor: Literal["left", "right"]) -> str:
    """Read a sensor."""
    return f"{sensor}: 7"


def use_openai() -> None:
    import openai

    client = openai.OpenAI(**WAY)
    greedy = {"model": "toy", "temperature": 0}
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).owned_by == "jetdraft"
    chats = client.chat.completions
    said = chats.create(**greedy, messages=HELLO, store=True, n=2)
    assert [choice.message.content for choice in said.choices] == [ANSWER] * 2
    hint = {"type": "content", "content": ANSWER}
    assert chats.create(**greedy, messages=HELLO, prediction=hint).choices
    with chats.stream(**greedy, messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    called = chats.create(**greedy, messages=ASK, tools=[TOOL]).choices[0].message
    [call] = called.tool_calls
    turns = [*ASK, called, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    said = chats.create(**greedy, messages=turns, tools=[TOOL])
    assert said.choices[0].message.content
    parsed = chats.parse(**greedy, messages=ASK_ANN, response_format=Person)
    assert parsed.choices[0].message.parsed.name == "Ann"
    texts = client.completions.create(**greedy, prompt=["The robot", "A"])
    assert texts.choices[1].text
    _use_responses(client.responses, greedy, openai.BadRequestError)


def _use_responses(answers: Any, greedy: dict[str, Any], error: type[Any]) -> None:
    assert answers.create(**greedy, input="Hello").output_text == ANSWER
    with answers.stream(**greedy, input="Hello") as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == ANSWER == stream.get_final_response().output_text
    assert answers.parse(**greedy, input=ANN, text_format=Person).output_parsed.age == 7
    tool = {"type": "function", **TOOL["function"], "strict": True}
    [item] = answers.create(**greedy, input=ASK, tools=[tool]).output
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
    turns = [*ASK, item, output]
    assert answers.create(**greedy, input=turns, tools=[tool]).output_text
    with answers.stream(**greedy, input=ASK, tools=[tool]) as stream:
        assert stream.get_final_response().output[0].arguments == item.arguments
    wrong = {"model": "toy", "input": "a", "previous_response_id": "r"}
    assert refusal(error, answers.create, **wrong).param == "previous_response_id"


def use_anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=ADDRESS, api_key="none")
    chats = client.messages
    greedy = {"model": "toy", "max_tokens": 90, "extra_body": {"temperature": 0}}
    assert client.models.list().data[0].display_name == "toy"
    said = chats.create(**greedy, messages=HELLO, system="Be brief.")
    assert (said.content[0].text, said.stop_reason) == (ANSWER, "end_turn")
    assert said.usage.output_tokens > 3
    with chats.stream(**greedy, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.input_tokens > 0
    tool = {"name": "read_sensor", "input_schema": CHOICES}
    with chats.stream(**greedy, messages=ASK, tools=[tool]) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    [use] = called.content
    assert use.input["sensor"] in ("left", "right")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "7"}
    called = {"role": "assistant", "content": called.content}
    turns = [*ASK, called, {"role": "user", "content": [result]}]
    assert chats.create(**greedy, messages=turns, tools=[tool]).content[0].text
    parsed = chats.parse(**greedy, messages=ASK_ANN, output_format=Person)
    assert parsed.parsed_output.name == "Ann"
    other = {"model": "other", "max_tokens": 9, "messages": HELLO}
    error = refusal(anthropic.NotFoundError, chats.create, **other)
    assert error.body["error"]["type"] == "not_found_error"


def use_ollama() -> None:
    import ollama

    client = ollama.Client(host=ADDRESS)
    greedy = {"model": "toy", "options": {"temperature": 0, "num_ctx": 512}}
    assert client.list().models[0].model == "toy"
    assert client.show("toy").modelinfo["jetdraft.context_length"] == 512
    assert client.ps().models
    said = client.chat(**greedy, messages=HELLO, keep_alive="5m")
    assert (said.message.content, said.done_reason) == (ANSWER, "stop")
    assert said.eval_duration > 0
    parts = list(client.chat(**greedy, messages=HELLO, stream=True))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert [part.done for part in parts[-2:]] == [False, True]
    called = client.chat(**greedy, messages=ASK, tools=[read_sensor]).message
    [_] = called.tool_calls
    turns = [*ASK, called, {"role": "tool", "tool_name": "read_sensor", "content": "7"}]
    said = client.chat(**greedy, messages=turns, tools=[read_sensor])
    assert said.message.content
    found = client.chat(**greedy, messages=ASK_ANN, format=Person.model_json_schema())
    assert Person.model_validate_json(found.message.content).name == "Ann"
    assert client.generate(**greedy, prompt="Hello").response == ANSWER
    texts = client.generate(**greedy, prompt=TEXT, raw=True, stream=True)
    assert "".join(part.response for part in texts)
    other = {"model": "other", "messages": HELLO}
    error = refusal(ollama.ResponseError, client.chat, **other)
    assert error.status_code == 404
    assert "other" in error.error


def use_langchain_openai() -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    for new in (False, True):
        chat = ChatOpenAI(model="toy", temperature=0, use_responses_api=new, **WAY)
        assert chat.invoke("Hello").text == ANSWER
        assert "".join(part.text for part in chat.stream("Hello")) == ANSWER
        question = ASK[0]["content"]
        for choice in ("auto", "any"):
            bound = chat.bind_tools([read_sensor], tool_choice=choice)
            assert bound.invoke(question).tool_calls or choice == "auto"
        for method in ("json_schema", "function_calling", *["json_mode"] * (not new)):
            form = chat.with_structured_output(Person, method=method)
            assert form.invoke(ANN).name == "Ann", method
    texts = OpenAI(model="toy", temperature=0, max_tokens=8, **WAY)
    assert len(texts.batch([TEXT, "A man takes"])) == 2
    assert texts.generate([TEXT, "A man takes"]).generations[1][0].text
    assert "".join(texts.stream(TEXT))


def use_llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    way = {"model": "toy", "api_base": f"{ADDRESS}/v1", "api_key": "none"}
    way |= {"context_window": 512, "temperature": 0.0}
    chat = OpenAILike(**way, is_chat_model=True, is_function_calling_model=True)
    hello = [ChatMessage(role="user", content="Hello")]
    assert chat.chat(hello).message.content == ANSWER
    assert "".join(part.delta for part in chat.stream_chat(hello)) == ANSWER
    tool = FunctionTool.from_defaults(fn=read_sensor)
    assert chat.chat_with_tools([tool], ASK[0]["content"]).message
    assert chat.structured_predict(Person, PromptTemplate(ANN)).name == "Ann"
    texts = OpenAILike(**way, is_chat_model=False, max_tokens=8)
    assert texts.complete(TEXT).text
    assert "".join(part.delta for part in texts.stream_complete(TEXT))


def use_litellm() -> None:
    import litellm

    bases = {"openai/toy": f"{ADDRESS}/v1", "anthropic/toy": ADDRESS}
    for model, base in {**bases, "ollama_chat/toy": ADDRESS}.items():
        way = {"model": model, "api_base": base, "api_key": "none", "temperature": 0}
        way["max_tokens"] = 90
        said = litellm.completion(**way, messages=HELLO)
        assert said.choices[0].message.content == ANSWER, model
        parts = litellm.completion(**way, messages=HELLO, stream=True)
        assert "".join(p.choices[0].delta.content or "" for p in parts) == ANSWER, model
        called = litellm.completion(**way, messages=ASK, tools=[TOOL])
        assert called.choices[0].message.tool_calls, model
        found = litellm.completion(**way, messages=ASK_ANN, response_format=Person)
        assert Person.model_validate_json(found.choices[0].message.content), model
    way = {"model": "openai/toy", "api_base": f"{ADDRESS}/v1", "api_key": "none"}
    assert litellm.responses(**way, input="Hello", temperature=0).output
    assert litellm.text_completion(**way, prompt=TEXT).choices[0].text


def use_instructor() -> None:
    import instructor
    from openai import OpenAI

    way = {"model": "toy", "messages": ASK_ANN, "temperature": 0, "max_retries": 0}
    for mode in ("TOOLS", "JSON_SCHEMA"):
        client = instructor.from_openai(OpenAI(**WAY), mode=instructor.Mode[mode])
        found = client.chat.completions.create(**way, response_model=Person)
        assert found.name in ("Ann", "Bob"), mode
    client = instructor.from_openai(OpenAI(**WAY))
    *_, last = client.chat.completions.create_partial(**way, response_model=Person)
    assert last.name in ("Ann", "Bob")


def use_openai_agents() -> None:
    asyncio.run(_use_agents())


async def _use_agents() -> None:
    import agents
    from agents import Agent, Runner
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    for api in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        way = {
            "name": "toy",
            "model": api("toy", AsyncOpenAI(**WAY)),
            "model_settings": agents.ModelSettings(temperature=0, max_tokens=90),
        }
        assert (await Runner.run(Agent(**way), "Hello")).final_output == ANSWER
        stream = Runner.run_streamed(Agent(**way), "Hello")
        kinds = {event.type async for event in stream.stream_events()}
        assert stream.final_output == ANSWER
        assert "raw_response_event" in kinds
        agent = Agent(**way, tools=[agents.function_tool(read_sensor)])
        found = await Runner.run(agent, ASK[0]["content"], max_turns=4)
        assert "tool_call_output_item" in {item.type for item in found.new_items}
        assert found.final_output
        person = Agent(**way, output_type=Person)
        assert (await Runner.run(person, ANN)).final_output.name == "Ann"


globals()[f"use_{CLIENT.replace('-', '_')}"]()
