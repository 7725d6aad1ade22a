"""Stop strings, deadlines and cancellation end a text at the same token always."""

from types import SimpleNamespace

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.text.stops import StopWatcher, Thinking, ThoughtReader

IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()
OPTIONS = {
    "token_ids": IDS, "max_new_tokens": 120, "ignore_eos": True, "temperature": 1.0,
    "seed": 3,
}  # fmt: skip
LETTERS = SimpleNamespace(
    push=lambda ids: "".join(map(chr, ids)), special=lambda id: "", rest=lambda: ""
)
"""Text of tokens that are letters."""


def shown(stop, tokens, rounds):
    ending, texts, kept = StopWatcher(LETTERS, [], stop), [], []
    for start in range(0, len(tokens), rounds):
        if ending.reason:
            break
        kept += ending.read([ord(c) for c in tokens[start : start + rounds]])
        texts.append(ending.take())
    return texts, "".join(map(chr, kept)), ending


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 40])
@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (["STOP"], "one two ", "one two STOP"),
        (["wo", "STOP"], "one t", "one two"[:7]),
        (["P th"], "one two STO", "one two STOP th"),
        (["absent", "no"], "one two STOP three", "one two STOP three"),
        (["ee"], "one two STOP thr", "one two STOP three"),
        (["e t", "ne"], "o", "one"),
    ],
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
    options = {**OPTIONS, "seed": seed}
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"stop": [3]}, "is not a list of texts"),
        ({"max_seconds": 0}, "max seconds 0"),
        ({"max_seconds": "1"}, "not a number"),
        ({"logprobs": 65}, "logprobs 65 is out of range"),
        ({"logprobs": -1}, "logprobs -1 is out of range"),
    ],
)
def test_wrong_values_are_refused(model, wrong, words):
    with pytest.raises(OptionError, match=words):
        model.generate(token_ids=IDS, **wrong)


HARMONY = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
    "<|channel|>final<|message|>An <answer>.<|return|>"
)


@pytest.mark.parametrize("rounds", [1, 2, 7, 99])
@pytest.mark.parametrize(
    ("template", "in_thought", "text", "thought", "answer"),
    [
        ("</think>", False, "<think>\nA < b.\n</think>\n\nYes </think>", "A < b.",
         "Yes </think>"),
        ("</think>", True, " Hm. stop </think> a<think>b", "Hm. stop", "a<think>b"),
        ("</think>", False, " No thought <think>a</think>", "",
         " No thought <think>a</think>"),
        ("</think>", True, "It never ends </thi", "It never ends </thi", ""),
        ("</think>", True, "</think> <think>", "", "<think>"),
        ("</think>", True, "\n\n</think>\n\na stop b", "", "a "),
        ("<|channel|>analysis", False, HARMONY, "Think.", "An <answer>.<|return|>"),
        ("<|channel>thought", False, "<|channel>thought\nHm.<channel|>Yes.", "Hm.",
         "Yes."),
        ("[/THINK]", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ],
)  # fmt: skip
def test_thoughts_are_apart(template, in_thought, text, thought, answer, rounds):
    thoughts = ThoughtReader(Thinking.of(f"x {template} y"), in_thought or None)
    watcher, found, said = StopWatcher(LETTERS, [], ["stop"], None, thoughts), "", ""
    for start in range(0, len(text), rounds):
        if not watcher.reason:
            watcher.read([ord(letter) for letter in text[start : start + rounds]])
            found, said = found + watcher.take_thought(), said + watcher.take()
    said += watcher.rest()
    assert (found + watcher.take_thought(), said) == (thought, answer)


@pytest.mark.parametrize(
    ("template", "prompt", "state"),
    [
        ("{{ content.split('</think>')[-1] }}", "<|im_start|>assistant\n", None),
        ("</think>", "<|im_start|>assistant\n<think>\n", True),  # Qwen3.5
        ("</think>", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),  # Qwen3
        ("</think>", "<\uff5cAssistant\uff5c><think>\n", True),  # DeepSeek-R1
        ("</think>", "<SPECIAL_11>Assistant\n<think></think>", False),  # Nemotron
        ("<|channel|>analysis", "<|start|>assistant", None),
        ("<|channel>thought", "<|turn>model\n", None),  # Gemma 4
        ("<|channel>thought", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("</think>", "a <think> b", None),
    ],
)
def test_a_prompt_may_begin_or_end_a_thought(template, prompt, state):
    letters = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    assert Thinking.of(template).state(letters, list(map(ord, prompt))) is state
    assert Thinking.of("{{ messages }}") is None
