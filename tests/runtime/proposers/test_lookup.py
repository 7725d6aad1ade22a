import random

import pytest

from jetdraft.runtime.proposers.lookup import (
    ROOT,
    Guess,
    LookupProposer,
    SuffixAutomaton,
)


def draft(context, budget=3, **options):
    rows = LookupProposer(**options).propose(context, budget)
    assert rows.tokens[0] == context[-1]
    return rows.tokens[1:]


@pytest.mark.parametrize(
    ("context", "options", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], {}, [4, 5, 6]),
        # The longest match wins over a later match, and of equal matches the latest.
        ([7, 1, 2, 30, 9, 1, 2, 40, 7, 1, 2], {"budget": 1}, [30]),
        ([1, 2, 30, 9, 1, 2, 40, 8, 1, 2], {"budget": 1}, [40]),
        # A draft is no longer than its match, the limit of matches or the budget.
        ([1, 2, 3, 9, 2], {}, [3]),
        ([1, 2, 3, 9, 1, 2], {}, [3, 9]),
        ([1, 2, 3, 4, 5, 1, 2, 3], {"max_match": 2}, [4, 5]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], {"budget": 2}, [4, 5]),
        # A repetition continues past the end.
        ([5, 5, 5, 5], {"budget": 8}, [5, 5, 5]),
        ([1, 2, 3, 1, 2, 3, 1, 2], {"budget": 8}, [3, 1, 2, 3, 1]),
        # Without a match there is no draft.
        ([1, 2, 3], {}, []),
        ([4], {}, []),
    ],
    ids=str,
)
def test_what_followed_the_last_time_is_drafted(context, options, expected):
    assert draft(context, **options) == expected


def test_drafted_tokens_are_looked_up_and_forgotten():
    proposer = LookupProposer()
    context = [1, 2, 3, 4, 5, 9, 1, 2]
    assert proposer.propose(context, 2).tokens[1:] == [3, 4]
    assert proposer.guess_after([3, 4], 3).tokens == [5, 9, 1]
    assert proposer.guess_after([7], 3).tokens == []
    assert proposer.propose([*context, 3], 2).tokens[1:] == [4, 5]


def test_the_evidence_is_the_length_of_the_match_in_doublings():
    text = list(range(100, 140))
    proposer = LookupProposer()
    for length, evidence in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (9, 4), (40, 5)):
        proposer.propose([*text, 7, *text[20 - length // 2 :][:length]], 4)
        assert proposer.evidence == evidence, length


def test_a_later_token_rests_on_the_tokens_before_it_too():
    guess = Guess([7, 8, 9, 7], 0.0, match=3)
    assert [guess.evidence(place) for place in range(4)] == [2, 3, 3, 3]
    assert Guess([7] * 16, 0.0, match=16).evidence(15) == 5


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
