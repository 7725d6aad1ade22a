"""A drafter's rows follow the text; here a row has its token and its inputs."""

import numpy as np
import pytest

import jetdraft
from jetdraft.bench.tuning import tune
from jetdraft.methods import Method, Proposer, Rows, Traits, registered
from jetdraft.methods.cascade.method import REVIEWED
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.passes import buffers, opener, session
from jetdraft.runtime.planning.controller import AdaptiveController
from jetdraft.runtime.planning.registry import methods
from jetdraft.runtime.proposers.lookup import Guess
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests import cases
from tests.runtime.method_bundles import handmade
from tests.toy_graphs import BLOCK, GUESSES, IDS, NOISE, STEP, WIDTH, features_of

PROMPT = np.random.default_rng(5).integers(4, 384, 70).tolist()
"""Longer than the widest pass, so that it is read in several."""

GREEDY, SAMPLED = {}, {"temperature": 0.8, "seed": 3}
both_ways = pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
HEADS, BLOCKS = ("eagle", "chimera"), ("dflash", "diffusion")
ALL = {"confidence": 0.0}
"""The whole block is verified."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    for method in (*HEADS, *BLOCKS):
        handmade(folder / method, method)
    return {method: folder / method for method in (*HEADS, *BLOCKS)}


@pytest.fixture(params=[*HEADS, *BLOCKS])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def loaded(bundles):
    models = {name: jetdraft.load(bundles[name], threads=1) for name in bundles}
    yield models
    for model in models.values():
        model.close()


@pytest.fixture
def model(loaded, method):
    loaded[method].forget()
    return loaded[method]


@pytest.fixture(scope="module")
def plain(loaded):
    model = loaded["eagle"]
    return [generate(model, "none", way).token_ids for way in (GREEDY, SAMPLED)]


def request_of(method, way=GREEDY, prompt=PROMPT, tokens=60, **options):
    how = {"token_ids": prompt, "method": method, "ignore_eos": True}
    return {**how, "max_new_tokens": tokens, **way, **options}


def generate(model, *request, **options):
    return model.generate(**request_of(*request, **options))


def chain(method, count):
    """The options of chains of `count` tokens, whose doubtful ends stay."""
    return {"num_draft_tokens": count, "drafting": ALL if method in BLOCKS else {}}


def check_rows(model, sequence, at_least=1):
    cache = model.parts.draft_cache
    fed, shift = len(cache.tokens), cache.shift
    assert fed >= at_least
    key, value = (b.numpy()[0, 0, :fed] for b in cache.graph.cache.buffers.values())
    assert np.array_equal(key, value)
    assert key[:, 0].tolist() == sequence[shift : fed + shift]
    features = features_of(sequence)
    assert np.array_equal(key[:, 1 : 1 + WIDTH], features[:fed])
    if shift:
        seen = len(cache.seen)
        assert cache.seen == sequence[:seen]
        waiting = np.reshape(cache._features, (-1, WIDTH))
        assert np.array_equal(waiting, features[fed:seen])


def same_as_plain(model, method, plain, **options):
    """The stats of a generation whose text and rows are right."""
    result = generate(model, method, **options)
    assert result.token_ids == plain[0]
    check_rows(model, PROMPT + result.token_ids)
    return result.stats


def begun(model, proposer, context=PROMPT, sampling=Sampling()):  # noqa: B008
    proposer.begin(context, Chooser(sampling))
    model.parts.draft_cache.observe(0, context[:-1], features_of(context[:-1]))
    return proposer


def made(model, method, **options):
    record = methods()[method]
    return record.make(model.parts, record.options(**options))


def follow(model, method, way, drafting):
    """The text and stats of a generation, after each round of which rows are right."""
    sequence = list(PROMPT)
    stream = model.stream(**request_of(method, way, **drafting))
    for piece in stream:
        before, sequence = len(sequence), sequence + piece.token_ids
        # In the last round there is no room for a draft, so nothing is fed.
        is_last = len(sequence) == len(PROMPT) + 60 or not piece.token_ids
        check_rows(model, sequence, 1 if is_last else before - 1)
    return sequence[len(PROMPT) :], stream.stats


@both_ways
@pytest.mark.parametrize("count", [1, 3, BLOCK + 2])
def test_each_round_of_chains(model, method, plain, way, count):
    tokens, stats = follow(model, method, way, chain(method, count))
    assert tokens == plain["temperature" in way]
    assert stats.tokens_per_pass > (1.4 if method in HEADS or not way else 1.2)
    accepted, evaluated = stats.accepted_counts[:3], stats.evaluated_by_position[:3]
    assert min(accepted) > 0
    assert all(a < e for a, e in zip(accepted, evaluated, strict=True))
    assert method in HEADS or len(stats.evaluated_by_position) <= BLOCK


@both_ways
@cases("tree", "best", "heap", "comb", "threshold", "rerank", "merged")
def test_each_round_of_trees(model, method, plain, way, tree):
    drafting = {"drafting": {"tree": tree}, "exact": tree in ("best", "heap", "comb")}
    tokens, stats = follow(model, method, way, drafting)
    assert tokens == plain["temperature" in way]
    assert stats.tokens_per_pass > 1.2


@pytest.mark.parametrize("method", BLOCKS)
def test_every_number_of_tokens_of_a_block_is_accepted(model, method):
    way = request_of(method, tokens=110, **chain(method, BLOCK))
    result = model.stream(**way)
    assert {len(piece.token_ids) - 1 for piece in result} >= set(range(BLOCK + 1))


def test_a_cancelled_round(model, method, plain):
    for stop in (1, 2, 5):
        with model.stream(token_ids=PROMPT, method=method, ignore_eos=True) as stream:
            for _ in range(stop):
                next(stream)
        stats = same_as_plain(model, method, plain, num_draft_tokens=4)
        assert stats.reused_tokens >= len(PROMPT) - 2


def test_a_pass_that_failed_is_run_again(model, method, plain):
    proposer, observed = model.planner.proposers()[method], []

    def interrupt(seen):
        observed.append(seen)
        if len(observed) == 6:
            raise KeyboardInterrupt
        type(proposer).observe(proposer, seen)

    proposer.observe = interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(model, method, num_draft_tokens=4)
    del proposer.observe
    stats = same_as_plain(model, method, plain, num_draft_tokens=4)
    assert stats.acceptance_rate > 0.3


def test_the_next_turn_reads_only_what_is_new(model, method):
    """One row less than the target alone would keep: it has token and features."""
    first = generate(model, method, num_draft_tokens=3, tokens=20)
    longer = PROMPT + first.token_ids + [7, 8, 9]
    second = generate(model, method, num_draft_tokens=3, prompt=longer, tokens=20)
    held = len(PROMPT) + 20 - 1
    assert held - 4 <= second.stats.reused_tokens <= held
    check_rows(model, longer + second.token_ids)


@pytest.mark.parametrize("at", [0, 1, 40, 68, 69])
def test_a_prompt_that_differs_at_one_token(model, method, at):
    generate(model, method, num_draft_tokens=3, tokens=20)
    other = [*PROMPT[:at], (PROMPT[at] + 1) % 384, *PROMPT[at + 1 :]]
    result = generate(model, method, num_draft_tokens=3, prompt=other, tokens=20)
    if method in HEADS:
        assert result.stats.reused_tokens in (at, max(at - 1, 0))
    check_rows(model, other + result.token_ids)


@pytest.mark.parametrize("method", [*HEADS, "dflash"])
def test_rows_that_the_head_missed_are_read_again(model, method):
    first = generate(model, method, num_draft_tokens=3, tokens=10)
    longer = [*PROMPT, *first.token_ids, 5, 6]
    other = generate(model, "none", prompt=longer, tokens=20)
    assert other.stats.reused_tokens > len(PROMPT)
    third = [*longer, *other.token_ids, 7]
    result = generate(model, method, num_draft_tokens=3, prompt=third, tokens=20)
    assert result.stats.reused_tokens <= len(PROMPT) + 10
    check_rows(model, third + result.token_ids)
    assert result.stats.acceptance_rate > 0.3


def test_the_same_prompt_again(model, method):
    for prompt in (PROMPT, PROMPT[:2], PROMPT[:1]):
        first, again = (
            generate(model, method, prompt=prompt, num_draft_tokens=3) for _ in range(2)
        )
        assert first.token_ids == again.token_ids
        assert again.stats.accepted_tokens == first.stats.accepted_tokens
        check_rows(model, prompt + again.token_ids)


def test_the_catch_up_is_the_first_draft_and_its_cost_is_measured(model, method):
    """The prompt of 70 tokens is read in passes of 32, the last of which drafts too."""
    assert tune(model).drafts[method] > 0
    model.forget()
    before = model.parts.drafter.passes
    result = generate(model, method, num_draft_tokens=3)
    each = 3 if method in HEADS else 1
    passes = model.parts.drafter.passes - before
    assert passes <= each * result.stats.target_passes + 2
    check_rows(model, PROMPT + result.token_ids)
    assert model.parts.curve.drafts[method] > 0


def test_a_catch_up_leaves_the_row_that_drafts(model, method):
    """So what a draft takes after a pause is what it takes without."""
    cache, context = model.parts.draft_cache, [*PROMPT, *PROMPT]
    model.forget()
    cache.catch_up(context)
    assert cache.tokens == ([] if cache.reads else context[:-1])


def test_reads_of_earlier_rounds_are_in_no_time_of_a_round(model, method, monkeypatch):
    rounds = []

    def observe(self, round_):
        rounds.append(round_)

    monkeypatch.setattr(AdaptiveController, "observe", observe)
    monkeypatch.setitem(model.parts.curve.drafts, method, 0.0)
    model.forget()
    generate(model, method)
    assert any(round_.late for round_ in rounds)
    assert all(r.draft_seconds < r.seconds for r in rounds if r.seconds)


class Turns(Proposer):
    """A method in every other round; between them a proposer that is right or wrong."""

    traits = Traits("turns", max_draft_tokens=15, kind=Kind.COUPLED)

    def __init__(self, inner, text):
        self.inner, self.text, self.round = inner, PROMPT + text, 0

    def begin(self, prompt, chooser):
        self.inner.begin(prompt, chooser)

    def keep(self, kept):
        return self.inner.keep(kept)

    def propose(self, context, budget, parents=None):
        self.round += 1
        if self.round % 2:
            return self.inner.propose(context, budget)
        guess = self.text[len(context) : len(context) + budget]
        if guess and self.round % 4 == 0:
            guess[-1] = (guess[-1] + 1) % 384
        return Rows.chain([context[-1], *guess])

    def observe(self, seen):
        self.inner.observe(seen)


def test_rounds_of_others_change_nothing(model, method, plain):
    proposer = made(model, method)
    propose, drafts, sequence = proposer.propose, [], list(PROMPT)

    def spy(context, budget):
        rows = propose(context, budget)
        drafts.append((list(context), rows.tokens[1:]))
        return rows

    proposer.propose = spy
    turns = Turns(proposer, plain[0])
    with registered(Method("turns", "in turn", lambda loaded, options: turns)):
        for piece in model.stream(**request_of("turns", num_draft_tokens=4)):
            sequence += piece.token_ids
            check_rows(model, sequence)
    assert sequence == PROMPT + plain[0]
    assert len(drafts) > 5
    for context, draft in drafts[1::2]:
        model.forget()
        fresh = begun(model, made(model, method), context).propose(context, 4)
        assert fresh.tokens[1:][: len(draft)] == draft


def test_twins_have_caches_of_their_own(model, method, plain):
    how = request_of(method, num_draft_tokens=4)
    with model.twin() as twin:
        streams = [one.stream(**how) for one in (model, twin)]
        texts = [[], []]
        for pieces in zip(*streams, strict=True):
            for text, piece in zip(texts, pieces, strict=True):
                text.extend(piece.token_ids)
        assert texts == [plain[0]] * 2


def test_rows_cross_to_a_device_and_back(bundles, method, plain, monkeypatch):
    """The memory of both graphs is staged as if it were a device's."""

    def staged(self, entry, weights):
        file = entry.tree_file or entry.file
        sessions = session.StepSessions(self.session(file), entry.widest_contract)
        return sessions, buffers.Memory("cpu", copies=True), None

    monkeypatch.setattr(opener.Opener, "_open_on_cpu", staged)
    ways = [{"num_draft_tokens": 4}, {"drafting": {"tree": "best"}}]
    if method in BLOCKS:
        ways.append({"num_draft_tokens": 4, "drafting": {"steps": 2}})
    with jetdraft.load(bundles[method], threads=1) as model:
        for way in ways:
            assert same_as_plain(model, method, plain, **way).tokens_per_pass > 1.2


@pytest.mark.parametrize("method", HEADS)
def test_forced_tokens_are_fed_like_drafted_tokens(model, method):
    rows = begun(model, made(model, method)).propose([*PROMPT, 5, 6], 2)
    assert rows.drafted == 2
    check_rows(model, PROMPT, len(PROMPT) - 1)
    key = model.parts.drafter.cache.buffers["past_key.0"].numpy()[0, 0]
    count = len(PROMPT) - 1
    assert key[count : count + 3, 0].tolist() == [5, 6, rows.tokens[1]]
    assert (key[count : count + 3, 1] > [STEP, 2 * STEP, 3 * STEP]).all()


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("kind", [Kind.COUPLED, Kind.DISTINCT])
def test_a_row_of_a_tree_reads_what_its_parent_carries(model, method, kind):
    tree = {"tree": "k-ary", "branching": (2, 2, 1, 1), "siblings": kind.value}
    sampling = Sampling(temperature=0.8, seed=1)
    begun(model, made(model, method, **tree), sampling=sampling).propose(PROMPT, 15)
    key = model.parts.drafter.cache.buffers["past_key.0"].numpy()[0, 0]
    count = len(PROMPT) - 1
    # The rows of three levels were asked about: 2 of the first, 4 of the others.
    drafted = key[count : count + 10]
    root = features_of(PROMPT[:-1])[-1, 0] + PROMPT[-1]
    parents = [None] * 2 + [0, 0, 1, 1] + [2, 3, 4, 5]
    for row, parent in zip(drafted, parents, strict=True):
        assert row[1] == (root if parent is None else sum(drafted[parent][:2])) + STEP
    assert len({row[1] for row in drafted}) == 7
    check_rows(model, PROMPT, count)


@pytest.mark.parametrize("method", HEADS)
def test_only_its_own_vocabulary_is_drafted(model, method):
    proposer = made(model, method, tree="best", siblings="deterministic")
    sampling = Sampling(temperature=1.5, seed=1)
    rows = begun(model, proposer, sampling=sampling).propose(PROMPT, 9)
    for q in rows.drawn_from.values():
        assert set(q.ids.tolist()) <= set(IDS.tolist())
        assert q.probabilities.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("method", [*HEADS, "dflash"])
def test_without_features_there_is_no_draft(model, method):
    """A target that another program drives shows the head nothing."""
    head = made(model, method)
    head.begin(PROMPT, Chooser(Sampling()))
    assert head.propose(PROMPT, 4).tokens == PROMPT[-1:]


@pytest.mark.parametrize("method", BLOCKS)
def test_a_second_pass_costs_a_pass(model, method, plain):
    before = model.parts.drafter.passes
    how = {"num_draft_tokens": BLOCK, "drafting": {"steps": 2, **ALL}}
    rounds = same_as_plain(model, method, plain, **how).target_passes
    passes = model.parts.drafter.passes - before
    assert 1.5 * rounds < passes <= 2 * rounds + 3


@pytest.mark.parametrize("method", BLOCKS)
def test_a_second_pass_knows_the_first_half(model, method):
    """With noise the first half is often not the best guess, as the rest supposes."""
    tokens_per_pass = {}
    for steps in (1, 2):
        how = {"num_draft_tokens": BLOCK, "drafting": {"steps": steps, **ALL}}
        how |= {"prompt": PROMPT[:20], "tokens": 150}
        ways = [{"temperature": 0.8, "seed": seed} for seed in range(4)]
        stats = [generate(model, method, way, **how).stats for way in ways]
        passes = sum(one.target_passes for one in stats)
        tokens_per_pass[steps] = sum(one.new_tokens for one in stats) / passes
    assert tokens_per_pass[2] > tokens_per_pass[1] > 1.5


def best_after(method, token, position):
    row = GUESSES[(token + 7 * position) % 384]
    return int(row.argmax() if method == "diffusion" else IDS[row[IDS].argmax()])


@pytest.mark.parametrize("method", BLOCKS)
def test_a_second_pass_guesses_what_a_block_of_known_tokens_says(model, method):
    drafts, half = {}, (BLOCK + 1) // 2
    for steps in (1, 2):
        model.forget()
        proposer = made(model, method, steps=steps, confidence=0.0)
        begun(model, proposer, sampling=Sampling(temperature=1.5, seed=8))
        drafts[steps] = proposer.propose(PROMPT, BLOCK).tokens[1:]
    assert drafts[1][:half] == drafts[2][:half]
    assert drafts[1][half:] != drafts[2][half:]
    row = GUESSES[(drafts[2][half - 1] + 7 * (len(PROMPT) - 1 + half)) % 384].copy()
    if method == "dflash":
        row[[i for i in range(384) if i not in set(IDS.tolist())]] = -np.inf
    assert drafts[2][half] in np.argsort(-row)[:64]


@pytest.mark.parametrize("method", BLOCKS)
def test_tokens_that_the_target_has_not_run(model, method):
    proposer = begun(model, made(model, method, confidence=0.0, steps=2))
    context = [*PROMPT, 5, 6]
    drafted = proposer.propose(context, BLOCK).tokens[1:]
    assert len(drafted) == (BLOCK - 2 if method == "dflash" else BLOCK)
    before = [6, *drafted]
    for place, token in enumerate(drafted, len(context) - 1):
        assert token == best_after(method, before[place - len(context) + 1], place)
    if method == "dflash":
        proposer.begin(PROMPT, Chooser(Sampling()))
        assert proposer.propose([*PROMPT, *range(BLOCK)], 3).drafted == 0


@pytest.mark.parametrize("method", BLOCKS)
def test_a_doubtful_block_is_verified_in_part(model, method, plain):
    stats = []
    for confidence in (0.0, 0.3, 1.0):
        how = {"num_draft_tokens": BLOCK, "drafting": {"confidence": confidence}}
        stats.append(same_as_plain(model, method, plain, **how))
    whole, some, least = stats
    assert whole.drafted_tokens > some.drafted_tokens > least.drafted_tokens
    assert least.drafted_tokens <= least.target_passes  # one token each
    assert some.acceptance_rate >= whole.acceptance_rate


@pytest.mark.parametrize("method", ["eagle", "dflash"])
@cases(
    "verifier, branching, siblings",
    ("rejection", (1, 1, 1), "with-replacement"),
    ("recursive", (2, 1), "without-replacement"),
)
def test_verifiers_keep_the_distribution(model, method, verifier, branching, siblings):
    """The first two tokens of texts, by a chi-square test of their commonest values."""
    tree = {"tree": "k-ary", "branching": branching, "siblings": siblings}
    own = {"drafting": {"verifier": verifier, **tree}, "exact": False}
    texts = {"none": [], method: []}
    for seed in range(600):
        way = {"temperature": 0.7, "top_k": 5, "seed": seed}
        for name, options in (("none", {}), (method, own)):
            result = generate(model, name, way, PROMPT[:9], 2, **options)
            texts[name].append(tuple(result.token_ids))
    plain, drafted = texts.values()
    common = sorted(set(plain), key=plain.count)[-8:]
    pairs = [(plain.count(text), drafted.count(text)) for text in common]
    spread = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    assert spread < 24.3  # 0.1 % of 7 degrees of freedom


@pytest.mark.parametrize("method", ["eagle"])
@both_ways
def test_a_cascade_with_a_head(model, plain, way):
    result = generate(model, "cascade", way, num_draft_tokens=9)
    assert result.token_ids == plain["temperature" in way]
    assert result.stats.tokens_per_pass > 1.4
    check_rows(model, PROMPT + result.token_ids)


@pytest.mark.parametrize("method", ["eagle"])
def test_behind_the_tokens_of_a_head_come_those_of_lookup(model):
    head, cascade = made(model, "eagle"), made(model, "cascade")
    own = begun(model, head).propose(PROMPT, REVIEWED).tokens[1:]
    # The head reads the last token and its place, so it says the same after this text.
    longer = [*own, 7, 8, 9, *PROMPT[len(own) + 3 :]]
    drafted = begun(model, cascade, longer).propose(longer, REVIEWED + 3)
    assert drafted.tokens[1:] == [*own, 7, 8, 9]


@pytest.mark.parametrize("method", ["eagle"])
def test_a_head_goes_on_after_trusted_tokens(model, monkeypatch):
    head, cascade, trusted = made(model, "eagle"), made(model, "cascade"), [7, 8]
    behind = begun(model, head).propose([*PROMPT, *trusted], 3).tokens[1:]
    guesses, none = {0: Guess(trusted, 0.0, 4)}, Guess([], 0.0, 0)
    monkeypatch.setattr(cascade.trust, "prefers", lambda evidence: True)
    monkeypatch.setattr(
        *(cascade.below, "guess_after"),
        lambda drafted, count: guesses.get(len(drafted), none),
    )
    drafted = begun(model, cascade).propose(PROMPT, REVIEWED)
    assert drafted.tokens[1:] == [*trusted, *behind]


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "random"])
def test_auto_does_not_choose_a_random_drafter_for_long(
    tmp_path, steady_passes, method, learned
):
    """Where a learned drafter has nearly all rounds, a random one soon loses them."""
    handmade(tmp_path / "bundle", method, GUESSES if learned else NOISE)
    with jetdraft.load(tmp_path / "bundle", threads=1) as model:
        how, shares = {"tokens": 100, "prompt": PROMPT[:20]}, []
        plain = generate(model, "none", **how)
        for _ in range(4):
            result = generate(model, "auto", **how)
            assert result.token_ids == plain.token_ids
            share = result.stats.by_method.get(method)
            shares.append((share.rounds if share else 0) / result.stats.target_passes)
    if learned:
        assert min(shares) > 0.5
    elif method in HEADS:
        assert 0 < max(shares) < 0.5
        assert max(shares[1:]) < 0.1
    else:
        assert sum(shares[1:]) / 3 < 0.2
