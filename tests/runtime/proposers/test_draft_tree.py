import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import jetdraft
from jetdraft.errors import DataError, DraftingError, OptionError, StoreError
from jetdraft.methods import Method, Rows, methods, registered
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import StepSessions, open_session
from jetdraft.runtime.proposers import model_proposer
from jetdraft.runtime.proposers.model_proposer import AcceptanceHead, confidence
from jetdraft.runtime.proposers.proposer import constrain
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from jetdraft.testing import toy_bundle
from jetdraft.train.acceptance import DRAFT_LENGTH, fit_head, record_verdicts, save_head
from tests import WAYS, cases, filled, same_text
from tests.runtime.method_bundles import drafter_of, pieces_of, tokens_of
from tests.runtime.test_generation import Branching
from tests.tiny import exported_model
from tests.toy_graphs import resized

PROMPT = np.random.default_rng(8).integers(0, 288, 20)
SAMPLINGS = [Sampling(), Sampling(0.8, seed=1), Sampling(1.2, seed=3, top_k=40)]
CONTEXT = np.random.default_rng(2).integers(0, 288, 30).tolist()
READ = np.random.default_rng(6).integers(0, 288, 24).tolist()
HOW = {"token_ids": READ, "max_new_tokens": 60, "ignore_eos": True}
LEARNED = {"drafting": {"stopping": "learned"}}
PROMPTS = [np.random.default_rng(seed).integers(0, 288, 20) for seed in range(3)]


@pytest.fixture(scope="module")
def float_model(pair, tmp_path_factory):
    """The pair unquantized: no activation rounding between a tree and a chain."""
    output = tmp_path_factory.mktemp("float") / "bundle"
    sizes = {"capacity": 256, "max_width": 64}
    return exported_model(pair.target, output, drafter=pair.drafter, **sizes)


def random_parents(random, rows):
    return [-1, *(int(random.integers(0, row)) for row in range(1, rows))]


def run_tree(graph, rows):
    return graph.run_branches(rows.tokens, rows.depths, rows.ancestors)


def paths(rows):
    leaves = set(range(len(rows))) - set(rows.parents)
    return [[*rows.ancestors[leaf], leaf] for leaf in leaves]


def drawn(seed, count):
    random = np.random.default_rng(seed)
    return Rows(random.integers(0, 288, count).tolist(), random_parents(random, count))


def logits_of_paths(graph, rows):
    """Of each path, its logits in a tree and in a chain."""
    logits = run_tree(filled(graph, PROMPT), rows).logits.copy()
    for path in paths(rows):
        tokens = [rows.tokens[row] for row in path]
        yield logits[path], filled(graph, PROMPT).run(tokens).logits


@pytest.mark.parametrize("seed", range(3))
def test_every_path_has_the_logits_of_a_chain(float_model, seed):
    rows = drawn(seed, 12).depth_first()
    for path, chain in logits_of_paths(float_model.parts.target, rows):
        np.testing.assert_allclose(path, chain, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_all_paths_are_those_of_a_chain_bit_by_bit(model, seed):
    assert model.parts.widths.skips_agree
    for path, chain in logits_of_paths(model.parts.target, drawn(seed, 8)):
        assert np.array_equal(path, chain)


def test_a_chain_after_a_tree_sees_everything_again(model):
    graph = model.parts.target
    filled(graph, PROMPT)
    before = graph.run([1, 2, 3, 4]).logits.copy()
    run_tree(graph, Rows([1, 2, 3, 4], [-1, 0, 0, 0]))
    assert np.array_equal(graph.run([1, 2, 3, 4]).logits, before)


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2], [0, 3, 5], [0, 1, 4, 6]])
def test_the_cache_after_a_commit_is_that_of_a_fresh_prefill(float_model, path):
    graph = float_model.parts.target
    rows = Rows([9, 8, 7, 6, 5, 4, 3], [-1, 0, 0, 0, 1, 3, 4])
    filled(graph, PROMPT)
    run_tree(graph, rows)
    graph.cache.commit(path)
    length = len(PROMPT) + len(path)
    assert graph.cache.length == length
    buffers = graph.cache.buffers.values()
    compacted = [buffer.numpy()[:, :, :length].copy() for buffer in buffers]
    filled(graph, np.append(PROMPT, [rows.tokens[row] for row in path]))
    for found, buffer in zip(compacted, buffers, strict=True):
        np.testing.assert_allclose(found, buffer.numpy()[:, :, :length], atol=1e-4)


def test_compaction_moves_nothing_else(model):
    cache = model.parts.target.cache
    filled(model.parts.target, PROMPT)
    run_tree(model.parts.target, Rows([9, 8, 7, 6], [-1, 0, 0, 2]))
    before = [buffer.numpy().copy() for buffer in cache.buffers.values()]
    cache.commit([0, 2, 3])
    for old, buffer in zip(before, cache.buffers.values(), strict=True):
        new = buffer.numpy()
        np.testing.assert_array_equal(new[:, :, 21:23], old[:, :, 22:24])
        new[:, :, 21:23] = old[:, :, 21:23]
        np.testing.assert_array_equal(new, old)


def generate(model, sampling, proposer=None, tokens=150, **options):
    widths = model.parts.widths.exact
    return tokens_of(
        model, PROMPT, sampling, proposer, tokens=tokens, widths=widths, **options
    )


@pytest.fixture(scope="module")
def plain(model):
    return {sampling: generate(model, sampling)[0] for sampling in SAMPLINGS}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_compacted_branches_give_the_same_text(float_model, sampling):
    expected, _ = generate(float_model, sampling)
    ids, stats = generate(float_model, sampling, Branching(expected), exact=False)
    assert ids == expected
    assert stats.tokens_per_pass > 1.5


class Broken(Branching):
    def propose(self, context, budget, parents=None):
        return Rows([int(context[-1]), 1, 2], [-1, 2, 0])


def test_a_parent_after_its_child_is_refused(model, plain):
    with pytest.raises(OptionError, match="parents come before"):
        generate(model, SAMPLINGS[0], Broken(plain[SAMPLINGS[0]]))


def rounded(rows, answer, positions, chooser):
    """As if rounding had flipped the choice of every row beyond a gap."""
    chosen = VERIFIERS["walk"].choose(rows, answer, positions, chooser)
    gaps = (row for row, parent in enumerate(rows.parents) if parent != row - 1)
    first = next(gaps, len(chosen))
    return [*chosen[:first], *((token + 1) % 288 for token in chosen[first:])]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_no_unproven_choice_is_ever_committed(model, plain, sampling, monkeypatch):
    known = replace(model.parts.widths, skips_agree=False)
    monkeypatch.setattr(model.parts.survey, "_widths", known)
    walk = replace(VERIFIERS["walk"], choose=rounded)
    ids, stats = generate(model, sampling, Branching(plain[sampling]), verifier=walk)
    assert ids == plain[sampling]
    assert stats.tokens_per_pass > 1.3


def test_what_was_drafted_comes_first_in_a_round(model, plain):
    pieces, stats = pieces_of(
        model, PROMPT, SAMPLINGS[0], Branching(plain[SAMPLINGS[0]]), tokens=100
    )
    drafted = 0
    for piece in pieces:
        assert 0 <= piece.from_draft <= len(piece.token_ids)
        drafted += piece.from_draft
    assert drafted >= stats.accepted_tokens - 7
    counts = zip(stats.evaluated_by_position, stats.accepted_counts, strict=True)
    for evaluated, accepted in counts:
        assert accepted <= evaluated


@pytest.mark.parametrize("tree", ["best", "rerank"])
def test_a_tree_of_several_passes_fits_into_a_narrow_mask(tmp_path, tree):
    """Level by level a shape asks for more rows than the mask has."""
    narrow = resized(toy_bundle(tmp_path / "toy"), tmp_path / "narrow", 128, 8)
    with jetdraft.load(narrow, threads=1) as model:
        drafts = [{"method": "draft", "drafting": {"tree": tree}}]
        for drafted in same_text(model, drafts, [{}], prompt="The robot sees"):
            assert sum(drafted.from_draft) > 0


@pytest.fixture
def drafter(model):
    proposer = drafter_of(model.parts.drafter)
    proposer.begin(CONTEXT, Chooser(Sampling()))
    return proposer


def fresh(model, context, budget):
    proposer = drafter_of(model.parts.drafter)
    proposer.begin(context[:1], Chooser(Sampling()))  # so that no token is skipped
    return proposer.propose(context, budget).tokens


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_every_outcome_leaves_the_cache_in_step(model, drafter, budget):
    for accepted in range(budget + 1):
        drafter.begin(CONTEXT, Chooser(Sampling()))
        draft = drafter.propose(CONTEXT, budget).tokens
        assert len(draft) == budget + 1
        right = draft[1 : 1 + accepted]
        last = draft[1 + accepted] if accepted < budget else 0
        context = [*CONTEXT, *right, (last + 1) % 288]
        assert drafter.propose(context, 4).tokens == fresh(model, context, 4)


@cases(
    "before, after",
    ([], [1, *range(90)]),  # rounds of others
    ([5, 6, 7], [5, 9]),  # what a branch chose beyond a gap may turn out wrong
)
def test_a_context_that_changes_is_followed(model, drafter, before, after):
    drafter.propose([*CONTEXT, *before], 3)
    context = [*CONTEXT, *after]
    assert drafter.propose(context, 3).tokens == fresh(model, context, 3)


def test_a_drafter_that_is_the_target_is_always_right(model):
    entry = model.bundle.target
    session = open_session(model.bundle.path / entry.file, "cpu")
    twin = drafter_of(Graph(StepSessions(session, entry.contract)), "twin")
    how = {"method": "twin", "num_draft_tokens": 3, "exact": False}
    how |= {"max_new_tokens": 120, "ignore_eos": True}
    for options in ({}, {"temperature": 0.8, "seed": 4}):
        # In its own exact class the twin runs one row at a time, so compare there.
        with registered(Method("twin", "the target itself", lambda parts, own: twin)):
            stats = model.generate(token_ids=CONTEXT, **how, **options).stats
        assert stats.acceptance_rate > 0.97
        assert stats.tokens_per_pass > 3.7


def test_one_target_pass_per_round_and_one_drafter_pass_per_token(model, drafter):
    drafter.propose(CONTEXT, 1)
    before = model.parts.drafter.passes
    drafter.propose([*CONTEXT, 5], 3)
    assert model.parts.drafter.passes - before == 3


def sure(probability, hidden=None):
    logits = np.log(np.array([[probability, 1 - probability]], np.float32))
    return Answer(np.array([[4, 5]]), logits, np.zeros(1, np.float32), logits, hidden)


@pytest.mark.parametrize(
    ("product", "threshold", "rates"),
    [(False, 0.6, (0.7, 0.61, 0.59)), (True, 0.5, (0.8, 0.8, 0.7))],
)
def test_confidence_of_the_last_token_or_of_all(product, threshold, rates):
    rule = model_proposer.DraftStop(confidence, threshold, product)
    for _ in range(2):
        rule.begin()
        assert [rule.ends_draft(sure(rate)) for rate in rates] == [False, False, True]


def constant_head(bias, size=3):
    zeros = np.zeros((size, size), np.float32)
    return AcceptanceHead(zeros, zeros[0], np.float32(bias), np.float32(1.0))


def test_a_head_multiplies_its_rates():
    """Rates of one half: after two tokens a rejection is likelier than 0.7."""
    rule = model_proposer.DraftStop(constant_head(0.0).rate_after, 1.0 - 0.7)
    rule.begin()
    hidden = np.ones((1, 3), np.float32)
    assert [rule.ends_draft(sure(0.5, hidden)) for _ in range(2)] == [False, True]


def test_a_rate_is_that_of_the_written_formula():
    random = np.random.default_rng(0)
    block, out, x = (
        random.normal(size=shape).astype(np.float32) for shape in ((4, 4), (4,), (4,))
    )
    head = AcceptanceHead(block, out, np.float32(0.3), np.float32(0.5))
    y = 0.5 * x.astype(float)
    for _ in range(model_proposer.REPEATS):
        z = block @ y
        y = y + z * (1 / (1 + np.exp(-z)))
    assert head.rate(x) == pytest.approx(1 / (1 + np.exp(-(out @ y + 0.3))), abs=1e-5)


@pytest.mark.parametrize("rule", ["confidence", "product"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_thresholds_shorten_drafts_and_change_no_text(model, rule, way):
    rules = [{"stopping": rule, "stop_threshold": x} for x in (0.0, 0.02, 1.0)]
    drafts = [{"method": "draft", "num_draft_tokens": 6, "drafting": r} for r in rules]
    found = [drafted.stats for drafted in same_text(model, drafts, [way], **HOW)]
    drafted = [stats.drafted_tokens / stats.target_passes for stats in found]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 5
    assert drafted[-1] <= 1


@pytest.mark.parametrize(("bias", "length"), [(99.0, 6), (-99.0, 1)])
def test_a_head_that_always_says_the_same(model, monkeypatch, bias, length):
    head = constant_head(bias, model.parts.drafter.contract.hidden_size)
    monkeypatch.setattr(AcceptanceHead, "load", lambda *given: head)
    # A proposer that was made before has the head of that time.
    monkeypatch.setattr(model.planner, "_proposers", {})
    draft = {"method": "draft", "num_draft_tokens": 6}
    [found] = same_text(model, [draft | LEARNED], [{}], **HOW)
    assert found.stats.rounds_by_choice.get(f"draft:{length}", 0) > 10


def test_a_chain_ends_where_a_controller_says_also_below_a_constraint(drafter):
    matcher = SimpleNamespace(forced=lambda *_: [], allowed=lambda rows, _: rows)
    [constrained], lengths = constrain([drafter], matcher)[:1], []
    for constrained.least in (1.0, 0.0):
        lengths.append(constrained.propose(CONTEXT, 6).drafted)
    assert lengths == [1, 6]


def test_rules_do_not_outlive_their_generation(model):
    model.generate(method="draft", drafting={"stopping": "confidence"}, **HOW)
    found = model.generate(method="draft", num_draft_tokens=5, **HOW)
    assert found.stats.rounds_by_choice["draft:5"] > 20


@pytest.mark.parametrize("rule", ["confidence", "product", "learned"])
def test_a_rule_without_a_drafter_is_refused(bundle, rule):
    with jetdraft.load(bundle, threads=1, drafter_provider="off") as model:
        assert model_proposer.make_draft_stop(None, None, model.parts) is None
        with pytest.raises(DraftingError, match="needs a drafter"):
            model_proposer.make_draft_stop(rule, None, model.parts)


def test_a_head_of_another_bundle_is_refused(tmp_path):
    file, broken = tmp_path / "head.npz", tmp_path / "broken.npz"
    constant_head(0.0).save(file, "one")
    assert AcceptanceHead.load(file, "one", 3).rate(np.zeros(3, np.float32)) == 0.5
    replace(constant_head(0.0), bias=np.array(np.nan, np.float32)).save(broken, "one")
    (tmp_path / "text.npz").write_bytes(b"nothing")
    for path, bundle, size, words in (
        (file, "two", 3, "another bundle"),
        (file, "one", 4, "is not an acceptance head"),
        (broken, "one", 3, "is not an acceptance head"),
        (tmp_path / "text.npz", "one", 3, "is not an acceptance head"),
        (tmp_path / "missing.npz", "one", 3, "train acceptance"),
    ):
        with pytest.raises(StoreError, match=words):
            AcceptanceHead.load(path, bundle, size)


def test_what_is_watched_are_the_compared_tokens(model):
    hidden, accepted = record_verdicts(
        model, PROMPTS, max_new_tokens=40, temperature=0.0
    )
    how = {"method": "draft", "num_draft_tokens": DRAFT_LENGTH, "max_new_tokens": 40}
    evaluated = right = 0
    for prompt in PROMPTS:
        stats = model.generate(token_ids=prompt, **how).stats
        # The last token of a draft is compared too, but not watched.
        evaluated += sum(stats.evaluated_by_position[: DRAFT_LENGTH - 1])
        right += sum(stats.accepted_counts[: DRAFT_LENGTH - 1])
    assert abs(len(hidden) - evaluated) <= len(PROMPTS)
    assert abs(accepted.sum() - right) <= len(PROMPTS) * DRAFT_LENGTH
    assert hidden.shape[1] == model.parts.drafter.contract.hidden_size


def test_a_head_learns_what_there_is_to_learn():
    hidden = 5 * np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
    accepted = (hidden[:, 3] > 0).astype(np.float32)
    head, loss = fit_head(hidden, accepted)
    rates = np.array([head.rate(state) for state in hidden[:300]])
    assert ((rates > 0.5) == (accepted[:300] > 0)).mean() > 0.9
    assert loss < 0.7


def test_a_head_is_not_learned_by_heart():
    """Verdicts that nothing tells: guessing the rate is the best there is."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(300, 64)).astype(np.float32)
    accepted = (random.random(300) < 0.8).astype(np.float32)
    _, loss = fit_head(hidden, accepted)
    assert loss <= fit_head(hidden, accepted, steps=1)[1]


def test_a_learned_head_is_used(bundle, tmp_path):
    model = jetdraft.load(shutil.copytree(bundle, tmp_path / "own"), threads=1)
    verdicts = record_verdicts(model, PROMPTS, max_new_tokens=40, temperature=0.0)
    head, _ = fit_head(*verdicts, steps=20)
    save_head(head, model.parts.profiles.acceptance_file, model.bundle.sha256)
    same_text(model, [{"method": "draft"} | LEARNED], [{}], token_ids=PROMPTS[0])


def test_too_little_to_learn_from(model):
    with pytest.raises(DataError, match="more prompts"):
        record_verdicts(model, PROMPTS[:1], max_new_tokens=4, temperature=0.0)


def test_watching_leaves_no_trace(model):
    before, seen = set(methods()), set()
    again = [
        record_verdicts(model, PROMPTS, 40, 0.0, tick=lambda: seen.update(methods()))[0]
        for _ in range(2)
    ]
    np.testing.assert_allclose(*again, atol=1e-4)
    assert seen == before == set(methods())
    assert model.planner.proposers()["draft"].stop is None


def test_without_a_drafter_there_is_nothing_to_watch(bundle):
    model = jetdraft.load(bundle, threads=1, drafter_provider="off")
    with pytest.raises(OptionError, match="needs a drafter; export with --drafter"):
        record_verdicts(model, PROMPTS, 40, 0.0)
