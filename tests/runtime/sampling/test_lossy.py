import numpy as np
import pytest

from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.sampling import lossy
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
    assert accepted("tolerant", [2, 1, 3])[1] == 1.0


def test_tolerant_takes_the_top_within_the_tolerance():
    ratio = np.exp(-lossy.TOLERANCE)
    for token, probability in enumerate(P):
        passes = probability >= P[0] * ratio and token < lossy.TOP
        assert (accepted("tolerant", [token])[token] == 1.0) == passes


@pytest.mark.parametrize("name", ["typical", "tolerant"])
def test_lossy_verifiers_say_so_and_are(name):
    assert VERIFIERS[name].lossy
    pi = accepted(name, [1])
    assert np.abs(pi - P).max() > 0.1
