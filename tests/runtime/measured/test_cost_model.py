"""A curve is read as it was written, and refused where its times are impossible."""

import json
from dataclasses import asdict

import pytest

from jetdraft.runtime.measured.cost_model import MAX_MS, Curve, LinearFit, RoundCosts
from jetdraft.runtime.measured.stats import Round

CURVE = Curve(
    passes={1: 20.0, 4: 26.0}, trees={2: 23.0}, compaction=0.5, probe=0.1, drafter=3.0,
    drafts={"draft": 3.1, "lookup": 0.0}, probed={2: 30.0}, ended={2: 24.0},
    replays={1: 0.5, 7: 2.0}, experts={1: 4.0, 4: 10.0}, expert=0.5,
)  # fmt: skip


def written(**changes):
    return {**json.loads(json.dumps(asdict(CURVE))), **changes}


def test_what_is_written_is_read():
    assert Curve.from_json(written()) == CURVE
    bare = Curve({1: 20.0})
    assert Curve.from_json(json.loads(json.dumps(asdict(bare)))) == bare


NAN, INFINITY = float("nan"), float("inf")


def refuse(**changes):
    words = r"its times are missing or out of range|must be"
    with pytest.raises(ValueError, match=words):
        Curve.from_json(written(**changes))


@pytest.mark.parametrize("ms", [0.0, -1.0, MAX_MS, NAN, INFINITY])
@pytest.mark.parametrize("field", ["passes", "trees", "probed", "ended", "replays"])
def test_passes_that_take_no_time_or_for_ever(field, ms):
    refuse(**{field: {"1": 2.0, "2": ms}})


@pytest.mark.parametrize("ms", [-0.1, MAX_MS, NAN, INFINITY])
@pytest.mark.parametrize(
    "field", ["compaction", "probe", "drafter", "drafts", "expert"]
)
def test_other_times_that_cannot_be(field, ms):
    refuse(**{field: {"lookup": ms} if field == "drafts" else ms})


def test_a_curve_without_passes_is_refused():
    """Branching passes alone say nothing of a chain."""
    refuse(passes={}, trees={})
    refuse(passes={})
    with pytest.raises(ValueError, match="passes is missing"):
        Curve.from_json({"trees": {"2": 12.0}})


@pytest.mark.parametrize("field", sorted(asdict(CURVE)))
def test_a_malformed_field_is_refused(field):
    for value in ("soon", None):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            Curve.from_json(written(**{field: value}))


def test_careful_times_replace_quick_ones():
    """But no pass of decoding is wider than 16 rows."""
    curve = Curve({1: 10.0, 2: 11.0}, drafter=2.0, probe=0.3, drafts={"a": 1.0})
    curve.adopt(Curve({2: 9.0, 3: 9.5, 17: 30.0}, {2: 12.0}, 0.7, drafts={"b": 4.0}))
    expected = Curve(
        {1: 10.0, 2: 9.0, 3: 9.5}, {2: 12.0}, 0.7, 0.3, 2.0, drafts={"a": 1.0, "b": 4.0}
    )
    assert curve == expected


def test_branches_never_cost_less_than_chains():
    curve = Curve({2: 5.0, 4: 9.0}, {4: 8.0}, compaction=1.0)
    assert curve.tree_ms(4, ends_at_gap=True) == 9.0
    assert curve.tree_ms(2, ends_at_gap=False) == 6.0


def test_a_pass_costs_the_experts_that_it_touches():
    """And a time is learned as that of the experts of the survey."""
    curve = Curve.from_json(written(drafts={}, replays={}))
    assert curve.pass_ms(2) == 22.0
    curve.touched = {1: 4, 2: 10, 4: 4}
    assert [curve.pass_ms(w) for w in (1, 2, 4)] == [20.0, 24.0, 23.0]
    curve.learn(Round("none", 4, 0, [], 23.0 / 1e3, 0.0, experts=4))
    assert curve.passes[4] == pytest.approx(26.0)
    curve.learn(Round("none", 4, 0, [], 33.0 / 1e3, 0.0, experts=4))
    assert curve.passes[4] > 26.0


def test_the_first_probe_costs_more_than_the_others():
    """Here three streams: 3 probes on the last row, or 3 on each of 2 or 4 rows."""
    curve = Curve({2: 5.0, 4: 7.0}, probe=0.1)
    assert curve.probed_ms(2, 6, streams=3) == pytest.approx(5.6)
    curve.ended, curve.probed = {2: 8.0, 4: 10.0}, {2: 8.6, 4: 12.7}
    assert curve.probed_ms(4, 0, streams=3) == 7.0
    assert curve.probed_ms(4, 3, streams=3) == 10.0
    assert curve.probed_ms(4, 12, streams=3) == pytest.approx(12.7)
    assert curve.probed_ms(2, 4, streams=3) == pytest.approx(8.2)
    assert curve.probed_ms(3, 3, streams=3) == pytest.approx(9.0)


def pass_ms(rows: int, probes: int) -> float:
    return 1.0 + 0.2 * rows + 0.1 * probes


def round_of(drafted: int, probes: int, longer: float, outside_ms: float) -> Round:
    target = 1e-3 * longer * pass_ms(1 + drafted, probes)
    seconds = target + 1e-3 * outside_ms
    return Round("ppd", 8, drafted, [], target, 0.0, probes, seconds=seconds)


def test_without_rounds_a_round_is_its_pass():
    assert RoundCosts(pass_ms).round_ms(4, 6) == pass_ms(4, 6)


def test_rounds_say_how_much_longer_passes_are_and_what_lies_outside():
    costs = RoundCosts(pass_ms)
    for drafted in (0, 3, 7, 3, 0):
        costs.learn(round_of(drafted, 2, 1.5, 0.4 + 0.1 * drafted))
    assert costs.round_ms(16, 9) == pytest.approx(1.5 * pass_ms(16, 9) + 0.4 + 1.5)
    costs.forget()
    assert costs.round_ms(16, 9) == pass_ms(16, 9)


def test_rounds_of_one_size_do_not_hide_what_smaller_rounds_take():
    """After rounds of 7 rows alone, a round of 7 costs what it took, and others less:
    so a plan tries a smaller tree, and learns what that takes."""
    costs = RoundCosts(pass_ms)
    for _ in range(5):
        costs.learn(round_of(7, 0, 1.0, 0.7))
    assert costs.round_ms(8, 0) == pytest.approx(pass_ms(8, 0) + 0.7)
    assert costs.round_ms(1, 0) < pass_ms(1, 0) + 0.1


def test_a_stall_says_little():
    costs = RoundCosts(pass_ms)
    for _ in range(20):
        costs.learn(round_of(3, 0, 1.0, 0.5))
    before = costs.round_ms(4, 0)
    costs.learn(round_of(3, 0, 100.0, 500.0))
    assert costs.round_ms(4, 0) < 1.2 * before


def test_a_line_never_falls_and_is_never_below_zero():
    line = LinearFit(memory=1.0)
    line.add(0.0, 2.0)
    line.add(4.0, 1.0)
    assert line.at(0.0) == line.at(9.0) == 1.5
    steep = LinearFit(memory=1.0)
    steep.add(1.0, 0.1)
    steep.add(2.0, 2.1)
    assert steep.at(0.0) == 0.0
