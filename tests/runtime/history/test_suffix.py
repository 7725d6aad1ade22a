"""The automaton against a plain search through all that was read."""

import random

import pytest

from jetdraft.runtime.history.suffix import ROOT, SuffixAutomaton


def longest_match(tokens):
    """The longest ending that occurs earlier too."""
    for size in range(len(tokens) - 1, 0, -1):
        ending = tokens[-size:]
        if any(tokens[i : i + size] == ending for i in range(len(tokens) - size)):
            return size
    return 0


@pytest.mark.parametrize("letters", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", range(4))
def test_matches_are_the_longest_endings_seen_before(letters, seed):
    pick, automaton, tokens = random.Random(seed), SuffixAutomaton(), []
    for _ in range(60):
        tokens.append(pick.randrange(letters))
        automaton.extend(tokens[-1:])
        assert automaton.length(automaton.match) == longest_match(tokens)


@pytest.mark.parametrize("seed", range(6))
def test_what_follows_came_most_often_and_latest(seed):
    pick, automaton = random.Random(seed), SuffixAutomaton()
    tokens = [pick.randrange(3) for _ in range(50)]
    automaton.extend(tokens)
    size = longest_match(tokens)
    after = [
        (tokens[i + size], i)
        for i in range(len(tokens) - size)
        if tokens[i : i + size] == tokens[-size:]
    ]
    seen = [token for token, _ in after]
    best = max(after, key=lambda pair: (seen.count(pair[0]), pair[1]))[0]
    assert automaton.follow(automaton.match, 1)[0] == [best]


def test_the_score_expects_what_happened_before():
    automaton = SuffixAutomaton()
    automaton.extend([7, 1, 2, 7, 1, 3, 7, 1, 2, 9])
    state, length = automaton.step(ROOT, 0, 7)
    assert length == 1
    draft, score = automaton.follow(state, 2)
    assert draft == [1, 2]
    assert score == pytest.approx(1 + 2 / 3)


def test_sequences_do_not_run_into_each_other():
    automaton = SuffixAutomaton()
    for sequence in ([1, 2, 3], [4, 5], [1, 2, 6]):
        automaton.begin()
        automaton.extend(sequence)
    place = ROOT, 0
    for token in (3, 4):
        place = automaton.step(*place, token)
    assert place[1] == 1
    assert automaton.follow(place[0], 3)[0] == [5]


@pytest.mark.parametrize("seed", range(4))
def test_steps_through_another_text_keep_the_longest_match(seed):
    pick, automaton = random.Random(seed), SuffixAutomaton()
    sequences = [[pick.randrange(3) for _ in range(12)] for _ in range(4)]
    for sequence in sequences:
        automaton.begin()
        automaton.extend(sequence)
    text, place = [], (ROOT, 0)
    for _ in range(60):
        text.append(pick.randrange(3))
        place = automaton.step(*place, text[-1])
        sizes = [
            size
            for size in range(1, 13)
            for sequence in sequences
            for i in range(13 - size)
            if sequence[i : i + size] == text[-size:]
        ]
        assert place[1] == max(sizes, default=0)
