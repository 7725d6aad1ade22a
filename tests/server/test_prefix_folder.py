"""Beginnings of prompts on disk save time for all clients, and change no text."""

import os

import numpy as np
import pytest

import jetdraft
from jetdraft import Pool
from jetdraft.errors import OptionError, OutputError
from jetdraft.server.app import Service
from jetdraft.server.request_queue import MIN_ROWS, PrefixFolder

RANDOM = np.random.default_rng(7)
SYSTEM = RANDOM.integers(0, 288, 100).tolist()
ASKED = [[*SYSTEM, *RANDOM.integers(0, 288, 9).tolist()] for _ in range(4)]
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def pool(bundle):
    with Pool(bundle, 2, threads=1) as pool:
        yield pool


def ask(folder, model, prompt):
    """The result of a request, as a server runs it."""
    folder.load(model, prompt)
    result = model.generate(token_ids=prompt, **OPTIONS)
    folder.save(model, prompt)
    return result


def test_a_beginning_that_two_prompts_share_is_read_once(pool, tmp_path):
    first, other = pool.models
    folder = PrefixFolder(tmp_path / "new", "own", 10**9)
    for model in pool.models:
        model.forget()
    expected = [other.generate(token_ids=p, **OPTIONS).token_ids for p in ASKED]
    other.forget()
    found = [ask(folder, first, prompt) for prompt in ASKED[:2]]
    [file] = (tmp_path / "new").glob("own/*.npz")
    # Another client's model, and the same folder after a restart.
    found.append(ask(folder, other, ASKED[2]))
    again = PrefixFolder(tmp_path / "new", "own", 10**9)
    other.forget()
    found.append(ask(again, other, ASKED[3]))
    assert [result.token_ids for result in found] == expected
    assert [r.stats.reused_tokens for r in found] == [0, 100, 100, 100]
    assert list((tmp_path / "new").glob("own/*.npz")) == [file]


def test_a_conversation_that_goes_on_is_not_written(pool, tmp_path):
    folder, prompt = PrefixFolder(tmp_path, "own", 10**9), list(SYSTEM)
    for _ in range(3):
        ask(folder, pool.models[0], prompt)
        prompt += prompt[:7]
    assert not list(tmp_path.glob("own/*"))


def test_short_beginnings_are_not_written(pool, tmp_path):
    folder = PrefixFolder(tmp_path, "own", 10**9)
    for prompt in ASKED:
        ask(folder, pool.models[0], prompt[-9 - MIN_ROWS + 1 :])
    assert not list(tmp_path.glob("own/*"))


def test_files_have_a_bound(pool, tmp_path):
    """The file that was unused for longest goes, also a file of another bundle."""
    folder = PrefixFolder(tmp_path, "own", 10**9)
    for prompt in ASKED[:2]:
        ask(folder, pool.models[0], prompt)
    [file] = tmp_path.glob("own/*.npz")
    size = file.stat().st_size
    (tmp_path / "old").mkdir()
    old, used = tmp_path / "old/a.npz", tmp_path / "old/b.npz"
    for path in (old, used):
        path.write_bytes(file.read_bytes())
    os.utime(old, (1, 1))
    file.unlink()
    folder = PrefixFolder(tmp_path, "own", 2 * size)
    for prompt in ASKED[:2]:
        ask(folder, pool.models[0], prompt)
    assert not old.exists()
    assert used.exists()
    assert sum(f.stat().st_size for f in tmp_path.glob("*/*")) <= 2 * size
    small = PrefixFolder(tmp_path / "small", "own", size // 2)
    for prompt in ASKED:
        ask(small, pool.models[0], prompt)
    assert not list((tmp_path / "small").glob("*/*"))


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"x"])
def test_a_damaged_file_is_deleted(pool, tmp_path, caplog, damage):
    model = pool.models[0]
    expected = model.generate(token_ids=ASKED[2], **OPTIONS).token_ids
    folder = PrefixFolder(tmp_path, "own", 10**9)
    for prompt in ASKED[:2]:
        ask(folder, model, prompt)
    [file] = tmp_path.glob("own/*.npz")
    file.write_bytes(damage(file.read_bytes()))
    model.forget()
    assert ask(folder, model, ASKED[2]).token_ids == expected
    assert not file.exists() or file.stat().st_size > 1000
    assert "is not a saved prefix" in caplog.text


def test_a_server_shares_beginnings(pool, tmp_path):
    """The jobs of a server load and save, each with its model."""
    from openai import OpenAI

    from tests.server.serving import served

    service = Service(pool, "tiny", prefixes=tmp_path)
    for model in pool.models:
        model.forget()
    with served(service) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answers = []
        for prompt in ASKED[:3]:
            answers.append(
                client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=4, temperature=0.0
                )
            )
            for model in pool.models:
                model.forget()
        client.close()
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in answers]
    assert cached == [0, 0, 100]


def test_where_no_prefix_can_be_kept(pool, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another --prefixes"):
        PrefixFolder(tmp_path / "file", "own", 1)
    with pytest.raises(OutputError, match="choose another --prefixes"):
        PrefixFolder(tmp_path / "a\0b", "own", 1)


def test_an_encoder_decoder_keeps_none(monkeypatch, pool, tmp_path):
    def refuse(self):
        raise OptionError("depend on its source")

    monkeypatch.setattr(jetdraft.Model, "check_prefix_support", refuse)
    with pytest.raises(OptionError, match="source"):
        Service(pool, "tiny", prefixes=tmp_path)
