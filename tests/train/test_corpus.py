"""What a line of data is, and what is learned of it."""

import hashlib
import json
import tracemalloc

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from jetdraft.errors import DataError
from jetdraft.runtime.text.template import ChatTemplate
from jetdraft.train.data import IGNORED, Corpus, Example, collate, split_batch
from tests.tiny import END_OF_TEXT, tokenizer
from tests.train.periodic import write_periodic

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER = {"role": "user", "content": "def x"}
REPLY = {"role": "assistant", "content": "return"}


def read(tmp_path, *rows, end=(0,), **how):
    file = tmp_path / "data.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines))
    how = {"tokenizer": tokenizer(), "length": 64, "least": 2, **how}
    return Corpus.read([file], end=end, **how)


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
        ({"prompt": "a", "completion": "b"}, "has 2 tokens, a sequence needs 5"),
        ({"completion": "a"}, "is not an object with prompt"),
        ({"prompt": "a", "completion": 3}, "is not an object with prompt"),
        ("not json", "is not an object with"),
        ("[" * 100_000, "is not an object with"),
    ],
)
def test_lines_that_cannot_be_learned(tmp_path, row, message):
    template = ChatTemplate(TEMPLATE, {})
    with pytest.raises(DataError, match=f"line 1 of .*{message}"):
        read(tmp_path, row, end=(), least=5, template=template)


def test_lines_of_a_wrong_length(tmp_path):
    rows = {"prompt": "for self"}, {"prompt": "x" * 200}
    with pytest.raises(
        DataError, match=r"1 of 2 lines .* the most in line 2; give --s"
    ):
        read(tmp_path, *rows, prompts_alone=True)
    with pytest.raises(DataError, match=r"line 1 of .* has 0 tokens"):
        read(tmp_path, {"prompt": ""}, prompts_alone=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x", "the data has 1 of the 5 tokens"),
        ("", "the data has 0 of the 5 tokens"),
        (None, "no data file"),
    ],
)
def test_texts_that_cannot_be_learned(tmp_path, content, message):
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        Corpus.read([file], tokenizer(), (0,), length=32, least=5)


@pytest.fixture
def corpus(tmp_path):
    file = write_periodic(tmp_path / "text.txt")
    return Corpus.read([file], tokenizer(), (0,), length=32, least=5)


def test_a_text_becomes_windows(corpus):
    assert {len(x.ids) for x in corpus.training} == {32}
    assert all(all(x.learned) for x in corpus.training)


def test_only_completions_are_learned(tmp_path):
    """What starts a text starts no completion."""
    words, row = tokenizer(), {"prompt": "def x", "completion": "return 12345"}
    example = read(tmp_path, row, "").validation[0]
    assert example == Example.completed(example.ids, len(words.encode("def x").ids))
    assert example.ids[-1] == 0
    words.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert read(tmp_path, row, tokenizer=words).validation[0].ids == [0, *example.ids]


def test_padding_is_not_learned():
    batch = collate([Example([1, 2, 3], [True] * 3), Example([4], [True])])
    assert batch.ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3], [4, IGNORED, IGNORED]]


def test_a_batch_depends_on_the_step_alone_and_machines_share_it(corpus):
    whole = corpus.batch(7, 4).ids
    assert not torch.equal(whole, corpus.batch(8, 4).ids)
    corpus.batch(0, 4)
    assert torch.equal(whole, corpus.batch(7, 4).ids)
    parts = [corpus.batch(7, 4, part, 2).ids for part in (0, 1)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole)


def test_messages_need_a_template_that_takes_them(tmp_path):
    with pytest.raises(DataError, match="messages need a chat template"):
        read(tmp_path, {"messages": [USER, REPLY]})
    refusing = ChatTemplate("{{ raise_exception('no users') }}", {})
    with pytest.raises(DataError, match=r"line 1 of .*no users"):
        read(tmp_path, {"messages": [USER, REPLY]}, template=refusing)


def test_a_batch_gives_its_examples_back(tmp_path):
    rows = [{"prompt": "for " * n, "completion": "x" * n} for n in range(1, 6)]
    corpus = read(tmp_path, *rows, share=0.0)
    examples = split_batch(corpus.batch(0, 4))
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
