"""Drafting from responses to similar requests, with the words of the new request."""

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from jetdraft.contracts.tensors import WIDEST
from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows, Tokens
from jetdraft.runtime.history.store import MAX_TOKENS, ResponseStore, Similarity
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.prefix import common_length
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Traits
from jetdraft.runtime.sampling.chooser import Chooser

MIN_SIMILARITY = 0.8  # The cosine from which requests count as similar.
MAX_SCRIPTS = 4  # The most entries whose responses are followed.
LONGEST_SLOT = 32  # The most tokens that a replacement takes out or puts in.
MAX_CHANGES = 64  # The most places at which a response is adapted.
# The most tokens from the first to the last difference; time grows with the square.
MAX_COMPARED = 1024
# The most pairs of equal tokens to compare; equal beginnings and ends aside.
MAX_PAIRS = 1 << 16
LONGEST_ENDING = 3  # Last tokens of the output that are searched for.
SEARCHED_TOKENS = 64  # How many tokens ahead a response is searched.


class RecallProposer(Proposer):
    """Drafts from the responses in a `store` to the requests that are most similar."""

    traits = Traits("recall", max_draft_tokens=WIDEST - 1)

    def __init__(self, store: ResponseStore, similarity: Similarity) -> None:
        self.store, self.similarity = store, similarity
        self._prompt_tokens, self._read, self._scripts = 0, list[int](), list[Script]()

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Find similar earlier requests, and adapt their responses to this prompt."""
        self._prompt_tokens, self._read = len(prompt), []
        vector = self.similarity.vector(prompt)
        entries = [e for e in self.store.entries if e.vector.shape == vector.shape]
        scored_entries = [(float(e.vector @ vector), e) for e in entries]
        # Among entries of the same cosine the latest stays first, as in the store.
        scored_entries.sort(key=lambda pair: -pair[0])
        best = scored_entries[:MAX_SCRIPTS]
        similar = [entry for cosine, entry in best if cosine >= MIN_SIMILARITY]
        texts = [adapt_response(e.prompt, e.response, prompt) for e in similar]
        self._scripts = [Script(text) for text in texts]

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        output = list(context[self._prompt_tokens :])
        if output[: len(self._read)] != self._read:
            self._read = []
            self._scripts = [Script(script.tokens) for script in self._scripts]
        for end in range(len(self._read) + 1, len(output) + 1):
            for script in self._scripts:
                script.follow(output[max(0, end - LONGEST_ENDING) : end])
        self._read = output
        best = max(self._scripts, key=lambda script: script.agreed, default=None)
        draft = [] if best is None or best.lost else best.tokens[best.place :][:budget]
        return Rows.chain([context[-1], *draft])


class Script:
    """A response, the place that the output reached, and how many tokens `agreed`."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.place, self.agreed, self.lost = 0, 0, False

    def follow(self, output: Sequence[int]) -> None:
        """Move `place` past the last token of `output`, or to its next ending."""
        if self.tokens[self.place : self.place + 1] == list(output[-1:]):
            self.place, self.agreed, self.lost = self.place + 1, self.agreed + 1, False
            return
        self.agreed, self.lost = 0, True
        for size in range(min(LONGEST_ENDING, len(output)), 0, -1):
            ending = list(output[-size:])
            # The occurrence must end beyond the place, but may begin before it.
            first = max(0, self.place - size + 1)
            last = min(self.place + SEARCHED_TOKENS, len(self.tokens))
            for start in range(first, last):
                if self.tokens[start : start + size] == ending:
                    self.place, self.agreed, self.lost = start + size, size, False
                    return


def adapt_response(
    prompt: list[int], response: list[int], new_prompt: Sequence[int]
) -> list[int]:
    """Return the response with the words of `prompt` changed as in `new_prompt`."""
    for old, new in _differences(prompt, list(new_prompt))[:MAX_CHANGES]:
        if max(len(old), len(new)) <= LONGEST_SLOT and len(response) <= MAX_TOKENS:
            response = _replace_tokens(response, old, new)
    return response


def _differences(one: list[int], other: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return pairs of old and new tokens where texts differ; [] if that takes long."""
    start = common_length(one, other)
    one, other = one[start:], other[start:]
    end = common_length(one[::-1], other[::-1])
    one, other = one[: len(one) - end], other[: len(other) - end]
    counts = Counter(other)
    pairs = sum(counts[token] for token in one)
    if pairs > MAX_PAIRS or len(one) > MAX_COMPARED:
        return []
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return [
        (one[first:last], other[new_first:new_last])
        for kind, first, last, new_first, new_last in matcher.get_opcodes()
        if kind == "replace"
    ]


def _replace_tokens(tokens: list[int], old: list[int], new: list[int]) -> list[int]:
    result, done = list[int](), 0
    for start in [i for i, token in enumerate(tokens) if token == old[0]]:
        if start >= done and tokens[start : start + len(old)] == old:
            result += tokens[done:start] + new
            done = start + len(old)
    return result + tokens[done:]


def _make_proposer(loaded: LoadedBundle, options: MethodOptions) -> Proposer:
    store = loaded.store_of(options.user)
    if store is None or loaded.similarity is None:
        raise OptionError(
            "it needs a store of earlier responses; give --store FILE (store=), or if "
            "you did, export the bundle again with this version",
            "method",
        )
    return RecallProposer(store, loaded.similarity)


METHOD = Method(
    "recall",
    "the responses to similar requests, with --store FILE",
    _make_proposer,
    lacks=lambda bundle: (
        "" if bundle.similarity else "export the bundle again with this version"
    ),
    needs_store=True,
)
