"""What a line of data is, and what is learned of it."""

from __future__ import annotations

import hashlib
import json
import tracemalloc

import pytest

from jetdraft.errors import DataError
from jetdraft.runtime.text.template import ChatTemplate
from jetdraft.train.data import Corpus, examples_of
from tests.tiny import END_OF_TEXT, tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER = {"role": "user", "content": "def x"}
REPLY = {"role": "assistant", "content": "return"}


def read(tmp_path, *rows, end=(0,), **how):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return Corpus.read([file], tokenizer(), end, length=64, least=2, **how)


def only(corpus):
    [example] = corpus.training
    texts = tokenizer().decode(example.ids, skip_special_tokens=False)
    learned = [i for i, one in zip(example.ids, example.learned, strict=True) if one]
    return texts, tokenizer().decode(learned, skip_special_tokens=False)


def test_of_a_chat_the_last_message_is_learned(tmp_path):
    template = ChatTemplate(TEMPLATE, {})
    text, learned = only(read(tmp_path, {"messages": [USER, REPLY]}, template=template))
    assert text == f"user: def x\nassistant: return{END_OF_TEXT}"
    assert learned == f"return{END_OF_TEXT}"


def test_a_chat_that_ends_with_the_user_is_to_be_completed(tmp_path):
    template = ChatTemplate(TEMPLATE, {})
    row = {"messages": [USER]}
    corpus = read(tmp_path, row, template=template, prompts_alone=True)
    assert only(corpus) == ("user: def x\nassistant: ", "")
    assert not corpus.training[0].is_written
    with pytest.raises(DataError, match=r"line 1 of .*or messages; correct it"):
        read(tmp_path, row, template=template)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "is not an object with"),
        ({"messages": [{"content": "x"}]}, "is not an object with"),
        ({"messages": "hello"}, "is not an object with"),
        ({"messages": [USER, {**REPLY, "content": 3}]}, "is not an object with"),
        ({"prompt": "a"}, "is not an object with"),
        ({"prompt": "a b c", "completion": ""}, "has an empty completion"),
    ],
)
def test_lines_that_cannot_be_learned(tmp_path, row, message):
    template = ChatTemplate(TEMPLATE, {})
    with pytest.raises(DataError, match=f"line 1 of .*{message}"):
        read(tmp_path, row, end=(), template=template)


def test_a_line_that_is_nested_deeply_is_refused(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"line 1 of .* is not an object with"):
        Corpus.read([file], tokenizer(), (0,), length=64, least=2)


def test_messages_need_a_template_that_takes_them(tmp_path):
    with pytest.raises(DataError, match="messages need a chat template"):
        read(tmp_path, {"messages": [USER, REPLY]})
    refusing = ChatTemplate("{{ raise_exception('no users') }}", {})
    with pytest.raises(DataError, match=r"line 1 of .*no users"):
        read(tmp_path, {"messages": [USER, REPLY]}, template=refusing)


def test_a_batch_gives_its_examples_back(tmp_path):
    rows = [{"prompt": "for " * n, "completion": "x" * n} for n in range(1, 6)]
    corpus = read(tmp_path, *rows, share=0.0)
    batch = corpus.batch(0, 4)
    examples = examples_of(batch)
    assert all(example in corpus.training for example in examples)
    assert len(examples) == 4


def test_the_files_are_never_in_memory_together(tmp_path, monkeypatch):
    """Their hash is taken file after file; it is the hash of all of them joined."""
    size, files = 1 << 22, [tmp_path / f"{n}.txt" for n in range(8)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([97 + number]) * size)
    monkeypatch.setattr("jetdraft.train.data.read_text", lambda file: "for self " * 99)
    tracemalloc.start()
    corpus = Corpus.read(files, tokenizer(), (0,), length=64, least=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * size
    joined = b"".join(file.read_bytes() for file in files)
    assert corpus.sha256 == hashlib.sha256(joined).hexdigest()
