import hashlib
import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from threading import Thread
from unittest.mock import Mock

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GPT2Config

from jetdraft.errors import DataError, TrainingError
from jetdraft.runtime.text.template import ChatTemplate
from jetdraft.train import data, written_texts
from jetdraft.train.data import IGNORED, Corpus, Example, TextReader, collate
from jetdraft.train.written_texts import WrittenTexts, continuations
from tests import cases
from tests.tiny import END_OF_TEXT, llama_config, tokenizer
from tests.train.periodic import write_periodic

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER = {"role": "user", "content": "def x"}
REPLY = {"role": "assistant", "content": "return"}
END = 0
PROMPTS = [[5, 7, 9, 11, 2], [8], [30, 31, 32]]


def read(tmp_path, *rows, share=0.05, **how):
    file = tmp_path / "data.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines))
    how = {"tokenizer": tokenizer(), "ends": (0,), "length": 64, "least": 2, **how}
    return Corpus.read([file], TextReader(**how), share)


def only(corpus):
    [example] = corpus.training
    texts = tokenizer().decode(example.ids, skip_special_tokens=False)
    learned = [i for i, one in zip(example.ids, example.learned, strict=True) if one]
    return texts, tokenizer().decode(learned, skip_special_tokens=False)


def test_of_a_chat_the_last_message_is_learned_by_a_template_that_takes_it(tmp_path):
    template, row = ChatTemplate(TEMPLATE, {}), {"messages": [USER, REPLY]}
    text, learned = only(read(tmp_path, row, template=template))
    assert text == f"user: def x\nassistant: return{END_OF_TEXT}"
    assert learned == f"return{END_OF_TEXT}"
    with pytest.raises(DataError, match="messages need a chat template"):
        read(tmp_path, row)
    refusing = ChatTemplate("{{ raise_exception('no users') }}", {})
    with pytest.raises(DataError, match=r"line 1 of .*no users"):
        read(tmp_path, row, template=refusing)


def test_a_chat_that_ends_with_the_user_is_to_be_completed(tmp_path):
    template = ChatTemplate(TEMPLATE, {})
    row = {"messages": [USER]}
    corpus = read(tmp_path, row, template=template, prompts_alone=True)
    assert only(corpus) == ("user: def x\nassistant: ", "")
    assert not corpus.training[0].is_written
    with pytest.raises(DataError, match=r"line 1 of .*or messages; correct it"):
        read(tmp_path, row, template=template)


@cases(
    "row, message",
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
)
def test_lines_that_cannot_be_learned(tmp_path, row, message):
    template = ChatTemplate(TEMPLATE, {})
    with pytest.raises(DataError, match=f"line 1 of .*{message}"):
        read(tmp_path, row, ends=(), least=5, template=template)


def test_lines_of_a_wrong_length(tmp_path):
    rows = {"prompt": "for self"}, {"prompt": "x" * 200}
    said = r"1 of 2 lines .* the most in line 2; give --s"
    with pytest.raises(DataError, match=said):
        read(tmp_path, *rows, prompts_alone=True)
    with pytest.raises(DataError, match=r"line 1 of .* has 0 tokens"):
        read(tmp_path, {"prompt": ""}, prompts_alone=True)


@cases(
    "content, message",
    ("x", "the data has 1 of the 5 tokens"),
    ("", "the data has 0 of the 5 tokens"),
    (None, "no data file"),
)
def test_texts_that_cannot_be_learned(tmp_path, content, message):
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        Corpus.read([file], TextReader(tokenizer(), (0,), length=32, least=5))


@pytest.fixture
def corpus(tmp_path):
    file = write_periodic(tmp_path / "text.txt")
    return Corpus.read([file], TextReader(tokenizer(), (0,), length=32, least=5))


def test_a_text_becomes_windows(corpus):
    assert {len(x.ids) for x in corpus.training} == {32}
    assert all(all(x.learned) for x in corpus.training)


def test_only_completions_are_learned(tmp_path):
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


def test_a_batch_gives_its_examples_back(tmp_path):
    rows = [{"prompt": "for " * n, "completion": "x" * n} for n in range(1, 6)]
    corpus = read(tmp_path, *rows, share=0.0)
    examples = data.split_batch(corpus.batch(0, 4))
    assert all(example in corpus.training for example in examples)
    assert len(examples) == 4


def test_the_files_are_never_in_memory_together(tmp_path, monkeypatch):
    size, files = 1 << 22, [tmp_path / f"{n}.txt" for n in range(8)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([97 + number]) * size)
    monkeypatch.setattr("jetdraft.train.data.read_text", lambda file: "for self " * 99)
    tracemalloc.start()
    corpus = Corpus.read(files, TextReader(tokenizer(), (0,), length=64, least=2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * size
    joined = b"".join(file.read_bytes() for file in files)
    assert corpus.sha256 == hashlib.sha256(joined).hexdigest()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config()).eval()


def test_a_text_depends_on_its_own_prompt_and_seed_alone(model):
    together = continuations(model, PROMPTS, [6, 12, 9], {END}, [1, 2, 3])
    for prompt, count, seed, text in zip(
        PROMPTS, [6, 12, 9], [1, 2, 3], together, strict=True
    ):
        [alone] = continuations(model, [prompt], [count], {END}, [seed])
        assert text == alone
        assert text[: len(prompt)] == prompt
        assert len(text) == len(prompt) + count or text[-1] == END
    [other] = continuations(model, PROMPTS[:1], [6], {END}, [4])
    assert other != together[0]


def test_its_tokens_have_the_models_distribution(model):
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.top_k = 1
    draws = 3000
    texts = continuations(model, [[5, 7]] * draws, [1] * draws, {END}, range(draws))
    counts = Counter(text[-1] for text in texts)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 7]])).logits[0, -1]
    wanted = draws * logits.double().softmax(-1)
    often = (wanted > 10).nonzero()[:, 0].tolist()
    assert len(often) > 10
    square = sum((counts[t] - wanted[t].item()) ** 2 / wanted[t].item() for t in often)
    # Five standard deviations above the mean.
    assert square < len(often) + 5 * (2 * len(often)) ** 0.5


def test_a_text_ends_after_an_end_and_has_chosen_tokens_only(model):
    ids = torch.arange(40, 90, 7)
    texts = continuations(model, PROMPTS, [30] * 3, {47}, [1, 2, 3], ids)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        written = text[len(prompt) :]
        assert set(written) <= set(ids.tolist())
        assert 47 not in written[:-1]
        assert len(written) == 30 or written[-1] == 47


def examples(count):
    kinds = [
        lambda n: Example([n + 1] * 12, [False] * 5 + [True] * 7),
        lambda n: Example([n + 2] * 40, [True] * 40),
        lambda n: Example([n + 3, 9, 9], [False] * 3),
    ]
    return [kinds[number % 3](number) for number in range(count)]


@pytest.fixture
def texts(model, tmp_path):
    return WrittenTexts(tmp_path / "own", "me", model, [END], 24, batch_size=4, seed=5)


@pytest.fixture
def whole(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(written_texts, "SHARD_TEXTS", 4)
    return replace(texts, folder=tmp_path / "one").complete(examples(10), range(10))


def test_prompts_stay_and_lengths_are_kept(texts):
    before = examples(6)
    after = texts.complete(before, range(6))
    for old, new, size in zip(before, after, [5, 16, 3] * 2, strict=True):
        assert new.ids[:size] == old.ids[:size]
        assert new.learned == [place >= size for place in range(len(new.ids))]
        assert len(new.ids) <= (len(old.ids) if old.is_written else 24)
        assert new.is_written
    some = replace(texts, identity="others").complete(before, [2, 5])
    same = [one == two for one, two in zip(some, before, strict=True)]
    assert same == [True, True, False] * 2


def test_a_stopped_writing_goes_on_after_its_last_shard(texts, whole):
    calls = []

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return continuations(*arguments)

    stopped, seen = replace(texts, write=stopping), []
    with pytest.raises(KeyboardInterrupt):
        stopped.complete(examples(10), range(10))
    assert len(list(texts.folder.iterdir())) == 1
    again = stopped.complete(examples(10), range(10), lambda *state: seen.append(state))
    assert again == whole
    assert len(calls) == 4  # the first shard was not written again
    assert seen[-1] == (10, 10)
    replace(texts, identity="another target").complete(examples(1), [0])
    assert len(list(texts.folder.iterdir())) == 4  # beside the three
    texts.delete()
    assert not texts.folder.exists()


def test_a_large_batch_fills_several_files(texts, whole):
    write = Mock(side_effect=continuations)
    for size in (9, 2):  # in the second run nothing is written again
        own = replace(texts, batch_size=size, write=write)
        assert own.complete(examples(10), range(10)) == whole
        assert [len(call.args[1]) for call in write.mock_calls] == [8, 2]
        assert len(list(texts.folder.iterdir())) == 3


def test_batches_are_halved_where_memory_ends(texts, tmp_path):
    whole = texts.complete(examples(10), range(10))
    sizes, most = [], 3

    def small(*arguments):
        sizes.append(len(arguments[1]))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError
        return continuations(*arguments)

    limited = replace(texts, folder=tmp_path / "2", batch_size=10, write=small)
    assert limited.complete(examples(10), range(10)) == whole
    assert sizes == [10, 5, 3, 3, 3, 1]
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        replace(limited, folder=tmp_path / "3").complete(examples(2), range(2))


def test_processes_share_the_shards(texts, whole, monkeypatch):
    monkeypatch.setattr(written_texts, "LOOK_SECONDS", 0.01)
    shares, ticks = {}, {0: [], 1: []}

    def run(process):
        shares[process] = replace(texts, process=process, processes=2).complete(
            examples(10), range(10), lambda *state: ticks[process].append(state)
        )

    threads = [Thread(target=run, args=[process]) for process in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert shares == {0: whole, 1: whole}
    assert ticks[0][-1] == (6, 6)
    assert ticks[1][-1] == (4, 4)


def test_a_process_that_is_gone_is_named_and_a_damaged_shard_too(texts, monkeypatch):
    monkeypatch.setattr(written_texts, "WAIT_SECONDS", 0.0)
    with pytest.raises(TrainingError, match="share the output folder"):
        replace(texts, process=1, processes=2).complete(examples(2), range(2))
    texts.complete(examples(2), range(2))
    [file] = texts.folder.iterdir()
    file.write_text(file.read_text()[:-9])
    with pytest.raises(DataError, match=r"is damaged.*delete it"):
        texts.complete(examples(2), range(2))


def test_a_short_text_beside_a_long_prompt_stays_inside_the_positions():
    torch.manual_seed(0)
    config = GPT2Config(n_positions=16, vocab_size=100, n_embd=32, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    texts = continuations(model, [[5] * 14, [7]], [2, 15], set(), [1, 2])
    assert [len(text) for text in texts] == [16, 16]
