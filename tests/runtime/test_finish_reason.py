import asyncio
import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jetdraft.runtime.text.stops import StopWatcher, Thinking, ThoughtReader
from tests import cases

IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()
OPTIONS = {"token_ids": IDS, "max_new_tokens": 40, "ignore_eos": True}
METHODS = [{"method": "none"}, {"method": "draft", "num_draft_tokens": 3}]
SAMPLED = {"token_ids": IDS, "max_new_tokens": 120, "ignore_eos": True}
SAMPLED |= {"temperature": 1.0, "seed": 3}
LETTERS = SimpleNamespace(
    push=lambda ids: "".join(map(chr, ids)), special=lambda id: "", rest=lambda: ""
)
"""Text of tokens that are letters."""
THOUGHT = "<think>\nA < b.\n</think>\n\nYes </think>"
NO_THOUGHT = " No thought <think>a</think>"
CHANNEL = "<|channel>thought\nHm.<channel|>Yes."
HARMONY = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
    "<|channel|>final<|message|>An <answer>.<|return|>"
)


@pytest.fixture(params=METHODS, ids=lambda way: way["method"])
def options(request):
    return {**OPTIONS, **request.param}


@pytest.fixture(autouse=True)
def _free(model):
    yield
    with model.parts.claim.held():
        pass
    assert model.generate(token_ids=IDS, max_new_tokens=1).finish_reason


def check(result, reason, whole):
    assert result.finish_reason == result.stats.finish_reason == reason
    assert result.stats.to_json()["finish_reason"] == reason
    assert result.token_ids == whole[: len(result.token_ids)]
    assert result.stats.new_tokens == len(result.token_ids)


@pytest.fixture(scope="module")
def whole(model):
    return model.generate(**OPTIONS, method="none").token_ids


def test_length_is_no_cancel_afterwards(model, options, whole):
    with model.stream(**options) as stream:
        result = stream.result()
        stream.cancel()
    stream.close()
    for each in (result, stream.result()):
        check(each, "length", whole)
    assert len(result.token_ids) == 40
    assert result.prompt_tokens == len(IDS)
    assert result.stats.time_to_first_token > 0


def test_stop_by_a_text(model, options, whole):
    text = model.generate(**options).text
    result = model.generate(**options, stop=text[5:8])
    check(result, "stop", whole)
    assert result.text == text[: text.index(text[5:8])]


def test_stop_by_an_end_of_text(model, options, whole):
    [eos] = model.bundle.eos_token_ids
    result = model.generate(**{**options, "ignore_eos": False}, logit_bias={eos: 100.0})
    check(result, "stop", [eos])
    assert result.token_ids == [eos]


@pytest.mark.parametrize("pieces", [0, 1])
def test_cancelled_by_cancel(model, options, whole, pieces):
    stream = model.stream(**options)
    for _ in range(pieces):
        next(stream)
    stream.cancel()
    stream.cancel()  # once more changes nothing
    for _ in range(2):
        check(stream.result(), "cancelled", whole)
        assert bool(stream.result().token_ids) == bool(pieces)
        assert len(stream.result().token_ids) < 40


def test_cancelled_by_the_model_from_another_thread(model, options, whole):
    stream = model.stream(**options)
    next(stream)
    thread = threading.Thread(target=model.cancel)
    thread.start()
    thread.join()
    check(stream.result(), "cancelled", whole)
    assert 0 < len(stream.result().token_ids) < 40
    model.cancel()  # nothing to cancel, nothing happens


@pytest.mark.parametrize("pieces", [0, 1])
def test_cancelled_by_leaving_its_context(model, options, whole, pieces):
    with model.stream(**options) as stream:
        tokens = [t for _ in range(pieces) for t in next(stream).token_ids]
    stream.close()
    check(stream.result(), "cancelled", whole)
    assert stream.result().token_ids == tokens
    assert list(stream) == []


def test_cancelled_by_leaving_a_loop(model, options):
    stream = model.stream(**options)
    stats = stream.stats
    for _ in stream:
        break
    assert stats.finish_reason == ""
    del stream
    gc.collect()
    assert stats.finish_reason == "cancelled"


@pytest.mark.parametrize("end", ["cancel", "aclose"])
def test_cancelled_in_a_loop_of_asyncio(model, options, whole, end):
    async def main():
        stream = model.astream(**options)
        async for _ in stream:
            break
        if end == "cancel":
            stream.cancel()
        else:
            await stream.aclose()
        return await stream.result()

    result = asyncio.run(main())
    check(result, "cancelled", whole)
    assert 0 < len(result.token_ids) < 40


def test_deadline(model, options, whole, monkeypatch):
    """The clock jumps past the limit after the first pieces."""
    stream = model.stream(**options, max_seconds=1000.0)
    next(stream)
    monkeypatch.setattr(stream._watcher, "_deadline", 0.0)
    result = stream.result()
    check(result, "deadline", whole)
    assert 0 < len(result.token_ids) < 40


def test_deadline_before_the_first_token(model, options):
    result = model.generate(**options, max_seconds=1e-9)
    assert (result.token_ids, result.finish_reason) == ([], "deadline")
    assert result.stats.time_to_first_token == 0


def test_interrupted_inside_a_pass(model, options, whole, monkeypatch):
    target, passes = model.parts.target, []
    run = target.run

    def interrupted(*arguments, **more):
        passes.append(arguments)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return run(*arguments, **more)

    monkeypatch.setattr(target, "run", interrupted)
    stream, tokens = model.stream(**options), []
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(token for piece in stream for token in piece.token_ids)
    result = stream.result()
    check(result, "interrupted", whole)
    assert result.token_ids == tokens
    assert tokens
    monkeypatch.undo()
    # What the interrupted pass wrote into the buffers is not taken for a prefix.
    assert model.generate(**options).token_ids == whole


def test_an_interruption_of_a_whole_call_goes_on_to_the_caller(model, monkeypatch):
    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.parts.target, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**OPTIONS)
    monkeypatch.undo()


def shown(stop, tokens, rounds):
    ending, texts, kept = StopWatcher(LETTERS, [], stop), [], []
    for start in range(0, len(tokens), rounds):
        if ending.reason:
            break
        kept += ending.read([ord(c) for c in tokens[start : start + rounds]])
        texts.append(ending.take())
    return texts, "".join(map(chr, kept)), ending


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 40])
@cases(
    "stop, text, kept",
    (["STOP"], "one two ", "one two STOP"),
    (["wo", "STOP"], "one t", "one two"[:7]),
    (["P th"], "one two STO", "one two STOP th"),
    (["absent", "no"], "one two STOP three", "one two STOP three"),
    (["ee"], "one two STOP thr", "one two STOP three"),
    (["e t", "ne"], "o", "one"),
)
def test_what_is_shown_never_holds_a_stop_string(stop, text, kept, rounds):
    texts, found, ending = shown(stop, "one two STOP three", rounds)
    assert "".join(texts) + ending.rest() == text
    assert found == kept
    assert bool(ending.reason) == (text != "one two STOP three")


def test_what_may_become_a_stop_string_is_held_back():
    texts, _, ending = shown(["aab"], "xaac", 1)
    assert texts == ["x", "", "", "aac"]
    texts, _, ending = shown(["aab"], "xaa", 1)
    assert texts == ["x", "", ""]
    assert ending.rest() == "aa"


@pytest.mark.parametrize("seed", [3, 4])
def test_the_same_end_with_every_method(model, seed):
    options = {**SAMPLED, "seed": seed}
    text = model.generate(**options, method="none").text
    middle = len(text) // 2
    stop, kept = text[middle : middle + 3], None
    for method in ("none", "draft", "lookup", "auto"):
        stream = model.stream(**options, stop=[stop, "never"], method=method)
        pieces = "".join(piece.text for piece in stream)
        found = stream.result()
        kept = kept or found.token_ids
        assert found.token_ids == kept
        assert pieces == found.text == text[: text.index(stop)]
        assert found.finish_reason == found.stats.finish_reason == "stop"
        assert found.stats.new_tokens == len(kept) == len(found.from_draft)


@pytest.mark.parametrize("rounds", [1, 2, 7, 99])
@cases(
    "template, in_thought, text, thought, answer",
    ("</think>", False, THOUGHT, "A < b.", "Yes </think>"),
    ("</think>", True, " Hm. stop </think> a<think>b", "Hm. stop", "a<think>b"),
    ("</think>", False, NO_THOUGHT, "", NO_THOUGHT),
    ("</think>", True, "It never ends </thi", "It never ends </thi", ""),
    ("</think>", True, "</think> <think>", "", "<think>"),
    ("</think>", True, "\n\n</think>\n\na stop b", "", "a "),
    ("<|channel|>analysis", False, HARMONY, "Think.", "An <answer>.<|return|>"),
    ("<|channel>thought", False, CHANNEL, "Hm.", "Yes."),
    ("[/THINK]", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
)
def test_thoughts_are_apart(template, in_thought, text, thought, answer, rounds):
    thoughts = ThoughtReader(Thinking.of(f"x {template} y"), in_thought or None)
    watcher, found, said = StopWatcher(LETTERS, [], ["stop"], None, thoughts), "", ""
    for start in range(0, len(text), rounds):
        if not watcher.reason:
            watcher.read([ord(letter) for letter in text[start : start + rounds]])
            found, said = found + watcher.take_thought(), said + watcher.take()
    said += watcher.rest()
    assert (found + watcher.take_thought(), said) == (thought, answer)


@cases(
    "template, prompt, state",
    ("{{ content.split('</think>')[-1] }}", "<|im_start|>assistant\n", None),
    ("</think>", "<|im_start|>assistant\n<think>\n", True),  # Qwen3.5
    ("</think>", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),  # Qwen3
    ("</think>", "<\uff5cAssistant\uff5c><think>\n", True),  # DeepSeek-R1
    ("</think>", "<SPECIAL_11>Assistant\n<think></think>", False),  # Nemotron
    ("<|channel|>analysis", "<|start|>assistant", None),
    ("<|channel>thought", "<|turn>model\n", None),  # Gemma 4
    ("<|channel>thought", "<|turn>model\n<|channel>thought\n<channel|>", False),
    ("</think>", "a <think> b", None),
)
def test_a_prompt_may_begin_or_end_a_thought(template, prompt, state):
    letters = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    assert Thinking.of(template).state(letters, list(map(ord, prompt))) is state
    assert Thinking.of("{{ messages }}") is None
