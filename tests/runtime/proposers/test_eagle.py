"""A head drafts from the target's features, and leaves no trace of what it guessed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jetdraft
from jetdraft.bench.tuning import tune
from jetdraft.methods import Method, Proposer, Rows, Traits, registered
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.step_sessions import StepSessions
from jetdraft.runtime.passes.tensor import Memory
from jetdraft.runtime.planning.registry import methods
from jetdraft.runtime.proposers.cascade import REVIEWED
from jetdraft.runtime.proposers.lookup import Guess, LookupProposer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests.runtime.proposers.distribution import check_distribution, other_verifiers
from tests.toy_graphs import (
    CAPACITY,
    GUESSES,
    IDS,
    NOISE,
    STEP,
    WIDTH,
    features_of,
    toy_eagle,
)

PROMPT = np.random.default_rng(5).integers(4, 384, 70).tolist()
"""Longer than the widest pass, so that it is read in several."""

GREEDY, SAMPLED = {}, {"temperature": 0.8, "seed": 3}
TREES = ("best", "heap", "comb", "threshold", "rerank", "merged")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return toy_eagle(tmp_path_factory.mktemp("eagle") / "bundle")


@pytest.fixture
def model(bundle):
    with jetdraft.load(bundle, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def plain(bundle):
    """The texts of plain decoding."""
    with jetdraft.load(bundle, threads=1) as model:
        return {
            "temperature" in way: generate(model, "none", way).token_ids
            for way in (GREEDY, SAMPLED)
        }


def generate(model, method="eagle", way=GREEDY, prompt=PROMPT, tokens=60, **options):
    return model.generate(
        token_ids=prompt, method=method, max_new_tokens=tokens,
        ignore_eos="regex" not in way, **way, **options,
    )  # fmt: skip


def check_rows(model, sequence, at_least=1):
    """The head's cache holds the rows of a fresh prefill of the sequence."""
    follower = model.parts.follower
    fed = len(follower._fed.tokens)
    assert fed >= at_least
    key, value = (b.numpy()[0, 0, :fed] for b in follower.graph.cache.buffers.values())
    assert np.array_equal(key, value)
    assert key[:, 0].tolist() == sequence[1 : fed + 1]
    assert np.array_equal(key[:, 1 : 1 + WIDTH], features_of(sequence)[:fed])
    seen = len(follower._seen)
    assert follower._seen == sequence[:seen]
    waiting = np.reshape(follower._features, (-1, WIDTH))
    assert np.array_equal(waiting, features_of(sequence)[fed:seen])


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_chains_give_the_text_of_plain_decoding(model, plain, way, count):
    result = generate(model, way=way, num_draft_tokens=count)
    assert result.token_ids == plain["temperature" in way]
    stats = result.stats
    assert stats.tokens_per_pass > 1.4
    # Every number of accepted tokens occurred, up to three.
    accepted, evaluated = stats.accepted_counts[:3], stats.evaluated_by_position[:3]
    assert min(accepted) > 0
    assert all(a < e for a, e in zip(accepted, evaluated, strict=True))


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", TREES)
def test_trees_give_the_text_of_plain_decoding(model, plain, way, tree):
    for exact in (True, False):
        result = generate(model, way=way, drafting={"tree": tree}, exact=exact)
        assert result.token_ids == plain["temperature" in way]
        assert result.stats.tokens_per_pass > 1.2
        check_rows(model, PROMPT + result.token_ids)


@pytest.mark.parametrize("drafting", [{}, {"tree": "best"}, {"tree": "heap"}], ids=str)
@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_self_drafted_rows_leave_no_trace(model, plain, drafting, way):
    sized = {} if drafting else {"num_draft_tokens": 4}
    sequence = list(PROMPT)
    stream = model.stream(
        token_ids=PROMPT, method="eagle", max_new_tokens=60, ignore_eos=True,
        drafting=drafting, **sized, **way,
    )  # fmt: skip
    for piece in stream:
        before, sequence = len(sequence), sequence + piece.token_ids
        # In the last round there is no room for a draft, so nothing is fed.
        is_last = before == len(PROMPT) + 59 or not piece.token_ids
        check_rows(model, sequence, 1 if is_last else before - 1)
    assert sequence == PROMPT + plain["temperature" in way]


def test_the_catch_up_is_the_first_draft_step(model):
    result = generate(model, num_draft_tokens=3)
    passes = model.parts.drafter.passes
    model.forget()
    before = model.parts.drafter.passes
    result = generate(model, num_draft_tokens=3)
    passes = model.parts.drafter.passes - before
    # The prompt of 70 tokens is read in passes of 32, the last of which drafts too.
    assert passes <= 3 * result.stats.target_passes + 2


class Turns(Proposer):
    """The head in every other round; between them a proposer that is right or wrong."""

    traits = Traits("turns", max_draft_tokens=15, kind=Kind.COUPLED)

    def __init__(self, head, text):
        self.head, self.text, self.round = head, PROMPT + text, 0

    def begin(self, prompt, chooser):
        self.head.begin(prompt, chooser)

    def keep(self, kept):
        return self.head.keep(kept)

    def propose(self, context, budget, parents=None):
        self.round += 1
        if self.round % 2:
            return self.head.propose(context, budget)
        guess = self.text[len(context) : len(context) + budget]
        if guess and self.round % 4 == 0:
            guess[-1] = (guess[-1] + 1) % 384
        return Rows.chain([context[-1], *guess])

    def observe(self, seen):
        self.head.observe(seen)


def test_rounds_of_others_change_nothing_for_the_head(model, plain):
    """Its answers after them are those of a head that has seen nothing else."""
    head = model.planner.proposers()["eagle"]
    turns = Turns(head, plain[False])
    with registered(Method("turns", "in turn", lambda parts, options: turns)):
        sequence, drafts = list(PROMPT), []
        propose = head.propose

        def spy(context, budget):
            rows = propose(context, budget)
            drafts.append((list(context), rows.tokens[1:]))
            return rows

        head.propose = spy
        stream = model.stream(
            token_ids=PROMPT, method="turns", num_draft_tokens=4, max_new_tokens=60,
            ignore_eos=True,
        )  # fmt: skip
        for piece in stream:
            sequence += piece.token_ids
            check_rows(model, sequence)
        del head.propose
    assert sequence == PROMPT + plain[False]
    assert len(drafts) > 5
    for context, draft in drafts[1::2]:
        model.forget()
        fresh = []

        def once(context, budget, parents=None, fresh=fresh):
            rows = propose(context, budget)
            fresh.append(rows.tokens[1:])
            return rows

        head.propose = once
        generate(model, prompt=context, tokens=len(draft) + 1, num_draft_tokens=4)
        del head.propose
        assert fresh[0][: len(draft)] == draft


@pytest.mark.parametrize("method", ["eagle,lookup", "eagle,trigram,lookup", "auto"])
@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_several_methods_at_once(model, plain, method, way):
    for _ in range(2):
        result = generate(model, method, way)
        assert result.token_ids == plain["temperature" in way]
        sequence = PROMPT + result.token_ids
        model.parts.follower.follow(sequence)  # the head may have had no round
        check_rows(model, sequence, len(PROMPT))


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_cascade_with_a_head(model, plain, way):
    result = generate(model, "cascade", way, num_draft_tokens=9)
    assert result.token_ids == plain["temperature" in way]
    assert result.stats.tokens_per_pass > 1.4
    check_rows(model, PROMPT + result.token_ids)


def test_behind_the_tokens_of_a_head_come_those_of_lookup(model):
    """They follow the same tokens earlier in the text."""
    head = model.planner.proposers()["eagle"]
    cascade = model.planner.proposers()["cascade"]
    for proposer in (head, cascade):
        proposer.begin(PROMPT, Chooser(Sampling()))
    follower = model.parts.follower
    follower.observe(0, PROMPT[:-1], features_of(PROMPT[:-1]))
    own = head.propose(PROMPT, REVIEWED).tokens[1:]
    # The head reads the last token and its place, so it says the same after this text.
    longer = [*own, 7, 8, 9, *PROMPT[len(own) + 3 :]]
    for proposer in (head, cascade):
        proposer.begin(longer, Chooser(Sampling()))
    follower.observe(0, longer[:-1], features_of(longer[:-1]))
    assert cascade.propose(longer, REVIEWED + 3).tokens[1:] == [*own, 7, 8, 9]


def test_a_head_goes_on_after_trusted_tokens(model, monkeypatch):
    head, cascade = (model.planner.proposers()[name] for name in ("eagle", "cascade"))
    follower, trusted = model.parts.follower, [7, 8]

    def begun(proposer):
        proposer.begin(PROMPT, Chooser(Sampling()))
        follower.observe(0, PROMPT[:-1], features_of(PROMPT[:-1]))
        return proposer

    behind = begun(head).propose([*PROMPT, *trusted], 3).tokens[1:]
    guesses = {0: Guess(trusted, 0.0, 4)}
    none = Guess([], 0.0, 0)
    monkeypatch.setattr(cascade.trust, "prefers", lambda evidence: True)
    monkeypatch.setattr(
        cascade.below, "after", lambda drafted, count: guesses.get(len(drafted), none)
    )
    assert begun(cascade).propose(PROMPT, REVIEWED).tokens[1:] == [*trusted, *behind]


def test_a_cancelled_round(model, plain):
    for stop in (1, 2, 5):
        stream = model.stream(
            token_ids=PROMPT, method="eagle", num_draft_tokens=4, max_new_tokens=60,
            ignore_eos=True,
        )  # fmt: skip
        for number, _ in enumerate(stream, 1):
            if number == stop:
                model.cancel()
        result = generate(model, num_draft_tokens=4)
        assert result.token_ids == plain[False]
        assert result.stats.reused_tokens >= len(PROMPT) - 2
        check_rows(model, PROMPT + result.token_ids)


def test_a_pass_that_failed_is_run_again(model, plain, monkeypatch):
    """After an interrupt between a pass and what it shows, rows are read again."""
    head = model.planner.proposers()["eagle"]
    observed = []

    def interrupt(seen):
        observed.append(seen)
        if len(observed) == 6:
            raise KeyboardInterrupt
        type(head).observe(head, seen)

    head.observe = interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(model, num_draft_tokens=4)
    del head.observe
    result = generate(model, num_draft_tokens=4)
    assert result.token_ids == plain[False]
    assert result.stats.acceptance_rate > 0.3
    check_rows(model, PROMPT + result.token_ids)


def test_the_capacity_ends_the_text(model):
    texts = [
        generate(model, method, tokens=10_000, **options).token_ids
        for method, options in (
            ("none", {}),
            ("eagle", {"num_draft_tokens": 7}),
            ("eagle", {"drafting": {"tree": "best"}}),
        )
    ]
    assert len(texts[0]) == CAPACITY - len(PROMPT)
    assert texts[1] == texts[2] == texts[0]


def test_the_next_turn_reads_only_what_is_new(model):
    """One row less than the target alone would keep: it has token and features."""
    first = generate(model, num_draft_tokens=3, tokens=20)
    longer = PROMPT + first.token_ids + [7, 8, 9]
    second = generate(model, num_draft_tokens=3, prompt=longer, tokens=20)
    held = len(PROMPT) + 20 - 1
    assert held - 4 <= second.stats.reused_tokens <= held
    check_rows(model, longer + second.token_ids)
    assert (
        second.token_ids == generate(model, "none", prompt=longer, tokens=20).token_ids
    )


@pytest.mark.parametrize("at", [0, 1, 40, 68, 69])
def test_a_prompt_that_differs_at_one_token(model, at):
    generate(model, num_draft_tokens=3, tokens=20)
    other = [*PROMPT[:at], (PROMPT[at] + 1) % 384, *PROMPT[at + 1 :]]
    result = generate(model, num_draft_tokens=3, prompt=other, tokens=20)
    assert result.stats.reused_tokens in (at, max(at - 1, 0))
    check_rows(model, other + result.token_ids)


def test_rows_that_the_head_missed_are_read_again(model):
    """It saw nothing of a turn by another method, and is fed no zeros for it."""
    first = generate(model, num_draft_tokens=3, tokens=10)
    longer = [*PROMPT, *first.token_ids, 5, 6]
    other = generate(model, "none", prompt=longer, tokens=20)
    assert other.stats.reused_tokens > len(PROMPT)
    third = [*longer, *other.token_ids, 7]
    result = generate(model, num_draft_tokens=3, prompt=third, tokens=20)
    assert result.stats.reused_tokens <= len(PROMPT) + 10
    check_rows(model, third + result.token_ids)
    assert result.stats.acceptance_rate > 0.3


def test_the_same_prompt_again(model, plain):
    for prompt in (PROMPT, PROMPT[:2], PROMPT[:1]):
        first, again = (
            generate(model, prompt=prompt, num_draft_tokens=3) for _ in range(2)
        )
        assert first.token_ids == again.token_ids
        assert again.stats.accepted_tokens == first.stats.accepted_tokens
        check_rows(model, prompt + again.token_ids)


def test_a_conversation(model):
    texts = []
    for method in ("none", "eagle"):
        model.forget()
        chat = Conversation(model, method=method, max_new_tokens=12, ignore_eos=True)
        texts.append(
            ["".join(p.text for p in chat.say(w)) for w in ("Hello", "So?", "A")]
        )
    assert texts[0] == texts[1]


def test_penalties_and_constraints(model):
    ways = [
        {"repetition_penalty": 1.4, **SAMPLED},
        {"logit_bias": {5: 3.0, 9: -100.0}},
        {"regex": "(robot|sensor)[a-z ]{20,30}\\."},
        {"regex": "[a-z]{9} and then the robot sees it, [a-z]{9}", **SAMPLED},
    ]
    for way in ways:
        texts = {
            tuple(generate(model, method, way, **options).token_ids)
            for method, options in (
                ("none", {}),
                ("eagle", {"num_draft_tokens": 4}),
                ("eagle", {"drafting": {"tree": "best"}}),
                ("eagle,lookup", {}),
            )
        }
        assert len(texts) == 1


def test_forced_tokens_are_fed_like_drafted_tokens(model):
    """The head drafts behind them, and does not keep their rows."""
    head, follower = model.planner.proposers()["eagle"], model.parts.follower
    head.begin(PROMPT, Chooser(Sampling()))
    follower.observe(0, PROMPT[:-1], features_of(PROMPT[:-1]))
    rows = head.propose([*PROMPT, 5, 6], 2)
    assert rows.drafted == 2
    check_rows(model, PROMPT, len(PROMPT) - 1)
    key = follower.graph.cache.buffers["past_key.0"].numpy()[0, 0]
    count = len(PROMPT) - 1
    assert key[count : count + 3, 0].tolist() == [5, 6, rows.tokens[1]]
    assert (key[count : count + 3, 1] > [STEP, 2 * STEP, 3 * STEP]).all()


@pytest.mark.parametrize("kind", [Kind.COUPLED, Kind.DISTINCT])
def test_a_row_of_a_tree_reads_what_its_parent_carries(model, kind):
    head = methods()["eagle"].make(
        model.parts,
        methods()["eagle"].options(
            tree="k-ary", branching=(2, 2, 1, 1), siblings=kind.value
        ),
    )
    follower = model.parts.follower
    head.begin(PROMPT, Chooser(Sampling(temperature=0.8, seed=1)))
    follower.observe(0, PROMPT[:-1], features_of(PROMPT[:-1]))
    head.propose(PROMPT, 15)
    key = follower.graph.cache.buffers["past_key.0"].numpy()[0, 0]
    count = len(PROMPT) - 1
    # The rows of three levels were asked about: 2 of the first, 4 of the others.
    drafted = key[count : count + 10]
    root = features_of(PROMPT[:-1])[-1, 0] + PROMPT[-1]
    parents = [None] * 2 + [0, 0, 1, 1] + [2, 3, 4, 5]
    for row, parent in zip(drafted, parents, strict=True):
        before = root if parent is None else sum(drafted[parent][:2])
        assert row[1] == before + STEP
    assert len({row[1] for row in drafted}) == 7
    check_rows(model, PROMPT, count)


def test_only_its_own_vocabulary_is_drafted(model):
    head = methods()["eagle"].make(
        model.parts, methods()["eagle"].options(tree="best", siblings="deterministic")
    )
    head.begin(PROMPT, Chooser(Sampling(temperature=1.5, seed=1)))
    model.parts.follower.observe(0, PROMPT[:-1], features_of(PROMPT[:-1]))
    rows = head.propose(PROMPT, 9)
    for q in rows.drawn_from.values():
        assert set(q.ids.tolist()) <= set(IDS.tolist())
        assert q.probabilities.sum() == pytest.approx(1.0)


@other_verifiers
def test_other_verifiers_keep_the_distribution(model, drafting):
    """The second token of the text, by a chi-square test of its commonest values."""
    prompt = PROMPT[:9]

    def draw(way, own):
        method = "none" if own is None else "eagle"
        return generate(model, method, way, prompt, 2, **(own or {}))

    check_distribution(draw, drafting, draws=1500)


def test_a_saved_prefix(model, bundle, tmp_path):
    file = tmp_path / "prefix.npz"
    model.save_prefix(file, PROMPT[:50])
    expected = generate(model, num_draft_tokens=3)
    with jetdraft.load(bundle, threads=1) as other:
        other.load_prefix(file)
        result = generate(other, num_draft_tokens=3)
        assert result.stats.reused_tokens == 50
        check_rows(other, PROMPT + result.token_ids)
    assert result.token_ids == expected.token_ids
    assert result.stats.accepted_tokens == expected.stats.accepted_tokens


def test_json(model):
    """A constraint masks the candidates of the head too."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 9, "maxLength": 20},
            "parts": {"type": "array", "items": {"type": "integer"}, "minItems": 3,
                      "maxItems": 5},
        },
        "required": ["name", "parts"],
        "additionalProperties": False,
    }  # fmt: skip
    for way in (GREEDY, SAMPLED):
        how = {
            "token_ids": PROMPT, "max_new_tokens": 100, "json_schema": schema, **way
        }  # fmt: skip
        plain = model.generate(method="none", **how)
        assert set(json.loads(plain.text)) == {"name", "parts"}
        for drafting in (
            {"method": "eagle", "num_draft_tokens": 4},
            {"method": "eagle", "drafting": {"tree": "best"}},
            {"method": "eagle,lookup"},
            {"method": "auto"},
        ):
            result = model.generate(**how, **drafting)
            assert result.token_ids == plain.token_ids
            if "num_draft_tokens" in drafting:
                assert result.stats.accepted_tokens > 0


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "random"])
def test_auto_does_not_choose_a_random_head_for_long(tmp_path, steady_passes, learned):
    """Where a learned head has nearly all rounds, a random head has few and loses them.

    It costs what a learned head costs.
    """
    source = toy_eagle(tmp_path / "bundle", GUESSES if learned else NOISE)
    with jetdraft.load(source, threads=1) as model:
        how = {"tokens": 100, "prompt": PROMPT[:20]}
        plain = generate(model, "none", **how)
        shares = []
        for _ in range(4):
            result = generate(model, "auto", **how)
            assert result.token_ids == plain.token_ids
            stats = result.stats
            rounds = (
                stats.by_method["eagle"].rounds if "eagle" in stats.by_method else 0
            )
            shares.append(rounds / stats.target_passes)
    if learned:
        assert min(shares) > 0.5
    else:
        assert 0 < max(shares) < 0.5
        assert max(shares[1:]) < 0.1


def test_its_cost_is_measured(tmp_path):
    with jetdraft.load(toy_eagle(tmp_path / "bundle"), threads=1) as model:
        curve = tune(model)
        assert curve.drafts["eagle"] > 0
        result = generate(model, num_draft_tokens=3)
        check_rows(model, PROMPT + result.token_ids)
        learned = model.parts.curve.drafts["eagle"]
        assert learned > 0


def test_twins_have_followers_of_their_own(bundle, plain):
    with jetdraft.Pool(bundle, size=2, threads=1) as pool:
        streams = [
            model.stream(
                token_ids=PROMPT, method="eagle", num_draft_tokens=4,
                max_new_tokens=60, ignore_eos=True,
            )
            for model in pool.models
        ]  # fmt: skip
        texts = [[], []]
        for pieces in zip(*streams, strict=True):
            for text, piece in zip(texts, pieces, strict=True):
                text.extend(piece.token_ids)
        assert texts == [plain[False]] * 2


def test_features_cross_to_a_device_and_back(bundle, plain, monkeypatch):
    """The memory of both graphs is staged as if it were a device's."""

    def staged(self, entry, weights):
        sessions = StepSessions(self.session(entry.tree_file), entry.widest_contract)
        compaction = self.compaction(entry.compaction_file)
        return Graph(sessions, compaction, Memory("cpu", copies=True))

    monkeypatch.setattr(Opener, "_on_cpu", staged)
    with jetdraft.load(bundle, threads=1) as model:
        for drafting in ({"num_draft_tokens": 4}, {"drafting": {"tree": "best"}}):
            result = generate(model, **drafting)
            assert result.token_ids == plain[False]
            assert result.stats.tokens_per_pass > 1.4
            check_rows(model, PROMPT + result.token_ids)


def test_without_features_there_is_no_draft(model):
    """A target that another program drives shows the head nothing."""
    head = model.planner.proposers()["eagle"]
    head.begin(PROMPT, Chooser(Sampling()))
    assert head.propose(PROMPT, 4).tokens == PROMPT[-1:]
    assert isinstance(model.planner.proposers()["lookup"], LookupProposer)


def test_a_drafter_is_no_head_and_a_head_is_no_drafter(model):
    with pytest.raises(jetdraft.OptionError, match="export with --drafter"):
        generate(model, "draft")
    with (
        jetdraft.load(jetdraft.testing.toy_bundle(), threads=1) as other,
        pytest.raises(jetdraft.OptionError, match="export with --head"),
    ):
        generate(other, "eagle")
