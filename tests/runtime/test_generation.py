import ast
import inspect
import sys
import textwrap

import numpy as np
import pytest

from jetdraft.methods import Proposer, Rows, Traits
from jetdraft.runtime.generation import Generation
from jetdraft.runtime.measured.cost_model import Curve
from jetdraft.runtime.measured.stats import Acceptance
from jetdraft.runtime.passes.binding import PassBinding
from jetdraft.runtime.sampling.chooser import Sampling
from tests.runtime.method_bundles import tokens_of

PROMPT = np.random.default_rng(8).integers(0, 288, 20)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=2),
    Sampling(temperature=1.2, seed=3, top_k=40, top_p=0.95),
]


class Scripted(Proposer):
    """Proposes from the known text, and `spoil` makes some of its tokens wrong."""

    traits = Traits("scripted", max_draft_tokens=15)

    def __init__(self, truth, spoil):
        self.truth = np.concatenate([PROMPT, truth])
        self.spoil = spoil

    def begin(self, prompt, chooser):
        self.expected = len(prompt)

    def propose(self, context, budget, parents=None):
        assert len(context) == self.expected, "the public sequence is out of step"
        tokens = self.truth[len(context) : len(context) + budget].copy()
        tokens = self.spoil(tokens, len(context))
        return Rows.chain([int(context[-1]), *tokens.tolist()])

    def observe(self, seen):
        if seen.length > len(PROMPT):
            # A guess that held has the row after it accepted, whose answer this is.
            assert seen.answer.logits.shape[0] > seen.path[-1]
        else:
            assert seen.answer.logits.shape[0] == 1  # a prefill answers for its end
        self.expected = seen.length


def always_right(tokens, at):
    return tokens


def always_wrong(tokens, at):
    return (tokens + 1) % 288


def empty(tokens, at):
    return tokens[:0]


def sometimes_right(tokens, at):
    spoiled = tokens.copy()
    spoiled[np.random.default_rng(at).integers(len(tokens) + 1) :] += 1
    return spoiled % 288


class Branching(Scripted):
    traits = Traits("branching", max_draft_tokens=15)

    def __init__(self, truth):
        super().__init__(truth, None)

    def propose(self, context, budget, parents=None):
        random, text = np.random.default_rng(len(context)), self.truth.tolist()
        parents = [-1, *(int(random.integers(0, row)) for row in range(1, budget + 1))]
        tokens = [int(context[-1])]
        for depth in Rows([0] * (budget + 1), parents).depths[1:]:
            at = len(context) + depth - 1
            right = random.random() < 0.7 and at < len(text)
            tokens.append(text[at] if right else int(random.integers(288)))
        rows = Rows(tokens, parents)
        return rows.depth_first() if random.random() < 0.5 else rows


def proposer_of(truth, spoil):
    return Branching(truth) if spoil is Branching else Scripted(truth, spoil)


SPOILS = [always_right, always_wrong, empty, sometimes_right, Branching]


def generate(model, sampling, proposer=None, length=4, **options):
    return tokens_of(model, PROMPT, sampling, proposer, length=length, **options)


@pytest.fixture(scope="module")
def plain(model):
    return {sampling: generate(model, sampling)[0] for sampling in SAMPLINGS}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("length", [1, 4, 15])
def test_the_text_is_that_of_plain_decoding(model, plain, sampling, spoil, length):
    ids, stats = generate(model, sampling, proposer_of(plain[sampling], spoil), length)
    assert ids == plain[sampling]
    assert stats.new_tokens == 200
    assert sum(stats.rounds_by_choice.values()) == stats.target_passes
    if spoil is not Branching:  # the length limit may cut the last round short
        cut = stats.target_passes + stats.accepted_tokens - stats.new_tokens
        assert 0 <= cut <= length
    elif length > 1:
        assert stats.tokens_per_pass > 1.3
    if spoil is always_right:
        assert stats.acceptance_rate == 1.0
        assert stats.target_passes == -(-200 // (length + 1))
    if spoil in (always_wrong, empty):
        assert (stats.accepted_tokens, stats.target_passes) == (0, 200)
    if spoil is sometimes_right and length == 4:
        accepted, seen = stats.accepted_counts, stats.evaluated_by_position
        assert all(0 < a < e for a, e in zip(accepted, seen, strict=True))


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 8])
def test_the_length_limit_inside_a_draft(model, plain, spoil, limit):
    proposer = proposer_of(plain[SAMPLINGS[1]], spoil)
    ids, stats = generate(model, SAMPLINGS[1], proposer, 5, tokens=limit)
    assert ids == plain[SAMPLINGS[1]][:limit]
    assert stats.finish_reason == "length"


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_end_of_text_inside_a_draft(model, plain, spoil, at):
    text = plain[SAMPLINGS[1]]
    eos = next(t for i, t in enumerate(text) if i >= at and text.index(t) == i)
    ids, stats = generate(model, SAMPLINGS[1], proposer_of(text, spoil), 5, eos=(eos,))
    assert ids == text[: text.index(eos) + 1]
    assert stats.finish_reason == "stop"


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("exact", [True, False])
def test_the_capacity_ends_the_text_and_is_never_passed(model, spoil, exact):
    room = model.parts.target.cache.capacity - len(PROMPT)
    full, stats = generate(model, SAMPLINGS[0], tokens=10_000)
    assert len(full) == room
    assert stats.finish_reason == "length"
    proposer = proposer_of(np.array(full), spoil)
    way = {"length": 7, "tokens": 10_000, "exact": exact}
    ids, stats = generate(model, SAMPLINGS[0], proposer, **way)
    assert (len(ids), stats.finish_reason) == (room, "length")
    assert ids == full or not exact
    last = model.parts.target.cache.length - len(PROMPT)
    assert last == room - 1 or (spoil is Branching and last <= room)


@pytest.mark.parametrize("widths", [[2, 3, 4, 5], [2, 4, 8], [4, 6], [3]])
def test_only_the_widths_of_a_class_are_used(model, plain, widths, monkeypatch):
    used, run = [], model.parts.target.run
    monkeypatch.setattr(
        model.parts.target,
        "run",
        lambda t, **o: (used.append(o.get("width")), run(t, **o))[1],
    )
    text = plain[SAMPLINGS[0]]
    proposer = Scripted(text, sometimes_right)
    ids, _ = generate(model, SAMPLINGS[0], proposer, 4, widths=widths)
    assert ids == text
    assert set(used[1:]) <= set(widths)  # the first pass is the prefill


def test_adaptive_control_does_not_change_the_text(model, plain, monkeypatch):
    sampling = SAMPLINGS[2]
    proposer = Scripted(plain[sampling], sometimes_right)
    curve = Curve({w: 1 + 0.05 * w for w in range(1, 17)})
    monkeypatch.setattr(model.parts, "_curve", curve)
    monkeypatch.setattr(model.planner, "acceptance", {"scripted": Acceptance()})
    ids, stats = generate(model, sampling, proposer, length=None)
    assert ids == plain[sampling]
    assert len(stats.rounds_by_choice) > 1


def test_a_round_is_one_function_of_a_screen():
    """Propose, verify and commit, in this order, in at most 60 lines."""
    source = textwrap.dedent(inspect.getsource(Generation._run_round))
    assert len(source.splitlines()) <= 60
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    steps = ["offer", "verify", "choose", "walk", "commit"]
    assert sorted(set(calls) & set(steps)) == sorted(steps)


def test_at_most_eight_frames_from_a_round_to_onnxruntime(model, monkeypatch):
    depths, run = {}, PassBinding.run

    def counted(bound, *arguments):
        names, frame = [], sys._getframe(1)
        while frame is not None and frame.f_code is not Generation._run_round.__code__:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if frame is not None:
            # `names`, the round itself, and `PassBinding.run`, which calls onnxruntime.
            drafts = "propose" in names
            depths[drafts] = max(depths.get(drafts, 0), 2 + len(names))
        return run(bound, *arguments)

    monkeypatch.setattr(PassBinding, "run", counted)
    model.forget()
    how = {"method": "draft", "num_draft_tokens": 4, "max_new_tokens": 20}
    model.generate(token_ids=PROMPT, ignore_eos=True, **how)
    assert set(depths) == {True, False}
    assert max(depths.values()) <= 8
