"""Every answer, field by field, against the models of OpenAI's own client."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import BaseModel
from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types import chat as module
from openai.types.audio import Transcription, TranscriptionSegment, TranscriptionVerbose
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from openai.types.shared import ErrorObject

from jetdraft import Pool, Result, Stats
from jetdraft.server import Limits, app, reply
from jetdraft.server.generation_request import GenerationRequest
from tests import whispers
from tests.server.serving import served
from tests.server.test_api import HELLO, PROMPT, READ_SENSOR

WHOLE = "id choices created model object system_fingerprint "
TOKEN = "token logprob bytes "
ALWAYS = {
    module.ChatCompletion: WHOLE + "service_tier usage",
    module.chat_completion.Choice: "finish_reason index message logprobs",
    module.chat_completion.ChoiceLogprobs: "content refusal",
    module.ChatCompletionMessage: "role content refusal",
    module.ChatCompletionTokenLogprob: TOKEN + "top_logprobs",
    TopLogprob: TOKEN,
    module.ChatCompletionChunk: WHOLE + "service_tier",
    module.chat_completion_chunk.Choice: "delta finish_reason index logprobs",
    module.chat_completion_chunk.ChoiceLogprobs: "content refusal",
    module.chat_completion_chunk.ChoiceDeltaToolCall: "index function",
    module.chat_completion_chunk.ChoiceDeltaToolCallFunction: "arguments",
    Completion: WHOLE,
    CompletionChoice: "finish_reason index logprobs text",
    Logprobs: "text_offset token_logprobs tokens top_logprobs",
    CompletionUsage: "prompt_tokens completion_tokens total_tokens "
    "prompt_tokens_details completion_tokens_details",
    CompletionTokensDetails: "accepted_prediction_tokens rejected_prediction_tokens "
    "audio_tokens reasoning_tokens",
    PromptTokensDetails: "cached_tokens audio_tokens",
    Model: "id created object owned_by",
    ErrorObject: "code message param type",
    Transcription: "text usage",
    TranscriptionVerbose: "language duration text segments usage",
    TranscriptionSegment: "id seek start end text tokens temperature avg_logprob "
    "compression_ratio no_speech_prob",
}
"""Fields that the reference requires, or shows in each of its examples."""

TOOL_CALL = {"tools": [READ_SENSOR], "tool_choice": "required", "seed": 1}
NEVER_DONE = {"max_tokens": 2, "ignore_eos": True}
CHATS = {"stop": {}, "length": NEVER_DONE, "tool_calls": TOOL_CALL}
CHATS |= {"logprobs": {"logprobs": True, "top_logprobs": 2}}
CHATS |= {"logprobs of a call": {**TOOL_CALL, "logprobs": True}}
CHATS |= {"drafted": {"include_drafted": True}}
TEXTS = {
    "length": {},
    "stop": {"stop": ["."], "max_tokens": 100},
    "logprobs": {"logprobs": 2},
    "drafted": {"include_drafted": True},
    "characters of several tokens": {"regex": "[é😀]{9}", "logprobs": 1},
}


def parts(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        value = dict(value)
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        yield from parts(item)


def checked(kind: type[BaseModel], data: dict, ours: str = "") -> BaseModel:
    answer = kind.model_validate(data, strict=True)
    for part in parts(answer):
        extra, fields = set(part.model_extra or {}), part.model_fields_set
        assert extra <= {*ours.split()}, (type(part), extra)
        missing = {*ALWAYS.get(type(part), "").split()} - fields
        assert not missing, (type(part), missing)
    return answer


def ours_of(body: dict) -> str:
    return "tokens" if body.get("include_drafted") else ""


def post(address, path, body) -> dict:
    answer = httpx.post(f"{address}/v1/{path}", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(address, path, body, usage: bool) -> list[dict]:
    body = {"temperature": 0, **body, "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    *lines, done = httpx.post(f"{address}/v1/{path}", json=body).text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all(("usage" in chunk) == usage for chunk in chunks)
    if usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"] is not None
        assert all(chunk["usage"] is None for chunk in chunks)
        chunks.append(last)
    return chunks


@pytest.mark.parametrize("case", CHATS)
def test_a_chat(address, case):
    body = {"messages": HELLO, **CHATS[case]}
    whole = post(address, "chat/completions", body)
    (choice,) = checked(module.ChatCompletion, whole, ours_of(body)).choices
    calls = choice.message.tool_calls or []
    assert bool(calls) == ("tools" in body) == (choice.finish_reason == "tool_calls")
    assert (choice.finish_reason == "length") == (case == "length")
    assert (choice.logprobs is None) == ("logprobs" not in body)
    for call in calls:
        assert call.function.name == "read_sensor"
        assert json.loads(call.function.arguments)["sensor"] in ("left", "right")


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("case", CHATS)
def test_a_streamed_chat(address, case, usage):
    body = {"messages": HELLO, **CHATS[case]}
    whole = post(address, "chat/completions", body)["choices"][0]
    chunks = [
        checked(module.ChatCompletionChunk, chunk, ours_of(body))
        for chunk in streamed(address, "chat/completions", body, usage)
    ]
    assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1
    first, *middle, last = (chunk.choices[0] for chunk in chunks if chunk.choices)
    assert first.delta.model_fields_set == {"role", "content", "refusal"}
    assert last.delta.model_fields_set == set()
    assert last.finish_reason == whole["finish_reason"]
    assert {choice.finish_reason for choice in (first, *middle)} == {None}
    assert all(len(choice.delta.model_fields_set) == 1 for choice in middle)
    said = "".join(choice.delta.content or "" for choice in middle)
    assert said == (whole["message"]["content"] or "")
    entries = [e for c in middle if c.logprobs for e in c.logprobs.content]
    wanted = (whole["logprobs"] or {"content": []})["content"]
    assert [each.to_dict() for each in entries] == wanted
    calls = [call for c in middle for call in c.delta.tool_calls or []]
    if "tools" in body:
        begun, *rest = calls
        assert begun.model_fields_set == {"index", "id", "type", "function"}
        assert (begun.function.name, begun.function.arguments) == ("read_sensor", "")
        assert all(c.model_fields_set == {"index", "function"} for c in rest)
        (call,) = whole["message"]["tool_calls"]
        arguments = "".join(part.function.arguments for part in rest)
        assert arguments == call["function"]["arguments"]
    else:
        assert calls == []


@pytest.mark.parametrize("case", TEXTS)
def test_a_text(address, model, case):
    body = {"prompt": PROMPT, "max_tokens": 12, **TEXTS[case]}
    whole = post(address, "completions", body)
    (choice,) = checked(Completion, whole, ours_of(body)).choices
    assert choice.finish_reason == ("length" if body["max_tokens"] == 12 else "stop")
    for usage in (False, True):
        chunks = streamed(address, "completions", body, usage)
        choices = []
        for chunk in chunks:
            ends = [each["finish_reason"] for each in chunk["choices"]]
            assert ends in ([], [None]) or chunk in chunks[-2:]
            # In chunks before the last, the reference shows null.
            for each in chunk["choices"]:
                each["finish_reason"] = each["finish_reason"] or "stop"
            choices += checked(Completion, chunk, ours_of(body)).choices
        assert "".join(each.text for each in choices) == choice.text
        if choice.logprobs is None:
            assert all(each.logprobs is None for each in choices)
            continue
        for name, values in choice.logprobs.to_dict().items():
            parted = [getattr(e.logprobs, name) for e in choices if e.logprobs]
            assert [value for part in parted for value in part] == values
    if choice.logprobs is not None:
        options = {"regex": body["regex"]} if "regex" in body else {}
        ids = model.generate(PROMPT, max_new_tokens=12, **options).token_ids
        before = [model.parts.text.decode(ids[:i]) for i in range(len(ids))]
        # A character belongs to the token that begins it.
        wanted = [len(text.rstrip("\ufffd")) for text in before]
        assert choice.logprobs.text_offset == wanted
        assert len(set(wanted)) > 2


def test_rejected_drafts_are_those_that_were_compared(address, model):
    draft = {"method": "draft", "num_draft_tokens": 4}
    stats = model.generate(PROMPT, max_new_tokens=40, **draft).stats
    body = {"prompt": PROMPT, "max_tokens": 40, **draft}
    details = post(address, "completions", body)["usage"]["completion_tokens_details"]
    wrong = sum(stats.evaluated_by_position) - stats.accepted_tokens
    assert details["rejected_prediction_tokens"] == wrong > 0
    assert stats.drafted_tokens > sum(stats.evaluated_by_position)


@pytest.mark.parametrize("reason", ["cancelled", "interrupted"])
def test_a_text_that_was_cut_has_no_finish_reason(reason):
    """The server answers 503 instead; "length" would be wrong."""
    request = GenerationRequest.of({"prompt": "x"}, chat=False, most=8)
    stats = Stats("none", exact=True, prompt_tokens=1)
    stats.finish_reason = reason
    with pytest.raises(KeyError):
        reply.Reply(request, "toy", None, "fp").complete([Result.of([], stats, False)])


def test_models(address):
    ours = "context_window methods chat"
    anthropics = "type display_name lifecycle created_at max_input_tokens max_tokens"
    found = httpx.get(f"{address}/v1/models").json()
    assert found.keys() == {"object", "data", "first_id", "last_id", "has_more"}
    assert found["object"] == "list"
    (card,) = found["data"]
    checked(Model, card, f"{ours} {anthropics}")
    assert httpx.get(f"{address}/v1/models/toy").json() == card
    page = Path("docs/server.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in ours.split())


def test_transcripts(whisper):
    sound = whispers.wav(whispers.sound(2.5))
    with Pool(whisper / "bundle", 1, threads=1) as pool:
        wanted = pool.models[0].twin().transcribe(sound, language="en", logprobs=0)
        with served(app.Service(pool, "whisper", Limits())) as address:

            def heard(form):
                return httpx.post(
                    f"{address}/v1/audio/transcriptions",
                    data={"response_format": form, "language": "en"},
                    files={"file": sound},
                )

            # Only a text that was cut has a finish reason, which is ours.
            checked(Transcription, heard("json").json(), "finish_reason")
            verbose = heard("verbose_json").json()
            # `task` is in the reference's example.
            answer = checked(TranscriptionVerbose, verbose, "task finish_reason")
            assert verbose["task"] == "transcribe"
            for form, kind in (("srt", "plain"), ("vtt", "vtt"), ("text", "plain")):
                given = heard(form).headers["content-type"]
                assert given == f"text/{kind}; charset=utf-8"
    assert answer.text == wanted.text
    assert len({segment.seek for segment in answer.segments}) > 1
    for segment, own in zip(answer.segments, wanted.segments, strict=True):
        assert segment.seek == pytest.approx(100 * own.window)
        assert segment.avg_logprob == pytest.approx(own.avg_logprob, rel=1e-4)
        assert segment.no_speech_prob == pytest.approx(own.no_speech_prob, rel=1e-4)
        assert 0 < segment.compression_ratio < 10 or not segment.text
