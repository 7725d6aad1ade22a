"""Notes what the target said where drafts were wrong, and takes what was learned of it.

Online Speculative Decoding (2310.07177): the wrong places of a text teach the drafter,
which `jetdraft train drafter --from-use` trains beside the model.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence

import numpy as np

from jetdraft.kept.lessons import CANDIDATES, MOST_PLACES, MOST_TOKENS, Lesson
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.followers.block_follower import AnyFollower
from jetdraft.runtime.measured.rates import Acceptance
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.proposers.parts import Learning
from jetdraft.runtime.proposers.proposer import Observer, Seen
from jetdraft.runtime.sampling.chooser import Chooser


class Learner(Observer):
    """Keeps a lesson of each generation, and the drafter's weights up to date.

    `methods` are the names of those that draft with the drafter. New weights make the
    `acceptance` of these methods unknown.

        Learner(parts.learning, parts.follower, {"draft"}, planner.acceptance)
    """

    def __init__(
        self,
        learning: Learning,
        follower: AnyFollower,
        methods: Collection[str],
        acceptance: MutableMapping[str, Acceptance],
    ) -> None:
        self._lessons, self._weights = learning
        self._follower = follower
        self._methods, self._acceptance = methods, acceptance
        self._version = 0
        self._notes: dict[int, tuple[Int64s, Float32s]] = {}
        """The target's candidates by the index of the token that a draft missed."""

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Swap the drafter's weights if others should draft now."""
        self._notes = {}
        version = self._weights.look()
        if version == self._version:
            return
        self._version = version
        graph = self._weights.graph()
        if graph is None:
            return
        self._follower.graph.take(graph)
        self._follower.forget()
        for name in self._methods:
            self._acceptance.pop(name, None)

    def observe(self, seen: Seen) -> None:
        """Note the target's candidates where all children of a row were wrong."""
        last, place = seen.path[-1], seen.length - 1
        # An inexact guess may be withdrawn: this pass says anew what follows its root.
        for index in range(seen.length - len(seen.path), place + 1):
            self._notes.pop(index, None)
        if not seen.rows.children(last):
            return
        answer = seen.answer
        ids, logits = answer.candidates[last], answer.candidate_logits[last]
        self._notes[place] = ids[:CANDIDATES].copy(), logits[:CANDIDATES].copy()
        if len(self._notes) > MOST_PLACES:
            del self._notes[next(iter(self._notes))]

    def end(
        self, prompt: Sequence[int], response: Sequence[int], user: str, stats: Stats
    ) -> None:
        """Keep the lesson, and count what the drafter's tokens were worth."""
        shares = [s for name, s in stats.by_method.items() if name in self._methods]
        self._weights.count(
            self._version,
            sum(share.accepted_tokens for share in shares),
            sum(share.evaluated_tokens for share in shares),
        )
        tokens = [*prompt, *response]
        cut = max(0, len(tokens) - MOST_TOKENS)
        places = [p for p in sorted(self._notes) if cut < p < len(tokens)]
        if places:
            lesson = Lesson(
                np.array(tokens[cut:]),
                np.array(places) - cut,
                np.stack([self._notes[place][0] for place in places]),
                np.stack([self._notes[place][1] for place in places]),
            )
            self._lessons.add(lesson, user)
        self._notes = {}
