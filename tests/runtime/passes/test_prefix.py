import json
from dataclasses import replace

import numpy as np
import pytest

import jetdraft
from jetdraft import BundleError, Options, OutputError
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.generation import Generation
from jetdraft.runtime.measured.survey import Survey
from jetdraft.runtime.measured.widths import prefill_widths
from jetdraft.runtime.passes.prefix import common_length, digest_of
from tests import cases

RANDOM = np.random.default_rng(4)
IDS = RANDOM.integers(0, 288, 151).tolist()
OTHER = RANDOM.integers(0, 288, 40).tolist()
OPTIONS = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": 3}
METHODS = [
    {"method": "none"},
    {"method": "draft", "drafting": {"tree": "best"}, "num_draft_tokens": 7},
    {"method": "auto"},
]


@pytest.fixture(scope="module")
def kept(bundle):
    model = jetdraft.load(bundle, threads=1)
    assert prefill_widths(model.parts.target.contract) == [64, 32]
    assert model.parts.widths.prefills_agree
    model.parts.survey.finish()  # idle work would run the graph beside a test
    return model


def unread(model, ids, **options):
    result = model.generate(token_ids=ids, **{**OPTIONS, **options})
    assert result.stats.reused_tokens == 0
    return result.token_ids


def fresh(model, ids, **options):
    model.forget()
    return unread(model, ids, **options)


@pytest.mark.parametrize("way", METHODS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 33, 65, 150])
def test_a_prompt_goes_on_where_the_last_one_left_off(kept, way, length):
    prompt, before = IDS[:length], OTHER
    for turn in range(3):
        expected = fresh(kept, prompt, **way, seed=turn)
        kept.forget()
        kept.generate(token_ids=before, **{**OPTIONS, **way})
        found = kept.generate(token_ids=prompt, **{**OPTIONS, **way, "seed": turn})
        assert found.token_ids == expected
        if turn == 1:
            assert found.stats.reused_tokens >= length
        before = prompt
        prompt = [*prompt, *found.token_ids[:7], *OTHER[: 3 + turn]]
        if turn == 1 and length > 20:
            prompt[length // 2] = (prompt[length // 2] + 1) % 288
    if length > 20:
        assert found.stats.reused_tokens == length // 2


def test_only_what_is_new_is_read(kept):
    first, before = fresh(kept, IDS, method="none"), kept.parts.target.passes
    longer = [*IDS, *first, *OTHER[:9]]
    second = kept.generate(token_ids=longer, **OPTIONS, method="none")
    assert second.stats.reused_tokens == len(IDS) + 39
    assert kept.parts.target.passes - before == second.stats.target_passes
    again = kept.generate(token_ids=IDS, **OPTIONS)
    assert again.stats.reused_tokens == len(IDS) - 1
    assert again.token_ids == first


def test_rows_of_other_widths_are_not_taken(kept):
    expected = fresh(kept, IDS)
    kept.forget()
    kept.generate(token_ids=IDS[:80], **OPTIONS, exact=False, method="none")
    assert unread(kept, IDS) == expected
    loose = kept.generate(token_ids=IDS, **OPTIONS, exact=False)
    assert loose.stats.reused_tokens == len(IDS) - 1


def test_what_somebody_else_has_written_over_is_read_again(kept):
    expected = fresh(kept, IDS)
    kept.parts.target.cache.rewind(0)
    kept.parts.target.run(OTHER)
    assert unread(kept, IDS) == expected


def test_a_cancelled_prompt_keeps_what_was_read(kept):
    expected = fresh(kept, IDS)
    kept.forget()
    stream = kept.stream(token_ids=IDS, **OPTIONS)
    next(iter(stream))
    stream.close()
    found = kept.generate(token_ids=IDS, **OPTIONS)
    assert found.stats.reused_tokens == len(IDS) - 1
    assert found.token_ids == expected
    kept.generate(token_ids=IDS[:50], **OPTIONS, max_seconds=1e-9)
    assert kept.generate(token_ids=IDS, **OPTIONS).token_ids == expected


def test_up_to_the_last_row_of_the_buffers(kept):
    whole = (IDS * 2)[:254]
    for length in (250, 253, 254):
        expected = fresh(kept, whole[:length], max_new_tokens=9)
        kept.generate(token_ids=whole[:249], **OPTIONS)
        options = {**OPTIONS, "max_new_tokens": 9}
        assert kept.generate(token_ids=whole[:length], **options).token_ids == expected


def test_a_drafter_model_reads_the_end_of_a_prompt(kept):
    """It keeps what it has read, until more than 64 tokens are left to read."""
    cache, text = DraftCache(kept.parts.drafter), [*OTHER, *IDS]
    parts = IDS[:40], IDS[:100], IDS, text, [*text, *IDS[:9]], text * 2, text[:70]
    rows, other = [40, 100, 151, 64, 73, 64, 64], kept.twin().parts.drafter
    for prompt, read in zip(parts, rows, strict=True):
        cache.begin(prompt)
        found = cache.follow(prompt).logits[-1]
        assert (cache.graph.cache.length, cache.tokens) == (read, prompt)
        other.cache.rewind(0)
        for token in prompt[-read:]:
            expected = other.run([token]).logits[0]
            other.cache.advance(1)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@cases(
    "one, other, length",
    ([], [1], 0),
    ([1, 2, 3], [1, 2, 4, 5], 2),
    ([1, 2], [1, 2, 3], 2),
)
def test_common_beginnings(one, other, length):
    assert common_length(one, other) == length


def test_a_prefix_of_another_machine_is_not_exact(bundle, kept, tmp_path):
    file = tmp_path / "prefix.npz"
    kept.save_prefix(file, IDS[:90])
    arrays = dict(np.load(file))
    np.savez(file, **altered(arrays, identity={"threads": 99}))
    kept.load_prefix(file)
    assert kept.generate(token_ids=IDS, **OPTIONS).stats.reused_tokens == 0
    kept.load_prefix(file)
    loose = kept.generate(token_ids=IDS, **OPTIONS, exact=False)
    assert loose.stats.reused_tokens == 90


def altered(arrays, identity, **changes):
    if isinstance(identity, dict):
        identity = json.dumps(json.loads(str(arrays["identity"])) | identity)
    arrays = {**arrays, "identity": np.array(identity), **changes}
    return {**arrays, "sha256": np.array(digest_of(arrays))}


def test_prefixes_that_are_none_are_refused(kept, tmp_path):
    file, expected = tmp_path / "prefix.npz", fresh(kept, IDS)
    file.write_text("nonsense")
    with pytest.raises(BundleError, match="is not a saved prefix"):
        kept.load_prefix(file)
    kept.save_prefix(file, IDS[:90])
    arrays = dict(np.load(file))
    for identity, change, words in (
        ({"bundle": "x"}, {}, "another"),
        ("{", {}, "is not a saved prefix"),
        ({}, {"tokens": arrays["tokens"][:5]}, "is not a saved prefix"),
    ):
        np.savez(file, **altered(arrays, identity, **change))
        with pytest.raises(BundleError, match=words):
            kept.load_prefix(file)
    with pytest.raises(OutputError, match="cannot write"):
        kept.save_prefix(tmp_path / "no" / "where.npz", IDS[:9])
    assert kept.generate(token_ids=IDS, **OPTIONS).token_ids == expected


def test_where_filling_up_has_no_room_less_is_read(kept, monkeypatch):
    """254 of 256 rows are held, and 8 is the narrowest width above 2."""
    prompt, graph, seen = (IDS * 2)[:256], kept.parts.target, []
    kept.forget()
    run = graph.run

    def spy(tokens, last_only=False, width=0):
        seen.append((len(tokens), width))
        return run(tokens, last_only, width)

    monkeypatch.setattr(graph, "run", spy)
    options = Options.of(method="none", max_new_tokens=1)
    generation = Generation(kept.parts, kept.planner, prompt, options)
    generation.widths = [2, 8]
    assert list(generation.run()) == []
    kept.forget()
    assert sum(tokens for tokens, _ in seen) == 255
    assert seen[-4:] == [(8, 8), (8, 8), (8, 8), (7, 8)]
    assert graph.cache.length == 255


WIDTHS = {16: [], 31: [], 64: [64, 32], 100: [96, 48], 128: [128, 64, 32]}


@pytest.mark.parametrize(("most", "widths"), WIDTHS.items())
def test_prompts_are_read_in_multiples_of_the_widest_draft(kept, most, widths):
    contract = replace(kept.bundle.target.contract, max_width=most)
    assert prefill_widths(contract) == widths


def test_a_wide_pass_that_leaves_other_rows_does_not_agree(kept, monkeypatch):
    graph, run = kept.parts.target, kept.parts.target.run
    survey = Survey(graph, None)
    survey.finish()
    assert survey.widths.prefills_agree

    def odd(tokens, last_only=False, width=0, **more):
        answer = run(tokens, last_only, width, **more)
        if len(tokens) == 32:
            buffer = next(iter(graph.cache.buffers.values()))
            whole = np.array(buffer.numpy())
            whole[0, 0, graph.cache.length + 31, 0] += 1
            buffer.update_inplace(whole)
        return answer

    monkeypatch.setattr(graph, "run", odd)
    survey = Survey(graph, None)
    survey.finish()
    kept.forget()
    assert not survey.widths.prefills_agree
