"""Drafters fill blocks of tokens, and what they guess leaves no trace and no text."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jetdraft
from jetdraft.bench.tuning import tune
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.step_sessions import StepSessions
from jetdraft.runtime.passes.tensor import Memory
from jetdraft.runtime.planning.registry import methods
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests.runtime.proposers.distribution import check_distribution, other_verifiers
from tests.toy_graphs import (
    BLOCK,
    CAPACITY,
    GUESSES,
    METHODS,
    NOISE,
    WIDTH,
    features_of,
    toy_block,
)

PROMPT = np.random.default_rng(5).integers(4, 384, 70).tolist()
"""Longer than the widest pass, so that it is read in several."""

GREEDY, SAMPLED = {}, {"temperature": 0.8, "seed": 3}
ALL = {"confidence": 0.0}
"""The whole block is verified."""


@pytest.fixture(scope="module", params=METHODS)
def bundle(request, tmp_path_factory):
    return toy_block(tmp_path_factory.mktemp("block") / "bundle", request.param)


@pytest.fixture
def model(bundle):
    with jetdraft.load(bundle, threads=1) as model:
        yield model


@pytest.fixture
def method(model):
    (name,) = METHODS.keys() & set(model.methods)
    return name


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The texts of plain decoding."""
    folder = toy_block(tmp_path_factory.mktemp("plain") / "bundle", "dflash")
    with jetdraft.load(folder, threads=1) as model:
        return {
            "temperature" in way: generate(model, "none", way).token_ids
            for way in (GREEDY, SAMPLED)
        }


def generate(model, method, way=GREEDY, prompt=PROMPT, tokens=60, **options):
    return model.generate(
        token_ids=prompt, method=method, max_new_tokens=tokens,
        ignore_eos="regex" not in way, **way, **options,
    )  # fmt: skip


def check_rows(model, sequence, at_least=1):
    """The drafter's cache holds the rows of a fresh prefill of the sequence."""
    follower = model.parts.follower
    fed = len(follower._fed.tokens)
    assert fed >= at_least
    key, value = (b.numpy()[0, 0, :fed] for b in follower.graph.cache.buffers.values())
    assert np.array_equal(key, value)
    features = features_of(sequence)
    shift = 1 if follower.graph.contract.feature_input else 0
    assert key[:, 0].tolist() == sequence[shift : fed + shift]
    if shift:
        seen = len(follower._seen)
        assert follower._seen == sequence[:seen]
        waiting = np.reshape(follower._features, (-1, WIDTH))
        assert np.array_equal(waiting, features[fed:seen])
    assert np.array_equal(key[:, 1 : 1 + WIDTH], features[:fed])


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 3, BLOCK, BLOCK + 2])
def test_chains_give_the_text_of_plain_decoding(model, method, plain, way, count):
    result = generate(model, method, way, num_draft_tokens=count, drafting=ALL)
    assert result.token_ids == plain["temperature" in way]
    stats = result.stats
    assert stats.tokens_per_pass > (1.4 if way is GREEDY else 1.2)
    assert len(stats.evaluated_by_position) <= BLOCK
    check_rows(model, PROMPT + result.token_ids)


def test_every_number_of_tokens_is_accepted(model, method):
    """From none to the whole block, in one text; each leaves the right rows."""
    accepted = set()
    sequence = list(PROMPT)
    stream = model.stream(
        token_ids=PROMPT, method=method, max_new_tokens=110, ignore_eos=True,
        num_draft_tokens=BLOCK, drafting=ALL,
    )  # fmt: skip
    for piece in stream:
        before, sequence = len(sequence), sequence + piece.token_ids
        accepted.add(len(piece.token_ids) - 1)
        is_last = len(sequence) == len(PROMPT) + 110 or not piece.token_ids
        check_rows(model, sequence, 1 if is_last else before - 1)
    assert accepted >= set(range(BLOCK + 1))
    assert sequence[len(PROMPT) :] == generate(model, "none", tokens=110).token_ids


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", ["best", "heap", "comb", "rerank"])
def test_trees_give_the_text_of_plain_decoding(model, method, plain, way, tree):
    for exact in (True, False):
        result = generate(model, method, way, drafting={"tree": tree}, exact=exact)
        assert result.token_ids == plain["temperature" in way]
        assert result.stats.tokens_per_pass > 1.2
        check_rows(model, PROMPT + result.token_ids)


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_second_pass_costs_a_pass(model, method, plain, way):
    before = model.parts.drafter.passes
    result = generate(
        model, method, way, num_draft_tokens=BLOCK, drafting={"steps": 2, **ALL}
    )
    assert result.token_ids == plain["temperature" in way]
    check_rows(model, PROMPT + result.token_ids)
    made = model.parts.drafter.passes - before
    rounds = result.stats.target_passes
    assert 1.5 * rounds < made <= 2 * rounds + 3


def test_a_second_pass_knows_the_first_half(model, method):
    """With noise the first half is often not the best guess, as the rest supposes."""
    tokens_per_pass = {}
    for steps in (1, 2):
        stats = [
            generate(
                model, method, {"temperature": 0.8, "seed": seed}, PROMPT[:20], 150,
                num_draft_tokens=BLOCK, drafting={"steps": steps, **ALL},
            ).stats
            for seed in range(8)
        ]  # fmt: skip
        passes = sum(one.target_passes for one in stats)
        tokens_per_pass[steps] = sum(one.new_tokens for one in stats) / passes
    assert tokens_per_pass[2] > tokens_per_pass[1] > 1.5


def test_a_second_pass_guesses_what_a_block_of_known_tokens_says(model, method):
    """The tokens of the second half are those after the tokens of the first."""
    sampling = Sampling(temperature=1.5, seed=8)
    drafts = {}
    for steps in (1, 2):
        proposer = methods()[method].make(
            model.parts, methods()[method].options(steps=steps, confidence=0.0)
        )
        model.forget()
        proposer.begin(PROMPT, Chooser(sampling))
        model.parts.follower.observe(0, PROMPT[:-1], features_of(PROMPT[:-1]))
        drafts[steps] = proposer.propose(PROMPT, BLOCK).tokens[1:]
    half = (BLOCK + 1) // 2
    assert drafts[1][:half] == drafts[2][:half]
    assert drafts[1][half:] != drafts[2][half:]
    table = GUESSES if method == "diffusion" else _of_draft_vocabulary()
    for place in range(half, BLOCK):
        if place == half:  # the token before it is known
            row = (drafts[2][place - 1] + 7 * (len(PROMPT) - 1 + place)) % 384
            assert drafts[2][place] in np.argsort(-table[row])[:64]


def _of_draft_vocabulary():
    table = np.full_like(GUESSES, -np.inf)
    ids = [i for i in range(384) if i % 5]
    table[:, ids] = GUESSES[:, ids]
    return table


def test_a_doubtful_block_is_verified_in_part(model, method, plain):
    """Fewer tokens are drafted for nothing; the text is the same."""
    stats = {}
    for confidence in (0.0, 0.3, 1.0):
        result = generate(
            model, method, num_draft_tokens=BLOCK, drafting={"confidence": confidence}
        )
        assert result.token_ids == plain[False]
        stats[confidence] = result.stats
    whole, some, least = stats.values()
    assert whole.drafted_tokens > some.drafted_tokens > least.drafted_tokens
    assert least.drafted_tokens <= least.target_passes  # one token each
    assert some.acceptance_rate >= whole.acceptance_rate


def test_a_round_costs_one_pass(model, method):
    generate(model, method, num_draft_tokens=BLOCK)
    model.forget()
    before = model.parts.drafter.passes
    result = generate(model, method, num_draft_tokens=BLOCK)
    made = model.parts.drafter.passes - before
    # The prompt of 70 tokens is read in passes of 32, the last of which drafts too.
    assert made <= result.stats.target_passes + 2


@pytest.mark.parametrize("others", ["lookup", "trigram,lookup"])
@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_several_methods_at_once(model, method, plain, others, way):
    for name in (f"{method},{others}", "auto"):
        result = generate(model, name, way)
        assert result.token_ids == plain["temperature" in way]
        sequence = PROMPT + result.token_ids
        model.parts.follower.follow(sequence)  # it may have had no round
        check_rows(model, sequence)


def test_a_cancelled_round(model, method, plain):
    for stop in (1, 2, 5):
        stream = model.stream(
            token_ids=PROMPT, method=method, num_draft_tokens=4, max_new_tokens=60,
            ignore_eos=True,
        )  # fmt: skip
        for number, _ in enumerate(stream, 1):
            if number == stop:
                model.cancel()
        result = generate(model, method, num_draft_tokens=4)
        assert result.token_ids == plain[False]
        assert result.stats.reused_tokens >= len(PROMPT) - 2
        check_rows(model, PROMPT + result.token_ids)


def test_the_capacity_ends_the_text(model, method):
    """Blocks near the end take the spare slots."""
    texts = [
        generate(model, name, tokens=10_000, **options).token_ids
        for name, options in (
            ("none", {}),
            (method, {"num_draft_tokens": BLOCK, "drafting": ALL}),
            (method, {"num_draft_tokens": BLOCK, "drafting": {"steps": 2, **ALL}}),
            (method, {"drafting": {"tree": "best"}}),
        )
    ]
    assert len(texts[0]) == CAPACITY - len(PROMPT)
    assert texts[1] == texts[2] == texts[3] == texts[0]


def test_the_next_turn_reads_only_what_is_new(model, method):
    first = generate(model, method, num_draft_tokens=3, tokens=20)
    longer = PROMPT + first.token_ids + [7, 8, 9]
    second = generate(model, method, num_draft_tokens=3, prompt=longer, tokens=20)
    held = len(PROMPT) + 20 - 1
    assert held - 4 <= second.stats.reused_tokens <= held
    check_rows(model, longer + second.token_ids)
    expected = generate(model, "none", prompt=longer, tokens=20)
    assert second.token_ids == expected.token_ids


@pytest.mark.parametrize("at", [0, 1, 40, 68, 69])
def test_a_prompt_that_differs_at_one_token(model, method, at):
    generate(model, method, num_draft_tokens=3, tokens=20)
    other = [*PROMPT[:at], (PROMPT[at] + 1) % 384, *PROMPT[at + 1 :]]
    result = generate(model, method, num_draft_tokens=3, prompt=other, tokens=20)
    check_rows(model, other + result.token_ids)
    expected = generate(model, "none", prompt=other, tokens=20)
    assert result.token_ids == expected.token_ids


def test_the_same_prompt_again(model, method):
    for prompt in (PROMPT, PROMPT[:2], PROMPT[:1]):
        first, again = (
            generate(model, method, prompt=prompt, num_draft_tokens=3) for _ in range(2)
        )
        assert first.token_ids == again.token_ids
        assert again.stats.accepted_tokens == first.stats.accepted_tokens
        check_rows(model, prompt + again.token_ids)


def test_a_conversation(model, method):
    texts = []
    for name in ("none", method):
        model.forget()
        chat = Conversation(model, method=name, max_new_tokens=12, ignore_eos=True)
        texts.append(
            ["".join(p.text for p in chat.say(w)) for w in ("Hello", "So?", "A")]
        )
    assert texts[0] == texts[1]


def test_penalties_and_constraints(model, method):
    ways = [
        {"repetition_penalty": 1.4, **SAMPLED},
        {"logit_bias": {5: 3.0, 9: -100.0}},
        {"regex": "(robot|sensor)[a-z ]{20,30}\\."},
        {"regex": "[a-z]{9} and then the robot sees it, [a-z]{9}", **SAMPLED},
    ]
    for way in ways:
        texts = {
            tuple(generate(model, name, way, **options).token_ids)
            for name, options in (
                ("none", {}),
                (method, {"num_draft_tokens": 4}),
                (method, {"drafting": {"tree": "best"}}),
                (method, {"drafting": {"steps": 2}}),
                (f"{method},lookup", {}),
            )
        }
        assert len(texts) == 1


def test_tokens_that_the_target_has_not_run(model, method):
    """They begin the block of a head, and are rows of a drafter that reads text."""
    options = methods()[method].options(confidence=0.0, steps=2)
    proposer = methods()[method].make(model.parts, options)
    proposer.begin(PROMPT, Chooser(Sampling()))
    model.parts.follower.observe(0, PROMPT[:-1], features_of(PROMPT[:-1]))
    context = [*PROMPT, 5, 6]
    drafted = proposer.propose(context, BLOCK).tokens[1:]
    place = (6 + 7 * (len(context) - 1)) % 384
    table = GUESSES if method == "diffusion" else _of_draft_vocabulary()
    assert drafted[0] == table[place].argmax()
    assert len(drafted) == (BLOCK - 2 if method == "dflash" else BLOCK)
    for before, token, position in zip(
        drafted, drafted[1:], range(len(context), 99), strict=False
    ):
        assert token == table[(before + 7 * position) % 384].argmax()
    if method == "dflash":
        proposer.begin(PROMPT, Chooser(Sampling()))
        assert proposer.propose([*PROMPT, *range(BLOCK)], 3).drafted == 0


def test_json(model, method):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 9, "maxLength": 20}},
        "required": ["name"],
        "additionalProperties": False,
    }
    for way in (GREEDY, SAMPLED):
        how = {
            "token_ids": PROMPT, "max_new_tokens": 60, "json_schema": schema, **way
        }  # fmt: skip
        plain = model.generate(method="none", **how)
        assert set(json.loads(plain.text)) == {"name"}
        for name in (method, "auto"):
            assert model.generate(method=name, **how).token_ids == plain.token_ids


def test_a_saved_prefix(model, method, bundle, tmp_path):
    file = tmp_path / "prefix.npz"
    model.save_prefix(file, PROMPT[:50])
    expected = generate(model, method, num_draft_tokens=3)
    with jetdraft.load(bundle, threads=1) as other:
        other.load_prefix(file)
        result = generate(other, method, num_draft_tokens=3)
        assert result.stats.reused_tokens >= 49
        check_rows(other, PROMPT + result.token_ids)
    assert result.token_ids == expected.token_ids
    assert result.stats.accepted_tokens == expected.stats.accepted_tokens


@other_verifiers
def test_other_verifiers_keep_the_distribution(model, method, drafting):
    """Each token has a distribution of its own, which does not depend on the others."""
    prompt = PROMPT[:9]

    def draw(way, own):
        name = "none" if own is None else method
        return generate(model, name, way, prompt, 2, **(own or {}))

    check_distribution(draw, drafting, draws=600)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "random"])
@pytest.mark.parametrize("name", METHODS)
def test_auto_does_not_choose_a_random_block_for_long(
    tmp_path, steady_passes, name, learned
):
    source = toy_block(tmp_path / "bundle", name, GUESSES if learned else NOISE)
    with jetdraft.load(source, threads=1) as model:
        how = {"tokens": 100, "prompt": PROMPT[:20]}
        plain = generate(model, "none", **how)
        shares = []
        for _ in range(4):
            result = generate(model, "auto", **how)
            assert result.token_ids == plain.token_ids
            stats = result.stats
            rounds = stats.by_method[name].rounds if name in stats.by_method else 0
            shares.append(rounds / stats.target_passes)
    if learned:
        assert min(shares) > 0.5
    else:
        assert sum(shares[1:]) / 3 < 0.2


def test_its_cost_is_measured(tmp_path):
    for name in METHODS:
        with jetdraft.load(toy_block(tmp_path / name, name), threads=1) as model:
            curve = tune(model)
            assert curve.drafts[name] > 0
            result = generate(model, name, num_draft_tokens=3)
            check_rows(model, PROMPT + result.token_ids)


def test_blocks_cross_to_a_device_and_back(bundle, plain, monkeypatch):
    """The memory of both graphs is staged as if it were a device's."""

    def staged(self, entry, weights):
        file = entry.tree_file or entry.file
        sessions = StepSessions(self.session(file), entry.widest_contract)
        compaction = self.compaction(entry.compaction_file)
        return Graph(sessions, compaction, Memory("cpu", copies=True))

    monkeypatch.setattr(Opener, "_on_cpu", staged)
    with jetdraft.load(bundle, threads=1) as model:
        (name,) = METHODS.keys() & set(model.methods)
        for way in (
            {"num_draft_tokens": 4},
            {"drafting": {"tree": "best"}},
            {"num_draft_tokens": 4, "drafting": {"steps": 2}},
        ):
            result = generate(model, name, **way)
            assert result.token_ids == plain[False]
            assert result.stats.tokens_per_pass > 1.2


def test_twins_have_followers_of_their_own(bundle, plain):
    with jetdraft.Pool(bundle, size=2, threads=1) as pool:
        (name,) = METHODS.keys() & set(pool.models[0].methods)
        streams = [
            model.stream(
                token_ids=PROMPT, method=name, num_draft_tokens=4, max_new_tokens=60,
                ignore_eos=True,
            )
            for model in pool.models
        ]  # fmt: skip
        texts = [[], []]
        for pieces in zip(*streams, strict=True):
            for text, piece in zip(texts, pieces, strict=True):
                text.extend(piece.token_ids)
        assert texts == [plain[False]] * 2


def test_each_method_says_what_it_lacks(model, method):
    (other,) = METHODS.keys() - {method}
    for name, needs in (
        (other, "needs a (DFlash head|diffusion drafter); export with --head"),
        ("draft", "export with --drafter"),
        ("eagle", "export with --head"),
        ("medusa", "heads of Medusa or Hydra"),
    ):
        with pytest.raises(jetdraft.OptionError, match=needs):
            generate(model, name)


@pytest.mark.parametrize(
    ("drafting", "fact"),
    [
        ({"steps": 3}, "steps 3 is out of range; give 1 or 2"),
        ({"steps": 0}, "steps 0 is out of range"),
        ({"confidence": 1.5}, "confidence 1.5 is out of range; give 0 .off. to 1"),
        ({"steps": 2, "tree": "best"}, "leave the tree out"),
        ({"passes": 2}, "unknown drafting option 'passes'"),
    ],
    ids=str,
)
def test_options_that_are_refused(model, method, drafting, fact):
    with pytest.raises(jetdraft.OptionError, match=fact):
        generate(model, method, drafting=drafting)
