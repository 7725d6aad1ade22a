import random

import numpy as np
import pytest

from jetdraft.methods.recall.method import RecallProposer, Script, adapt_response
from jetdraft.runtime.history.store import Entry, ResponseStore, Similarity
from jetdraft.runtime.proposers import lookup as module
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests import cases

CHOOSER = Chooser(Sampling())
REQUEST, RESPONSE = list(range(20)), list(range(50, 70))


def draft(context, budget=3, **options):
    rows = module.LookupProposer(**options).propose(context, budget)
    assert rows.tokens[0] == context[-1]
    return rows.tokens[1:]


@cases(
    "context, options, expected",
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
    # A draft ends before the token of a picture's rows.
    ([1, 2, 8, 8, 8, 1, 2], {"end": 8}, []),
    ([1, 2, 3, 8, 8, 1, 2, 3], {"end": 8}, []),
    ([1, 2, 3, 8, 9, 1, 2], {"end": 8}, [3]),
    ([1, 2, 3, 8, 9, 1, 2], {}, [3, 8]),
    ([1, 2, 3], {}, []),
    ([4], {}, []),
    ids=str,
)
def test_what_followed_the_last_time_is_drafted(context, options, expected):
    assert draft(context, **options) == expected


def test_drafted_tokens_are_looked_up_and_forgotten():
    proposer, context = module.LookupProposer(), [1, 2, 3, 4, 5, 9, 1, 2]
    assert proposer.propose(context, 2).tokens[1:] == [3, 4]
    assert proposer.guess_after([3, 4], 3).tokens == [5, 9, 1]
    assert proposer.guess_after([7], 3).tokens == []
    assert proposer.propose([*context, 3], 2).tokens[1:] == [4, 5]


def test_the_evidence_is_the_length_of_the_match_in_doublings():
    text = list(range(100, 140))
    proposer = module.LookupProposer()
    for length, evidence in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (9, 4), (40, 5)):
        proposer.propose([*text, 7, *text[20 - length // 2 :][:length]], 4)
        assert proposer.evidence == evidence, length


def test_a_later_token_rests_on_the_tokens_before_it_too():
    guess = module.Guess([7, 8, 9, 7], 0.0, match=3)
    assert [guess.evidence(place) for place in range(4)] == [2, 3, 3, 3]
    assert module.Guess([7] * 16, 0.0, match=16).evidence(15) == 5


def longest_match(tokens):
    for size in range(len(tokens) - 1, 0, -1):
        ending = tokens[-size:]
        if any(tokens[i : i + size] == ending for i in range(len(tokens) - size)):
            return size
    return 0


@pytest.mark.parametrize("letters", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", range(4))
def test_matches_are_the_longest_endings_seen_before(letters, seed):
    pick, automaton, tokens = random.Random(seed), module.SuffixAutomaton(), []
    for _ in range(60):
        tokens.append(pick.randrange(letters))
        automaton.extend(tokens[-1:])
        assert automaton.match[1] == longest_match(tokens)


@pytest.mark.parametrize("seed", range(6))
def test_what_follows_came_most_often_and_latest(seed):
    pick, automaton = random.Random(seed), module.SuffixAutomaton()
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
    assert automaton.follow(automaton.match[0], 1)[0] == [best]


def test_the_score_expects_what_happened_before():
    automaton = module.SuffixAutomaton()
    automaton.extend([7, 1, 2, 7, 1, 3, 7, 1, 2, 9])
    state, length = automaton.step(module.ROOT, 0, 7)
    assert length == 1
    draft, score = automaton.follow(state, 2)
    assert draft == [1, 2]
    assert score == pytest.approx(1 + 2 / 3)


def test_sequences_do_not_run_into_each_other():
    automaton = module.SuffixAutomaton()
    for sequence in ([1, 2, 3], [4, 5], [1, 2, 6]):
        automaton.begin()
        automaton.extend(sequence)
    place = module.ROOT, 0
    for token in (3, 4):
        place = automaton.step(*place, token)
    assert place[1] == 1
    assert automaton.follow(place[0], 3)[0] == [5]


@pytest.mark.parametrize("seed", range(4))
def test_steps_through_another_text_keep_the_longest_match(seed):
    pick, automaton = random.Random(seed), module.SuffixAutomaton()
    sequences = [[pick.randrange(3) for _ in range(12)] for _ in range(4)]
    for sequence in sequences:
        automaton.begin()
        automaton.extend(sequence)
    text, place = [], (module.ROOT, 0)
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


@pytest.fixture
def similarity(tmp_path):
    table = np.random.default_rng(0).normal(size=(200, 16))
    np.save(tmp_path / "table.npy", (40 * table).clip(-127, 127).astype(np.int8))
    return Similarity(tmp_path / "table.npy")


@pytest.fixture
def store(tmp_path):
    return ResponseStore(tmp_path / "store.sqlite", "tokens")


def decode(proposer, prompt, output, budget=4):
    proposer.begin(prompt, CHOOSER)
    context, rounds = list(prompt), 0
    while len(context) < len(prompt) + len(output):
        left = output[len(context) - len(prompt) :]
        draft = proposer.propose(context, budget).tokens[1:]
        right = 0
        while right < min(len(draft), len(left) - 1) and draft[right] == left[right]:
            right += 1
        context += left[: right + 1]
        rounds += 1
    return rounds


@cases(
    "request_, response, output, rounds",
    (REQUEST, RESPONSE, RESPONSE, 4),
    (list(range(100, 120)), RESPONSE, RESPONSE, 20),  # another request
    # Slot 9 of the request is repeated in the response.
    (
        [*range(9), 199, *range(10, 20)],
        [50, 51, 9, 52, 53, 54, 55, 56],
        [50, 51, 199, 52, 53, 54, 55, 56],
        2,
    ),
    ids=["same", "other", "slot"],
)
def test_similar_requests(store, similarity, request_, response, output, rounds):
    store.add(Entry(REQUEST, response, similarity.vector(REQUEST)))
    alike = similarity.vector(REQUEST) @ similarity.vector(request_) > 0.8
    assert alike == (rounds < len(output))
    assert decode(RecallProposer(store, similarity), request_, output) == rounds


@cases(
    "script, output, following",
    ([1, 2, 3, 4], [], [1, 2, 3]),
    ([1, 2, 3, 4], [9], []),
    ([1, 2, 3, 4], [9, 2], [3, 4]),
    ([1, 2, 3, 4, 5, 6, 7], [1, 2, 99], []),
    ([1, 2, 3, 4, 5, 6, 7], [1, 2, 99, 4], [5, 6, 7]),
    ([1, 2, 3, 1, 4, 5], [1, 2, 3, 99, 1], [4, 5]),
    ids=str,
)
def test_a_lost_place_is_found(script, output, following):
    script = Script(script)
    for end in range(1, len(output) + 1):
        script.follow(output[:end])
    assert script.tokens[script.place :][: 0 if script.lost else 3] == following


@cases(
    "prompt, response, now, expected",
    ([1, 2, 9], [5, 2, 5], [1, 3, 9], [5, 3, 5]),
    ([1, 2, 2, 9], [2, 2, 7], [1, 3, 9], [3, 7]),
    ([1, 2, 9], [5, 2], [1, 2, 9], [5, 2]),
    ([1, 9], [5, 1], [1, 8, 9], [5, 1]),
)
def test_words_of_another_request(prompt, response, now, expected):
    assert adapt_response(prompt, response, now) == expected


def test_a_withdrawn_token_is_forgotten(store, similarity):
    prompt, response = list(range(20)), list(range(50, 60))
    store.add(Entry(prompt, response, similarity.vector(prompt)))
    proposer = RecallProposer(store, similarity)
    proposer.begin(prompt, CHOOSER)
    proposer.propose([*prompt, 50, 51, 99], 2)
    assert proposer.propose([*prompt, 50, 51], 2).tokens[1:] == [52, 53]


def test_lookup_reads_earlier_responses(store):
    store.add(Entry([1], [70, 71, 72, 73, 74], np.zeros(0, np.float32)))
    proposer = module.LookupProposer(store=store)
    proposer.begin([5], CHOOSER)
    assert proposer.propose([5, 6, 70, 71], 4).tokens[1:] == [72, 73]
    assert proposer.propose([5, 6, 70, 71, 72], 4).tokens[1:] == [73, 74]
    store.add(Entry([2], [5, 6, 88, 89], np.zeros(0, np.float32)))
    proposer.begin([5], CHOOSER)
    assert proposer.propose([5, 6], 4).tokens[1:] == [88, 89]
    assert module.LookupProposer().propose([5, 6], 4).tokens[1:] == []


def test_the_likelier_draft_wins(store):
    """The text itself went on with 9 once of twice, the responses always with 8."""
    for start in range(3):
        store.add(Entry([start], [start, 6, 7, 8, 8], np.zeros(0, np.float32)))
    proposer = module.LookupProposer(store=store)
    proposer.begin([5], CHOOSER)
    assert proposer.propose([6, 7, 1, 6, 7, 9, 6, 7], 2).tokens[1:] == [8, 8]


def test_a_response_that_was_replaced_is_learned(store):
    """SQLite gives the id of the deleted row again."""
    lookup = module.LookupProposer(store=store)
    for response in ([5, 6, 7, 8], [5, 6, 9, 9]):
        store.add(Entry([1], response, np.zeros(0, np.float32)))
        lookup.begin([1], CHOOSER)
    assert 9 in lookup.propose([1, 5, 6], 2).tokens[1:]


def test_vectors_of_another_size_are_passed_over(store, similarity):
    store.add(Entry([1, 2], [3], np.ones(3, np.float32)))
    assert decode(RecallProposer(store, similarity), [1, 2], [3, 4]) == 2
