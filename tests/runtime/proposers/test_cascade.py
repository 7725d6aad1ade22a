from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest

from jetdraft.methods import Kind, Method, Proposer, Rows, Traits, registered
from jetdraft.methods.cascade import method
from jetdraft.methods.cascade.method import REVIEWED, Trial, Trust, _as_trials
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.rows import gapless_length
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import StepSessions, open_session
from jetdraft.runtime.proposers.lookup import Guess, LookupProposer
from jetdraft.runtime.proposers.model_proposer import ModelProposer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests.runtime.method_bundles import drafter_of

PROMPT = np.random.default_rng(5).integers(0, 288, 30).tolist()
WAYS = [Sampling(), Sampling(temperature=0.9, seed=4)]
RIGHT, WRONG, CASCADE = 4, 5, method.CascadeProposer
IDS = np.random.default_rng(11).integers(0, 288, 150).tolist()


class Told(LookupProposer):
    def __init__(self, truth, right, match=1):
        super().__init__()
        self.truth, self.right, self.match = truth, right, match

    def read(self, context):
        self.length = len(context)

    def guess_after(self, drafted, count):
        rest = self.truth[self.length + len(drafted) :][:count]
        wrong = [(t + 1) % 288 for t in rest[self.right :]]
        return Guess(rest[: self.right] + wrong, 0.0, self.match + len(drafted))


def graph(model):
    entry = model.bundle.drafter
    session = open_session(model.bundle.path / entry.file, "cpu")
    return Graph(StepSessions(session, entry.contract))


def alone(model, count, sampling=WAYS[0]):
    drafter = drafter_of(graph(model))
    drafter.begin(PROMPT, Chooser(sampling))
    return drafter, drafter.propose(PROMPT, count).tokens[1:]


def draft_of(cache, lookup):
    return ModelProposer(cache, Traits("draft", 15, Kind.COUPLED), lookup=lookup)


def cascade_of(model, truth, right, match=1, sampling=WAYS[0], make=CASCADE):
    below = Told([*PROMPT, *truth], right, match)
    cascade = make(DraftCache(graph(model)), below)
    cascade.begin(PROMPT, Chooser(sampling))
    return cascade, below.truth


def rights(cascade, truth, count):
    places = range(len(PROMPT), len(PROMPT) + count)
    return [cascade.propose(truth[:n], 3).tokens[1:] == truth[n:][:3] for n in places]


@pytest.mark.parametrize("sampling", WAYS, ids=str)
@pytest.mark.parametrize("right", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("make", [CASCADE, draft_of])
def test_reviewed_tokens_are_the_drafters_own(model, sampling, right, make):
    own = alone(model, 12, sampling)[1]
    cascade, truth = cascade_of(model, own, right, sampling=sampling, make=make)
    for length in range(len(PROMPT), len(PROMPT) + 4):
        found = cascade.propose(truth[:length], REVIEWED).tokens[1:]
        assert found == truth[length : length + REVIEWED]


@pytest.mark.parametrize("make", [CASCADE, draft_of])
def test_right_guesses_save_passes(model, make):
    drafter, own = alone(model, 12)
    cascade, _ = cascade_of(model, own, 9, make=make)
    cascade.propose(PROMPT, REVIEWED)
    assert cascade.cache.graph.passes == 2, "the prompt, then all guesses at once"
    assert drafter.cache.graph.passes == 12


@pytest.mark.parametrize("right", [0, 2, 9])
def test_a_reviewed_draft_ends_where_the_drafter_doubts(model, right):
    drafter, own = alone(model, 6)
    reviewing, _ = cascade_of(model, own, right, make=draft_of)
    drafts = {}
    for drafter.least in np.geomspace(1, 1e-12, 30):
        reviewing.least, plain = drafter.least, drafter.propose(PROMPT, 6).tokens
        assert reviewing.propose(PROMPT, 6).tokens == plain
        drafts[len(plain) - 1] = plain[1:]
    assert len(drafts) > 3
    for kept in range(6):  # the target takes these tokens, and chooses another
        other = [*PROMPT, *own[:kept], (own[kept] + 1) % 288]
        found = reviewing.propose(other, 6).tokens
        assert found == drafter.propose(other, 6).tokens
        assert reviewing.propose(PROMPT, 6).tokens[1:] == drafts[max(drafts)]


def test_the_tail_is_not_reviewed(model):
    cascade, truth = cascade_of(model, range(100, 120), 0)
    found = cascade.propose(PROMPT, REVIEWED + 3).tokens[1:]
    start = len(PROMPT) + REVIEWED
    assert found[REVIEWED:] == [t + 1 for t in truth[start : start + 3]]


def test_where_lookup_is_right_more_often_its_tokens_come(model):
    other = np.random.default_rng(6).integers(0, 288, 60).tolist()
    cascade, truth = cascade_of(model, other, 9, match=4)
    right = rights(cascade, truth, 40)
    assert not right[0], "the drafter comes first, and is nearly always wrong here"
    assert all(right[5:])
    passes = cascade.cache.graph.passes
    cascade.propose(truth[: len(PROMPT) + 40], 3)
    assert cascade.cache.graph.passes == passes, "trusted tokens need no pass"
    cascade.forget()
    assert cascade.propose(truth[: len(PROMPT) + 41], 3).tokens[1:] != truth[-19:][:3]


def test_where_lookup_is_wrong_the_drafter_chooses(model):
    cascade, truth = cascade_of(model, alone(model, 15)[1], 0, match=8)
    right = rights(cascade, truth, 12)
    assert not right[0], "after eight tokens a guess is trusted at first"
    assert all(right[2:])


def test_trusted_tokens_behind_a_doubtful_token_are_taken(model):
    """The drafter says the same first token, and would then go on by itself."""
    own = alone(model, 4)[1]
    other = [own[0], *[(token + 1) % 288 for token in own[1:]]]
    cascade, _ = cascade_of(model, other, 9, match=3)
    cascade.trust.prefers = lambda evidence: evidence > 2
    assert cascade.propose(PROMPT, 4).tokens[1:] == other
    cascade.trust.prefers = lambda evidence: False
    assert cascade.propose(PROMPT, 4).tokens[1:] == own


def test_a_guess_is_tried_up_to_its_first_difference():
    guess = Guess([5, 9, 1, 2], 0.0, match=3)
    trials = [(5, 5, 2), (6, 9, 3), (1, None, 3)]
    tried = [Trial(*trial, by_drafter=True) for trial in trials]
    assert _as_trials([5, 6, 1], guess, by_drafter=True) == tried
    right = [Trial(token, token, n, by_drafter=False) for token, n in ((5, 2), (9, 3))]
    assert _as_trials([5, 9], guess, by_drafter=False) == right
    assert _as_trials([6], Guess([], 0.0, 0), True) == [Trial(6, None, 0, True)]


def taught(own, guess, evidence=2, rounds=30):
    """After rounds of one token, in which both or either were right."""
    trust, context = Trust(), [1]
    for _ in range(rounds):
        token, guessed = (RIGHT if right else WRONG for right in (own, guess))
        trust.keep_draft(context, [Trial(token, guessed, evidence, by_drafter=True)])
        context = [*context, RIGHT]
        trust.learn(context)
    return trust


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("guess", [True, False])
def test_the_better_is_preferred(own, guess):
    assert taught(own, guess).prefers(2) == (guess and not own)


def test_long_matches_are_trusted_from_the_start_and_each_has_rates_of_its_own():
    trust = Trust()
    trusted = [trust.prefers(evidence) for evidence in (1, 2, 3, 4, 5)]
    assert trusted == [False, False, False, True, True]
    trust = taught(own=False, guess=True, evidence=1)
    assert trust.prefers(1)
    assert not trust.prefers(2), "the drafter may be right after longer matches"


def test_a_drafter_that_is_not_asked_gets_another_chance():
    trust, asked = taught(own=False, guess=True), 0
    for round_ in range(1500):
        own = not trust.prefers(2)
        asked += own
        guess = RIGHT if round_ % 5 else WRONG
        trust.keep_draft([1], [Trial(WRONG if own else guess, guess, 2, own)])
        trust.learn([1, RIGHT])
    assert 1 <= asked <= 9


def test_nothing_is_learned_behind_a_wrong_token():
    trust, behind = Trust(), Trial(WRONG, WRONG, 4, by_drafter=False)
    for _ in range(30):
        trust.keep_draft([1], [Trial(WRONG, None, 0, by_drafter=True), behind])
        trust.learn([1, RIGHT, RIGHT])
    assert trust.prefers(4)


def test_a_draft_counts_once():
    trust = Trust()
    trust.keep_draft([1], [Trial(RIGHT, WRONG, 4, by_drafter=True)])
    trust.learn([1, RIGHT])
    once = list(trust._rates[4][1].trials)
    trust.learn([1, RIGHT])
    assert trust._rates[4][1].trials == once == [1.0]


@pytest.mark.parametrize("gone", ["another sequence", "withdrawn tokens"])
def test_another_text_is_not_compared(gone):
    trust = Trust()
    for _ in range(30):
        trust.keep_draft([1, 2], [Trial(WRONG, WRONG, 4, by_drafter=False)])
        if gone == "another sequence":
            trust.begin()
        trust.learn([1, 3, RIGHT] if gone == "withdrawn tokens" else [1, 2, RIGHT])
    assert trust.prefers(4)


class Recorder(Proposer):
    traits = Traits("recorder", max_draft_tokens=15)

    def __init__(self, truth=(), branching=False):
        self.truth = list(truth)
        self.branching = branching
        self.shown = []

    def begin(self, prompt, chooser):
        self.shown = []

    def propose(self, context, budget, parents=None):
        random = np.random.default_rng(len(context))
        parents = list(range(-1, budget))
        if self.branching:
            parents = [-1, *(int(random.integers(row + 1)) for row in range(budget))]
        right, tokens = random.integers(budget + 1), [context[-1]]
        for row, depth in enumerate(Rows([0] * (budget + 1), parents).depths):
            if row:
                at = len(context) + depth - 1
                good = at < len(self.truth) and (self.branching or depth <= right)
                good = good and not (self.branching and random.random() < 0.3)
                tokens.append(self.truth[at] if good else int(random.integers(288)))
        return Rows(tokens, parents)

    def observe(self, seen):
        answers = seen.answer.candidates.shape[0]
        self.shown.append((seen.length, seen.rows, list(seen.path), answers))


def run(model, prompt, recorder, tokens=40, length=4, **options):
    how = {"max_new_tokens": tokens, "num_draft_tokens": length, "ignore_eos": True}
    with registered(Method("recorder", "records", lambda parts, own: recorder)):
        result = model.generate(token_ids=prompt, method="recorder", **how, **options)
    return [*prompt, *result.token_ids]


def prefill(recorder, prompt):
    return [shown for shown in recorder.shown if shown[0] <= len(prompt)]


@pytest.mark.parametrize("length", [1, 2, 33, 100])
def test_every_pass_over_a_prompt_is_shown(model, length):
    prompt, recorder = IDS[:length], Recorder()
    model.forget()
    run(model, prompt, recorder)
    passes = prefill(recorder, prompt)
    assert [t for _, rows, _, _ in passes for t in rows.tokens] == prompt[:-1]
    assert all(rows.is_chain for _, rows, _, _ in passes)
    assert all(path == list(range(len(rows))) for _, rows, path, _ in passes)
    read = accumulate(len(rows) for _, rows, _, _ in passes)
    assert [shown[0] for shown in passes] == [rows + 1 for rows in read]
    assert {answers for *_, answers in passes} <= {1}
    assert recorder.shown[: len(passes)] == passes, "before any round"


def test_rows_that_are_kept_are_not_shown_again(model):
    first, second = Recorder(), Recorder()
    model.forget()
    run(model, IDS[:60], first)
    run(model, IDS[:100], second)
    passes = prefill(second, IDS[:100])
    assert [t for _, rows, _, _ in passes for t in rows.tokens] == IDS[60:99]
    assert passes[0][0] == 60 + len(passes[0][1]) + 1
    run(model, IDS[:100], second)
    assert prefill(second, IDS[:100]) == []


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=str)
@pytest.mark.parametrize("skips_agree", [True, False])
@pytest.mark.parametrize("shape", ["chain", "not exact", "tree"])
def test_every_outcome_is_shown(model, sampling, skips_agree, shape, monkeypatch):
    """Rows beyond a gap of a tree that are not proven come again in the next pass."""
    known = replace(model.parts.widths, skips_agree=skips_agree)
    monkeypatch.setattr(model.parts.survey, "_widths", known)
    prompt, most = IDS[:20], 7 if shape == "tree" else 4
    options = {**sampling, "exact": shape != "not exact", "tokens": 150, "length": most}
    truth = run(model, prompt, Recorder(), **options)
    recorder = Recorder(truth, branching=shape == "tree")
    text = run(model, prompt, recorder, **options)
    length, gaps, accepted = len(prompt), 0, set()
    for shown, rows, path, answers in recorder.shown[len(prefill(recorder, prompt)) :]:
        assert path[0] == 0
        assert all(rows.parents[b] == a for a, b in pairwise(path))
        proven = len(path) if skips_agree else gapless_length(path)
        tokens = [rows.tokens[row] for row in path[:proven]]
        assert tokens == text[length - 1 :][:proven]
        assert answers == len(rows)
        assert shown == length + len(path)
        length += proven
        gaps += gapless_length(path) < len(path)
        accepted.add(len(path) - 1)
    assert shape == "tree" or accepted >= set(range(5)), "each count from 0 to 4"
    assert gaps > 3 if shape == "tree" else gaps == 0
    assert length == len(text)


def test_all_proposers_are_shown_what_one_of_them_drafted(model):
    prompt, silent, chatty = IDS[:20], Recorder(), Recorder()
    chatty.truth = run(model, prompt, Recorder())
    silent.propose = lambda context, budget, parents=None: Rows.chain([context[-1]])
    silent.traits = Traits("silent", max_draft_tokens=4)
    with (
        registered(Method("silent", "nothing", lambda parts, own: silent)),
        registered(Method("recorder", "records", lambda parts, own: chatty)),
    ):
        model.generate(token_ids=prompt, method="silent,recorder", max_new_tokens=40)
    assert silent.shown == chatty.shown
    assert len(silent.shown) > 2
