import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import jetdraft
from jetdraft import BundleError, Drafting
from jetdraft.checkpoints import streams
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.methods.ppd import method as ppd
from jetdraft.methods.ppd.method import PromptProposer
from jetdraft.runtime.drafts.rows import Probes, Probing, Rows
from jetdraft.runtime.measured.cost_model import Curve, Profit
from jetdraft.runtime.measured.stats import Acceptance, Round
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.pruned_halves import THRESHOLD_CHOICES, Threshold
from jetdraft.runtime.proposers.proposer import Seen
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.train.attention import IMPLEMENTATION
from jetdraft.train.prompts import prompt_logits
from tests import filled, same_text
from tests.programs import refused_option
from tests.tiny import exported_model, llama_config, save_checkpoint, save_probes

TREE = {"tree": "k-ary", "branching": [2, 2, 2]}
RANKS = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1))
SETTINGS = {
    # One layer with streams above two without: halves of different sizes.
    "stream": streams.StreamSettings(
        gamma=3, layers=1, lora_rank=4, prune_rank=2, mode=streams.LOSSLESS
    ),
    "ppd": streams.PromptSettings(gamma=3, ranks=RANKS),
    "forecast": streams.PromptSettings(gamma=4, prefix=5, mode=streams.FORECAST),
}
PROMPT = np.random.default_rng(8).integers(0, 288, 20).tolist()
WAYS = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 3, "top_k": 40, "top_p": 0.95},
]
BLOCK_SIZES = {"stream": 32, "ppd": 0, "forecast": 128, "": 32}
"""Of the quantized weights, since kernels differ by it; 0 for floats."""

every_kind = pytest.mark.parametrize("kind", SETTINGS)
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def of(kind, size=None, seed=0, few=None, **changes):
        size = BLOCK_SIZES[kind] if size is None else size
        key = kind, size, seed, few, *changes.items()
        if key not in made:
            folder = tmp_path_factory.mktemp(kind or "base")
            save_checkpoint(folder / "c", llama_config())
            if kind:
                save_probes(folder / "c", replace(SETTINGS[kind], **changes), seed)
            recipe = f"int4-b{size}" if size else "none"
            sizes = {"capacity": 256, "max_width": 64, "draft_vocab": few}
            (text := folder / "text.txt").write_text("for the self in range " * 40)
            sizes |= {"calibration": text} if few else {}
            output = folder / "bundle"
            made[key] = exported_model(folder / "c", output, recipe, **sizes)
        return made[key]

    yield of
    for model in made.values():
        model.close()


def text(model, method, **options):
    return model.generate(
        token_ids=PROMPT, method=method, ignore_eos=True, max_new_tokens=120, **options
    )


@cache
def plain_text(model, **way):
    return text(model, "none", **way).token_ids


def test_how_much_is_drafted(models):
    model = models("stream")
    for count in (1, 2, 3):
        assert text(model, "stream", num_draft_tokens=count).stats.drafted_tokens > 60
    branched = text(model, "stream", drafting=TREE).stats
    assert "stream:14" in branched.rounds_by_choice, "2 + 4 + 8 rows"
    sparse = text(models("ppd"), "ppd", drafting={"rows": 7, "slots": 24}).stats
    assert sparse.drafted_tokens > 40


@pytest.mark.parametrize("kind", ["stream", "forecast"])
def test_the_base_alone_writes_the_same(models, kind):
    base = models("", BLOCK_SIZES[kind])
    for way in WAYS:
        assert plain_text(models(kind), **way) == plain_text(base, **way)


@every_kind
@pytest.mark.parametrize("size", [0, "32-head8"])
def test_probes_choose_from_a_draft_vocabulary(models, kind, size):
    members = {"members": 2} if kind == "ppd" else {}
    both = [models(kind, size, few=count, **members) for count in (None, 70)]
    answers = [
        filled(model.parts.target, PROMPT[:10]).run(PROMPT[10:16], probing=Probing(3))
        for model in both
    ]
    ids = both[1].bundle.draft_vocabulary("target")
    for row in range(6):
        whole, few = (answer.probes[row] for answer in answers)
        logits = whole.logits[:, ids]
        best = (-logits).argsort(1, kind="stable")[:, : few.candidates.shape[1]]
        np.testing.assert_array_equal(few.candidates, ids[best])
        best_logits = np.take_along_axis(logits, best, 1)
        np.testing.assert_allclose(few.candidate_logits, best_logits, atol=1e-5)
    draft = {"method": kind, "num_draft_tokens": 3}
    drafts = [draft, {**draft, "exact": False}]
    for drafted in same_text(both[1], drafts, WAYS, token_ids=PROMPT):
        # A plan may rest.
        assert kind == "ppd" or drafted.stats.drafted_tokens > 10


@every_kind
def test_probes_do_not_change_a_bit_of_the_rows(models, kind):
    model, draw = models(kind), random.Random(5)
    graph, most = filled(model.parts.target, PROMPT[:10]), SETTINGS[kind].gamma
    base = None
    if kind == "forecast":
        base = filled(models("", BLOCK_SIZES[kind]).parts.target, PROMPT[:10])
    for width in [w for w in model.parts.widths.exact if 1 < w <= 10]:
        alone = graph.run(PROMPT[:width]).logits.copy()
        if base is not None:
            assert np.array_equal(alone, base.run(PROMPT[:width]).logits)
        counts = [tuple(draw.randint(0, most) for _ in range(width)) for _ in range(4)]
        probings = [Probing(counts=of_rows) for of_rows in counts]
        if kind == "stream":
            probings += [Probing(n, last) for n in (1, 2, 3) for last in (False, True)]
        for probing in probings:
            beside = graph.run(PROMPT[:width], probing=probing)
            assert sorted(beside.probes) == probing.of(width).carriers
            assert np.array_equal(beside.logits, alone)


@every_kind
def test_where_probes_change_bits_an_exact_text_has_none(models, monkeypatch, kind):
    model = models(kind)
    widths = replace(model.parts.widths, probes_agree=False)
    monkeypatch.setattr(model.parts.survey, "_widths", widths)
    with refused_option("add --no-exact", "method"):
        text(model, kind)
    assert text(model, kind, exact=False).token_ids
    assert not any(kind in c for c in text(model, "auto").stats.rounds_by_choice)


def test_which_methods_draft_with_probes(models):
    own = {"stream": (), "ppd": ("ppd",), "forecast": ("forecast",)}
    for kind, more in own.items():
        assert models(kind).methods == ("none", "lookup", "stream", *more, "trigram")


@pytest.mark.parametrize("kind", ["ppd", "ensemble", "forecast"])
def test_probes_of_passes_are_those_of_training(models, kind):
    changes = {"members": 2} if kind == "ensemble" else {}
    model = models("ppd" if changes else kind, 0, **changes)
    checkpoint = Checkpoint.load(model.bundle.target.source, torch.float32)
    prompts = checkpoint.add_probes(1.0).prompts
    own = Checkpoint.load(checkpoint.source, torch.float32)
    own.model.set_attn_implementation("sdpa")
    anchors, expected = torch.tensor([[4, 11, 19]]), []
    for _ in range(2 if kind == "forecast" else 1):
        with torch.no_grad():
            read = own.model(input_ids=torch.tensor([PROMPT]), use_cache=True)
            cache = read.past_key_values
            said = prompt_logits(prompts, own.model, anchors, len(PROMPT), cache)[0]
            expected.append(said.numpy().copy())
            if kind == "forecast":  # the second time without a prefix
                prompts.keys.zero_()
                prompts.values.zero_()
    graph = model.parts.target
    graph.cache.rewind(0)
    gamma = SETTINGS["ppd" if changes else kind].gamma
    answer = graph.run(PROMPT, probing=Probing(gamma))
    for row, wanted in zip((4, 11, 19), expected[0], strict=True):
        np.testing.assert_allclose(answer.probes[row].logits, wanted, atol=1e-4)
    if kind == "forecast":
        assert np.abs(expected[0] - expected[1]).max() > 0.1


def test_what_probes_see():
    """Two carriers with two probes each, after a row with two children."""
    probes = Probes((2, 0, 2))
    assert (probes.total, probes.rows, probes.ids) == (4, [0, 0, 2, 2], [0, 1, 0, 1])
    assert probes.visible([[], [0], [0]]) == [[0], [0, 3], [0, 2], [0, 2, 5]]
    # Member k of an ensemble sees the members k of the prompt tokens below.
    seen = Probes((0, 2)).visible([[], [0]], members=2)
    assert seen == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 3]]
    # Two slots of a prefix lie between the rows and the forecasts.
    seen = Probes((2,)).visible([[]], prefix=2)
    assert seen == [[], [], [0, 1, 2], [0, 1, 2, 3]]


@every_way
@pytest.mark.parametrize("exact", [True, False])
def test_the_controller_branches_where_rows_are_free(models, monkeypatch, way, exact):
    model = models("stream")
    curve = Curve(dict.fromkeys(range(1, 17), 1.0), drafts={"stream": 0.0})
    monkeypatch.setattr(curve, "learn", lambda round_: None)
    monkeypatch.setattr(model.parts, "_curve", curve)
    known = Acceptance()
    known.places.successes, known.places.trials = [500.0] * 4, [1000.0] * 4
    monkeypatch.setattr(known, "observe", lambda round_: None)
    monkeypatch.setattr(model.planner, "acceptance", {"stream": known})
    monkeypatch.setattr(model.planner, "_profits", defaultdict(Profit))
    drafted = text(model, "stream", exact=exact, **way)
    lengths = [int(c.partition(":")[2] or 0) for c in drafted.stats.rounds_by_choice]
    assert max(lengths) > SETTINGS["stream"].gamma
    if exact:
        assert drafted.token_ids == plain_text(model, **way)


def test_a_chain_can_be_asked_for(models, monkeypatch):
    model = models("stream")
    curve = model.parts.curve
    monkeypatch.setattr(curve, "passes", dict.fromkeys(range(1, 17), 1.0))
    monkeypatch.setattr(curve, "learn", lambda round_: None)
    stats = text(model, "stream", drafting={"tree": "chain"}).stats
    assert set(stats.rounds_by_choice) <= {"none", "stream:1", "stream:2", "stream:3"}


def test_the_first_pass_has_streams_on_the_last_prompt_row_alone(models, monkeypatch):
    model = models("stream")
    graph, seen = model.parts.target, []
    run = graph.run

    def spy(tokens, **options):
        answer = run(tokens, **options)
        seen.append((len(tokens), sorted(answer.probes)))
        return answer

    monkeypatch.setattr(graph, "run", spy)
    model.forget()
    text(model, "stream", num_draft_tokens=3)
    prompt = [rows for rows, carriers in seen if not carriers][:2]
    assert sum(prompt) == 19, "read in passes as wide as in decoding"
    assert seen[2] == (1, [0])
    assert all(carriers == list(range(rows)) for rows, carriers in seen[2:-3])


def test_the_pass_that_reads_the_prompts_end_drafts_too(models, monkeypatch):
    model, ran, rounds = models("stream"), [], []
    curve, graph = model.parts.curve, model.parts.target
    monkeypatch.setattr(curve, "passes", dict.fromkeys(range(1, 17), 1.0))
    monkeypatch.setattr(curve, "probe", 0.0)
    monkeypatch.setattr(curve, "learn", rounds.append)
    verify = graph.verify
    spy = lambda *given: ran.append(verify(*given)) or ran[-1]  # noqa: E731
    monkeypatch.setattr(graph, "verify", spy)
    model.forget()
    drafted = text(model, "stream", drafting={"tree": "chain"})
    assert drafted.token_ids == plain_text(model)
    (first, answer), (second, _) = ran[:2]
    assert list(answer.probes) == [len(first) - 1] != [0]
    assert rounds[0].probes == answer.probe_count, "their time is learned as theirs"
    assert len(second) > 1, "its draft"


def test_another_task_can_be_swapped_in(models):
    model = models("stream")
    other = models("stream", 0, 5).bundle.path / "streams.npz"
    swapped = jetdraft.load(model.bundle.path, threads=1, streams=other)
    own, others = (text(m, "stream", num_draft_tokens=3) for m in (model, swapped))
    assert own.token_ids == others.token_ids
    drafts = []
    for each in (model, swapped):
        each.parts.target.cache.rewind(0)
        answer = each.parts.target.run(PROMPT, probing=Probing(3))
        drafts.append(answer.probes[19].logits.copy())
    assert np.abs(drafts[0] - drafts[1]).max() > 0.01


def test_streams_of_another_base_are_refused(models, tmp_path):
    model = models("stream")
    file, own = tmp_path / "streams.npz", model.bundle.target.streams["base"]
    for make, words in (
        (lambda: np.savez(file, base=np.array("another")), "another base"),
        (lambda: np.savez(file, base=np.array(own)), "has another shape or type"),
        (lambda: file.write_bytes(b""), "cannot read streams"),
        (lambda: file.write_bytes(b"nothing"), "cannot read streams"),
        (file.unlink, "cannot read streams"),
    ):
        make()
        with pytest.raises(BundleError, match=words):
            jetdraft.load(model.bundle.path, streams=file)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e38])
def test_streams_that_would_change_the_text_are_refused(models, tmp_path, value):
    """Rows of the text multiply them by zero, which does not make them zero."""
    folder, file = models("stream", 0, 5).bundle.path, tmp_path / "streams.npz"
    with np.load(folder / "streams.npz") as stored:
        arrays = dict(stored)
    name = next(name for name in arrays if "q_proj.lora_A" in name)
    arrays[name] = np.full_like(arrays[name], value)
    np.savez(file, **arrays)
    with pytest.raises(BundleError, match="has numbers beyond 10000, or NaN"):
        jetdraft.load(folder, threads=1, streams=file)


def test_who_carries_streams():
    assert Probing(2).of(3) == Probes((2, 2, 2))
    assert Probing(2, last_only=True).of(3) == Probes((0, 0, 2))
    assert Probing().of(3).total == 0


def halves_of(model, threshold, exact=True):
    settings = {"prune_threshold": threshold}
    return model.planner.target_for(Drafting("stream", exact=exact, settings=settings))


@every_way
@pytest.mark.parametrize("threshold", [0.0, 0.3, 2.0, "auto"])
@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
def test_no_threshold_changes_a_text(models, way, threshold, tree):
    """At 0 nothing is pruned, above 1 all of a draft."""
    model = models("stream")
    drafting = {"prune_threshold": threshold, **tree}
    pruned = text(model, "stream", drafting=drafting, **way)
    assert pruned.token_ids == plain_text(model, **way)
    if threshold == 2.0:
        assert (pruned.stats.accepted_tokens, pruned.stats.target_passes) == (0, 120)
    if threshold == 0.0 and tree:
        whole = text(model, "stream", drafting=tree, **way).stats
        assert pruned.stats.target_passes == whole.target_passes
        assert pruned.stats.accepted_counts == whole.accepted_counts


def test_scores_are_those_of_the_early_exit(models, tmp_path):
    """The log probability of each row's token after its parent."""
    floats = models("stream", 0, 5)
    folder = Path(floats.bundle.target.source)
    streamed = Checkpoint.load(str(folder), torch.float32).add_probes(1.0)
    streamed.model.set_attn_implementation(IMPLEMENTATION)
    halves = filled(halves_of(floats, 0.0), PROMPT)
    rows = Rows([9, 8, 7, 6, 5], [-1, 0, 0, 2, 3])
    scores = halves._run_lower(rows, 5).arrays["scores"][0]
    for row in range(1, 5):
        ids = torch.tensor([[*PROMPT, *[rows.tokens[i] for i in rows.ancestors[row]]]])
        at = torch.arange(ids.shape[1])
        with torch.no_grad():
            read = ids, at[None], at[:0], at[:0], at
            _, early, _ = streamed(*read, early=at, use_cache=False)
        expected = early[0, -1].log_softmax(-1)[rows.tokens[row]]
        assert scores[row] == pytest.approx(float(expected), abs=1e-4)


def test_a_row_goes_with_all_below_it(models):
    halves = halves_of(models("stream"), 0.5)
    rows = Rows([5, 6, 7, 8, 9], [-1, 0, 1, 0, 3])
    assert halves._prune(rows, np.log([1.0, 0.4, 0.9, 0.6, 0.5]), 0.5) == [0, 3, 4]


def test_without_lower_layers_there_is_nothing_to_exit_from(tmp_path):
    folder = save_checkpoint(tmp_path / "c", llama_config(num_hidden_layers=1))
    save_probes(folder, SETTINGS["stream"])
    sizes = {"capacity": 256, "max_width": 32}
    with exported_model(folder, tmp_path / "bundle", **sizes) as model:
        same_text(model, ["stream"], token_ids=PROMPT)
        with refused_option("all of its layers have streams"):
            text(model, "stream", drafting={"prune_threshold": 0.1})


@pytest.mark.parametrize("exact", [True, False])
def test_both_halves_hold_what_a_fresh_prefill_holds(models, exact):
    """A path has one map into the lower buffers and another into the upper ones."""
    halves = filled(halves_of(models("stream", 0, 5), 0.0, exact), PROMPT)
    rows = Rows([9, 8, 7, 6, 5], [-1, 0, 0, 2, 3])
    halves._prune = lambda rows, scores, least: [0, 2, 3, 4]  # row 1 is pruned
    try:
        kept, _ = halves.verify(rows, 5 if not exact else 6)
    finally:
        del halves._prune
    assert kept.tokens == [9, 7, 6, 5]
    committed = halves.commit([0, 1, 2], ends_at_gap=exact)
    assert committed == (1 if exact else 3)
    length = len(PROMPT) + committed
    pair = halves.cache.buffers, halves.cache.upper.buffers
    buffers = [buffer for of_half in pair for buffer in of_half.values()]
    found = [buffer.numpy()[:, :, :length].copy() for buffer in buffers]
    halves.cache.rewind(0)
    halves.run([*PROMPT, 9, 7, 6][:length])
    for one, buffer in zip(found, buffers, strict=True):
        np.testing.assert_allclose(one, buffer.numpy()[:, :, :length], atol=1e-4)


def test_a_draft_says_how_many_probes_its_rows_carry(models):
    model = models("ppd")
    rows = Rows([9, 8, 7, 6], [-1, 0, 1, 0], probes=(3, 0, 2, 1))
    _, answer = filled(model.parts.target, PROMPT).verify(rows, 4, Probing(3))
    counts = {row: len(each.candidates) for row, each in answer.probes.items()}
    assert counts == {0: 3, 2: 2, 3: 1}
    assert rows.cut(2).probes == (3, 0, 2)
    assert rows.only([0, 3]).probes == (3, 1)
    assert rows.under([5]).probes == (0, 3, 0, 2, 1)


def planned(model, monkeypatch, ranks, pass_ms):
    proposer = PromptProposer(model.parts.target.contract, ranks, pass_ms)
    key = ppd.METHOD, ppd.METHOD.options()
    monkeypatch.setattr(model.planner, "_proposers", {key: proposer})
    monkeypatch.setattr(proposer.costs, "learn", lambda round_: None)
    return proposer


def test_cheap_passes_have_large_trees(models, monkeypatch):
    model = models("ppd")
    planned(model, monkeypatch, RANKS, lambda rows, probes: 10.0)
    for way in WAYS:
        drafted = text(model, "ppd", **way)
        assert drafted.token_ids == plain_text(model, **way)
        assert set(drafted.stats.rounds_by_choice) >= {"ppd:15"}
    cut = text(model, "ppd", num_draft_tokens=4)
    assert cut.token_ids == plain_text(model)
    assert "ppd:4" in cut.stats.rounds_by_choice


def test_the_plan_follows_the_text(models):
    """Held-out text said that guesses are wrong, and here all of them are right."""
    model = models("ppd")

    def pass_ms(rows, probes):
        return 0.4 + 0.1 * rows + 0.02 * probes

    proposer = PromptProposer(model.parts.target.contract, [[0.02] * 3] * 3, pass_ms)
    proposer.begin(PROMPT, Chooser(Sampling()))
    before, length = proposer.plan(7), len(PROMPT)
    for _ in range(120):
        logits = np.array([[3.0, 2.0, 1.0]] * 3, np.float32)
        ids = np.arange(length, length + 3)[:, None] + [[0, 100, 101]]
        probes = Answer(ids, logits, logits[:, 0], logits)
        answer = replace(probes, probes={0: probes})
        # The token of a place is its number.
        proposer.observe(Seen(length, Rows.chain([length - 2]), [0], answer))
        drafted = proposer.propose(range(length), 7)
        length += 1
    assert proposer.rates.ranks[0][0] > 0.5 > 0.02 > proposer.rates.ranks[0][1]
    assert drafted.tokens[1] == length - 1
    assert proposer.plan(7).tokens > 1.4 > 1.1 > before.tokens
    proposer.forget()
    assert proposer.plan(7) == before


def test_where_no_plan_pays_rounds_are_those_of_plain_decoding(models, monkeypatch):
    model = models("ppd")

    def pass_ms(rows, probes):
        return 1.0 + 10.0 * (rows - 1) + 10.0 * probes

    proposer = planned(model, monkeypatch, [[0.02] * 3] * 3, pass_ms)
    for way in WAYS:
        proposer.forget()
        drafted = text(model, "ppd", **way)
        assert drafted.token_ids == plain_text(model, **way)
        assert drafted.stats.rounds_by_choice["none"] > 60
        assert 0 < drafted.stats.drafted_tokens < 40
    monkeypatch.setattr(ppd, "RESTS", (10**6, 10**6))
    proposer.forget()
    assert text(model, "ppd").stats.drafted_tokens <= 1


def test_a_plan_learns_what_rounds_take(models):
    """Rows are free in passes, and cost much outside of them."""
    contract, ranks = models("ppd").parts.target.contract, [[0.3, 0.2, 0.1]] * 3
    proposer = PromptProposer(contract, ranks, lambda rows, probes: 1.0)
    proposer.begin(PROMPT, Chooser(Sampling()))
    assert len(proposer.plan(15).trees[3].parents) == 15
    for drafted in (0, 15, 15):
        seconds = 1e-3 * (1.1 + 0.5 * drafted)
        proposer.learn_times(Round("ppd", 16, drafted, [], 1e-3, 0.0, seconds=seconds))
    proposer.rates.settled = ppd.FIRST_REPLAN
    assert len(proposer.plan(15).trees[3].parents) < 5


def test_ten_rows_carry_two_forecasts_each(models, monkeypatch):
    model = models("forecast")
    graph, sizes = model.parts.target, set()
    run = graph.run_branches

    def spy(tokens, *rest, **options):
        answer = run(tokens, *rest, **options)
        sizes.add((len(tokens), answer.probe_count))
        return answer

    monkeypatch.setattr(graph, "run_branches", spy)
    stats = text(model, "forecast").stats
    assert (10, 20) in sizes
    assert "forecast:9" in stats.rounds_by_choice


def settle(would, rounds=400):
    threshold, chosen = Threshold(), []
    for _ in range(rounds):
        used = threshold.choose()
        chosen.append(used)
        threshold.observe(used, would)
    late = chosen[rounds // 2 :]
    return max(set(late), key=late.count)


def test_pruning_is_taken_where_it_saves_more_than_it_costs():
    assert settle(lambda least: (3.0, 10.0 - 5.0 * (least >= 0.1))) == 0.1
    assert settle(lambda least: (3.0 - 2 * (least > 0), 10.0 - 2 * (least > 0))) == 0.0


@pytest.mark.parametrize("best", THRESHOLD_CHOICES)
def test_any_choice_can_be_the_best(best):
    assert settle(lambda least: (1.0 + (least == best), 1.0)) == best


def test_lower_thresholds_are_looked_at_now_and_then():
    threshold = Threshold()
    for _ in range(100):
        threshold.observe(threshold.choose(), lambda t: (1.0 + (t == 0.3), 1.0))
    for _ in range(400):
        threshold.observe(threshold.choose(), lambda t: (1.0 + 2 * (t == 0.01), 1.0))
    used = [threshold.choose() for _ in range(2 * Threshold.REFRESH)]
    assert max(set(used), key=used.count) == 0.01
