import numpy as np

from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.lossy import Tolerant
from jetdraft.runtime.sampling.verifiers import VERIFIERS

P = np.array([0.5, 0.3, 0.15, 0.05])


def accepted(name, children):
    return VERIFIERS[name].rule(P, P, children, Kind.DETERMINISTIC)


def test_typical_acceptance_takes_what_passes_its_threshold():
    """H = 1.1421 nats, threshold min(0.09, 0.3 exp(-H)) = 0.09: tokens 0, 1, 2."""
    for token in (0, 1, 2):
        assert accepted("typical", [token])[token] == 1.0
    np.testing.assert_array_equal(accepted("typical", [3]), P)


def test_of_several_accepted_children_the_most_probable_wins():
    assert accepted("typical", [2, 1, 3])[1] == 1.0


def answer_of(rows):
    """Rows whose candidates have the probabilities P, in an order of their own."""
    generator = np.random.default_rng(4)
    ids = np.array([generator.permutation(len(P)) for _ in range(rows)])
    logits = np.tile(np.log(P), (rows, 1)).astype(np.float32)
    places = np.argsort(ids, axis=1)
    whole = np.take_along_axis(logits, places, axis=1)
    return Answer(ids, logits, np.zeros(rows, np.float32), whole)


def chosen_after(children, **options):
    """The token that is chosen where these ranks are drafted; P is in their order."""
    rows = Rows([0, *children], [-1, *[0] * len(children)], Kind.DETERMINISTIC)
    answer = answer_of(1 + len(children))
    answer.candidates[0] = range(len(P))
    choose = Tolerant(**options).choose
    return choose(rows, answer, range(len(rows)), Chooser(Sampling()))[0]


def test_tolerant_takes_the_top_within_the_tolerance():
    """The gaps to the best are 0, 0.51, 1.20 and 2.30 nats."""
    for top in (1, 2, 3, 4):
        for tolerance, near in ((0.0, 1), (0.6, 2), (1.3, 3), (9.0, 4)):
            for token in range(len(P)):
                passes = token < min(top, near)
                found = chosen_after([token], top=top, tolerance=tolerance)
                assert found == (token if passes else 0), (top, tolerance, token)


def test_of_several_tolerated_children_the_most_probable_wins():
    assert chosen_after([2, 1, 3], top=4, tolerance=9.0) == 1
    assert chosen_after([3], top=3, tolerance=9.0) == 0


def accepted_of(chain, answer, **options):
    rows = Rows.chain([0, *chain], Kind.DETERMINISTIC)
    chosen = Tolerant(**options).choose(
        rows, answer, range(len(rows)), Chooser(Sampling())
    )
    return len(rows.walk(chosen)) - 1


def test_acceptance_grows_with_the_top_and_the_tolerance():
    """Of random chains; with one best token, or no tolerance, it is the walk's."""
    generator, answer = np.random.default_rng(2), answer_of(9)
    counts = {}
    for _ in range(60):
        chain = generator.integers(len(P), size=8).tolist()
        # Mostly likely tokens, or nothing would be accepted.
        for place in range(8):
            if generator.random() < 0.7:
                chain[place] = int(answer.candidates[place, generator.integers(2)])
        greedy = Rows.chain([0, *chain], Kind.DETERMINISTIC).walk(
            answer.candidates[:, 0].tolist()
        )
        for top in (1, 2, 3, 4):
            for tolerance in (0.0, 0.6, 1.3, 9.0):
                accepted = accepted_of(chain, answer, top=top, tolerance=tolerance)
                if top == 1 or tolerance == 0.0:
                    assert accepted == len(greedy) - 1
                key = top, tolerance
                counts[key] = counts.get(key, 0) + accepted
                assert accepted >= accepted_of(
                    chain, answer, top=max(1, top - 1), tolerance=tolerance
                )
                assert accepted >= accepted_of(
                    chain, answer, top=top, tolerance=tolerance / 3
                )
    assert counts[1, 9.0] < counts[2, 9.0] < counts[3, 9.0] < counts[4, 9.0]
    assert counts[4, 0.0] < counts[4, 0.6] < counts[4, 1.3] < counts[4, 9.0]


def test_a_sampled_text_keeps_to_its_filters():
    """A token that top-k drops is not accepted, whatever the verifier would."""
    answer, rows = answer_of(2), Rows.chain([0, 2], Kind.DETERMINISTIC)
    answer.candidates[0] = range(len(P))
    choose = Tolerant(top=4, tolerance=9.0).choose
    for kept, wanted in ((2, {0, 1}), (3, {2})):
        found = {
            choose(rows, answer, (5, 6), Chooser(Sampling(0.9, kept, seed=seed)))[0]
            for seed in range(40)
        }
        assert found == wanted


def test_lossy_verifiers_say_so_and_are():
    assert VERIFIERS["typical"].lossy
    assert VERIFIERS["tolerant"].lossy
    assert np.abs(accepted("typical", [1]) - P).max() > 0.1
