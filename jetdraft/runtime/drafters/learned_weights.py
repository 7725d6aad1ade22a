"""The drafter's weights that were learned from use: tried, then kept or taken back."""

import logging
import warnings
from threading import Lock

from jetdraft.errors import JetdraftError
from jetdraft.learning.lessons import OWN, Choice, Tally, WeightSets, judge_trial, label
from jetdraft.manifest import GraphEntry
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.opener import Opener, Weights

log = logging.getLogger("jetdraft.learning")


class LearnedWeights:
    """Chooses the drafter's weights, for all twins of a model.

    A new set is on trial. The earlier weights draft until `VERDICT_TOKENS` of their
    drafts have been evaluated; then the set drafts, and `judge_trial` compares both.
    `version` counts the changes: a twin whose graph is of another version takes `graph`
    between two of its generations.
    """

    def __init__(self, sets: WeightSets, opener: Opener, entry: GraphEntry) -> None:
        self._sets, self._opener, self._entry = sets, opener, entry
        self.version, self._name = 0, OWN
        self._tally = Tally()
        self._tally_before: Tally | None = None
        self._weights: Weights | None = None
        self._lock = Lock()

    def refresh(self) -> int:
        """Read which set should draft now; returns `version`, larger if it changed."""
        with self._lock:
            choice = self._sets.read_choice()
            name = self._drafting_set(choice)
            is_trial = choice.before is not None and name == choice.name
            if name != self._name:
                self._tally_before = self._tally if is_trial else None
                self._name, self._tally, self._weights = name, Tally(), None
                self.version += 1
                log.info("%s drafts%s", label(name), " on trial" if is_trial else "")
            elif not is_trial:
                self._tally_before = None  # another process has decided
            return self.version

    def _drafting_set(self, choice: Choice) -> str:
        """The set to draft with; a set on trial waits for the earlier set's rate."""
        if choice.before is None:
            return choice.name
        goes_on = self._name == choice.name and self._tally_before is not None
        begins = self._name == choice.before and self._tally.is_full
        return choice.name if goes_on or begins else choice.before

    def graph(self) -> Graph | None:
        """Open the drafter's graph with the weights that should draft now.

        Its buffers are empty. If the weights do not fit, this warns, takes back a set
        on trial, and returns None.
        """
        with self._lock:
            try:
                if self._weights is None:
                    weights = self._sets.arrays(self._name)
                    self._opener.forget_sessions()
                    self._weights = weights
                return self._opener.graph(self._entry, self._weights)
            except JetdraftError as error:
                warnings.warn(f"no weights were swapped: {error}", stacklevel=2)
                self._sets.settle(self._name, keep=False)
                return None

    def record_acceptance(self, version: int, accepted: int, evaluated: int) -> None:
        """Add accepted and evaluated tokens to the tally; may end a set's trial."""
        with self._lock:
            if version != self.version or not evaluated:
                return
            self._tally.add(accepted, evaluated)
            if self._tally_before is None:
                return
            verdict = judge_trial(self._tally_before, self._tally)
            if verdict is None:
                return
            rates = self._tally.rate, self._tally_before.rate
            self._tally_before = None
            if self._sets.settle(self._name, keep=verdict):
                outcome = "kept" if verdict else "taken back"
                text = "%s is %s: %.3f of its tokens were accepted, %.3f before it"
                log.info(text, label(self._name), outcome, *rates)
