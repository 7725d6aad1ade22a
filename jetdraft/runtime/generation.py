"""One generation: read the prompt, then propose, verify and commit round by round.

Before a round the target's cache holds the public sequence but its last token, the
root. Where attention adds up in an order that a gap changes (`Widths.skips_agree`), an
exact generation commits up to the first gap; the tokens beyond begin the next draft.
Whatever was drafted, plain decoding chooses the same tokens.
"""

import time
import warnings
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from jetdraft.errors import ConstraintError, OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.measured.stats import Round
from jetdraft.runtime.measured.widths import prefill_widths
from jetdraft.runtime.passes.answer import Answer, Target
from jetdraft.runtime.passes.buffers import SourceInput, source_tokens
from jetdraft.runtime.passes.pictures import Tiles
from jetdraft.runtime.passes.prefix import Prefix
from jetdraft.runtime.piece import Piece
from jetdraft.runtime.planning.controller import FixedController
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.planning.planner import Offer, Planner
from jetdraft.runtime.proposers.method import WALK
from jetdraft.runtime.proposers.proposer import Seen
from jetdraft.runtime.sampling.chooser import Chooser, Logprob
from jetdraft.runtime.sampling.processors import LogitsProcessor, PenaltyProcessor
from jetdraft.runtime.text import stops
from jetdraft.runtime.text.codec import CHARACTERS_PER_TOKEN
from jetdraft.runtime.text.constraint import AnswerMatcher, Matcher, Place, ThoughtRules

PROMPT_END = 16  # Tokens of a prompt before its prediction, which make the first match.


class Generation:
    """One sequence over the parts of a loaded bundle.

    The constructor checks all options, and compiles the constraint if `prepared`; else
    `run` does. `source` is what the encoder of an encoder-decoder reads. `rules` are
    processors that the model needs: they change logits before the constraint does. With
    `thinking` the text is a reply that may begin with a thought. Raises `OptionError`.

        generation = Generation(parts, planner, [5, 8, 9], Options())
        for piece in generation.run():
            print(piece.text, end="")
        generation.stats.finish_reason
    """

    def __init__(
        self,
        parts: LoadedBundle,
        planner: Planner,
        prompt: list[int],
        options: Options,
        prepared: bool = False,
        source: SourceInput = (),
        rules: Sequence[LogitsProcessor] = (),
        thinking: stops.Thinking | None = None,
        pictures: Sequence[Tiles] = (),
    ) -> None:
        _check_options(options, parts)
        drafting, ending = options.drafting, options.ending
        self.parts, self.planner, self.options = parts, planner, options
        ends = () if ending.ignore_eos else parts.bundle.eos_token_ids
        special = options.constraint is not None
        text, thoughts = parts.text.stream(prompt, ends, special), None
        if thinking is not None:
            thoughts = stops.ThoughtReader(thinking, thinking.state(parts.text, prompt))
        seconds = ending.max_seconds
        self.watcher = stops.StopWatcher(text, ends, ending.stops, seconds, thoughts)
        # Gives the bytes of tokens to come.
        self._namer = parts.text.stream(prompt, ends, special)
        thought_rules = self._thought_rules(prompt, thinking)
        self._matcher = self._make_matcher(len(prompt), *thought_rules)
        penalties = options.penalties
        changes = [PenaltyProcessor(penalties, prompt)] if penalties.changes else []
        constraint = [] if self._matcher is None else [self._matcher]
        if prepared:
            self.prepare()
        learns = not drafting.select_kv  # the text may not be the model's
        self.proposer_set = planner.proposer_set(drafting, self._matcher, learns)
        self.proposers = self.proposer_set.proposers
        self.observers = self.proposer_set.observers
        self.verifier = self.proposer_set.verifier
        processors = [*changes, *rules, *thought_rules, *constraint]
        self.chooser = Chooser(options.sampling, processors)
        self.widths = planner.widths(drafting)
        self._ends_at_gap = parts.widths.ends_at_gap(drafting.exact)
        selection = parts.bundle.target.selection
        rows = selection.rows if selection and drafting.select_kv else None
        size = len(source_tokens(source) or prompt)
        ms = parts.curve.pass_ms(self.widths[0])
        self.stats = options.stats(size, select_kv=rows, plain_ms=ms)
        self.stats.picture_tokens = sum(picture.rows for picture in pictures)
        if any(proposer.traits.blind for proposer in self.proposers):
            self.stats.unseen_tokens = self.stats.picture_tokens
        self.prompt, self._source, self._pictures = prompt, source, pictures
        self.pieces: list[Piece] = []
        self._carried: list[int] = []
        self._target: Target = parts.target

    def _thought_rules(
        self, prompt: list[int], thinking: stops.Thinking | None
    ) -> list[ThoughtRules]:
        """The rules of a thought, if it has a limit or comes before a constraint."""
        most, parts = self.options.ending.max_thinking_tokens, self.parts
        is_free = self.options.constraint is None
        if thinking is None or (is_free and most is None):
            return []
        place = Place(thinking, parts.text, prompt, most, is_free)
        return [ThoughtRules(place, parts.bundle.eos_token_ids)]

    def _make_matcher(self, start: int, *rules: ThoughtRules) -> Matcher | None:
        constraint, must_end = self.options.constraint, self.watcher.must_end
        if constraint is None:
            return None
        given = self.parts.vocabulary, constraint, start, must_end
        return AnswerMatcher(*rules, *given) if rules else Matcher(*given)

    def prepare(self) -> None:
        """Compile the constraint, unless that is done; raises `OptionError`."""
        if self._matcher is None or self.watcher.must_end():
            return
        with self.parts.claim.register_watcher(self.watcher):
            try:
                self._matcher.prepare()
            except ConstraintError:
                if not self.watcher.must_end():
                    raise

    def run(self) -> Generator[Piece, None, None]:
        """Hold the buffers and yield a piece per round; then store the response."""
        with self.parts.claim.held_by(self.watcher):
            try:
                for piece in self._generate_pieces():
                    self.pieces.append(piece)
                    paused = time.perf_counter()
                    yield piece
                    self.stats.waited_seconds += time.perf_counter() - paused
                self.watcher.end(stops.LENGTH)
            except (GeneratorExit, KeyboardInterrupt) as end:
                is_left = isinstance(end, GeneratorExit)
                self.watcher.end(stops.CANCELLED if is_left else stops.INTERRUPTED)
                raise
            finally:
                self.stats.finish_reason = self.watcher.reason
                if self._matcher is not None:
                    self._matcher.close()
            response = [token for piece in self.pieces for token in piece.token_ids]
            user = self.options.drafting.user
            request = source_tokens(self._source) or self.prompt
            if not self.options.drafting.select_kv:
                self.parts.remember(request, response, user)
            for observer in self.observers:
                observer.end(self.prompt, response, user, self.stats)

    def _generate_pieces(self) -> Iterator[Piece]:
        """Read source and prompt, yield a piece per round, then the text held back."""
        self.prepare()
        parts, exact = self.parts, self.options.drafting.exact
        self._target = self.planner.target_for(self.options.drafting)
        if self.verifier.name != WALK and parts.draft_cache is not None:
            # The last bits of its probabilities must not depend on earlier generations.
            parts.draft_cache.forget()
        start = time.perf_counter()
        parts.encode_source(self._source, self.options.drafting.may_ask_drafter)
        seen: Sequence[int] = self.prompt  # with an id for each row of a picture
        rows, token = parts.target.pictures, parts.picture_token
        if rows is not None and token is not None:
            given = self._pictures, parts.forget, self.watcher.must_end
            seen = rows.encode(self.prompt, token, *given)
        prefix = self._reusable_prefix(exact)
        parts.predicted = self._predicted()
        for observer in self.observers:
            observer.begin(self.prompt, self.chooser)
        sequence = array("I", self.prompt)
        kept = prefix.reusable_rows(seen, exact)
        for proposer in self.proposers:
            kept = self._target.cache.resumable(proposer.keep(kept))
        if rows is not None:
            kept = rows.boundary(kept)
        self.stats.reused_tokens = kept
        prefix.forget()  # while rows and states change, Ctrl-C leaves nothing to reuse
        self._target.cache.rewind(kept)
        try:
            self._prefill()
            yield from self._decode(sequence, start)
        finally:
            prefix.record([*seen, *sequence[len(seen) :]], exact)
        rest, thought = self.watcher.rest(), self.watcher.take_thought()
        if rest or thought:
            yield Piece(rest, [], 0, thought=thought)

    def _predicted(self) -> list[int]:
        """The end of the prompt and the tokens of `prediction`, which may follow it."""
        text, capacity = self.options.drafting.prediction, self._target.cache.capacity
        if not text or not self.parts.text.has_tokenizer:
            return []
        ids = self.parts.text.encode(text[: CHARACTERS_PER_TOKEN * capacity], False)
        return [*self.prompt[-PROMPT_END:], *ids[:capacity]]

    def _reusable_prefix(self, exact: bool) -> Prefix:
        """Return the record of the rows in the buffers that may be kept."""
        bits_agree = not exact or self.parts.widths.prefills_agree
        has_same_buffers = self._target.cache is self.parts.target.cache
        selects = self.options.drafting.select_kv  # its rows differ from other texts'
        may_reuse = bits_agree and has_same_buffers and not selects
        return self.parts.prefix if may_reuse else Prefix(self._target)

    def _prefill(self) -> None:
        """Run what the cache lacks of the prompt, without its last token, in passes.

        The last rows are left to the first round if they fit into its pass.
        """
        cache, end = self._target.cache, len(self.prompt) - 1
        pictures = self.parts.target.pictures
        prefills = prefill_widths(self._target.contract)
        late = self.widths[-1] - 1 if self._may_read_late() else 0
        while (unread := end - cache.length) > late and not self.watcher.must_end():
            picture = 0
            if pictures is not None:
                unread, picture = pictures.next_rows(cache.length, unread)
            width = picture or self._prefill_width(unread, prefills)
            tokens = self.prompt[cache.length : cache.length + min(unread, width)]
            answer = self._target.run(tokens, last_only=True, width=width)
            cache.advance(len(tokens))
            rows, path = Rows.chain(tokens), range(len(tokens))
            self._notify_observers(Seen(cache.length + 1, rows, path, answer))
        cache.mark()

    def _may_read_late(self) -> bool:
        """Whether the first round has no draft, but reads rows before its root."""
        target, controller = self._target, self.proposer_set.controller
        plans = not (self.proposers and isinstance(controller, FixedController))
        reads_all = not (self._pictures or self.options.drafting.select_kv)
        has_room = len(self.prompt) - 1 + self.widths[-1] <= target.cache.capacity
        is_plain = target is self.parts.target and not target.cache.states
        return plans and reads_all and has_room and is_plain

    def _prefill_width(self, unread: int, prefills: Sequence[int]) -> int:
        """The width of the next pass, with `unread` tokens of the prompt left."""
        if fitting := [width for width in prefills if width <= unread]:
            return fitting[0]
        width = self._pass_width(min(unread, self.widths[-1]))
        if width <= self._target.cache.room:
            return width
        # No room for the padding: take the widest pass that fits, or no padding at all.
        fitting = [width for width in self.widths if width <= self._target.cache.room]
        return fitting[-1] if fitting else unread

    def _decode(self, sequence: "array[int]", start: float) -> Iterator[Piece]:
        """Yield a piece per round until the text ends; its tokens extend `sequence`."""
        cache, watcher = self._target.cache, self.watcher
        # Even the last round must have room for a pass of the narrowest width.
        longest = cache.capacity + 2 - self.widths[0]
        wanted = len(sequence) + self.options.ending.max_new_tokens
        limit, first_seconds = min(cache.capacity, longest, wanted), 0.0
        while len(sequence) < limit and not (watcher.reason or watcher.must_end()):
            try:
                round_, piece = self._run_round(sequence, limit)
            except ConstraintError:
                if watcher.must_end():  # so the constraint was given up
                    return
                raise
            for observer in self.observers:
                observer.learn_times(round_)
            tokens = watcher.read(piece.token_ids[: limit - len(sequence)])
            count = len(tokens)
            sequence.extend(tokens)
            self.stats.add(round_, count)
            self.stats.thought_tokens = watcher.thought_tokens
            if self.stats.target_passes == 1:
                first_seconds = self._session_seconds()
            elapsed = time.perf_counter() - start - self.stats.waited_seconds
            session_seconds = self._session_seconds() - first_seconds
            self.stats.time_round(elapsed, count, session_seconds)
            yield Piece(
                watcher.take(),
                tokens,
                min(piece.from_draft, count),
                [self._with_names(entry) for entry in piece.logprobs[:count]],
                watcher.texts,
                watcher.take_thought(),
            )

    def _run_round(self, context: Sequence[int], limit: int) -> tuple[Round, Piece]:
        """Run a round after `context`; the piece has no text and may exceed `limit`."""
        target, matcher, started = self._target, self._matcher, time.perf_counter()
        target_before, commit_before = target.seconds, target.cache.seconds

        # Propose rows below the root, and below what the last pass left unproven.
        late = list(context[target.cache.length : -1])  # the end of the prompt
        widest = self.widths[bisect_right(self.widths, target.cache.room) - 1]
        room = min(limit - len(context), widest) - 1  # the root or the new token
        carried = self._carried[: max(room, 0)]
        known = array("I", [*context, *carried]) if carried else context
        offer = self.proposer_set.offer(known, room - len(carried), bool(late))
        started += sum(offer.late.values())  # reading late is no time of this round
        draft_seconds, draft = time.perf_counter() - started, offer.rows
        draft = draft.under([context[-1], *carried[:-1]]) if carried else draft

        # Verify: one pass of the target, and for every row one chosen token.
        if matcher is not None:
            matcher.request_masks(draft, context)
        given = Rows.chain([*late, context[-1]]) if late else draft
        ran, whole = target.verify(given, self._pass_width(len(given)), offer.probing)
        rows = draft if late else ran
        answer = whole.rows(slice(len(late), None)) if late else whole
        target.cache.advance(len(late))
        positions = [len(context) + depth for depth in rows.depths]
        processed = self.chooser.process(answer, rows, context)
        chosen = self.verifier.choose(rows, processed, positions, self.chooser)

        # Commit the rows that carry the tokens chosen before them, as far as they go.
        path = rows.walk(chosen)
        if matcher is not None:
            path = matcher.rows_with_masks(path)
        tokens = [chosen[row] for row in path]  # those accepted, and a new token
        logprobs = self._logprobs(answer, path, tokens)
        if matcher is not None and self.proposers:
            matcher.request_forced(context, tokens)
        proven = target.commit(path, self._ends_at_gap)
        committed, self._carried = tokens[:proven], tokens[proven:]
        shown = [*range(len(late)), *(len(late) + row for row in path)]
        self._notify_observers(Seen(len(context) + len(tokens), ran, shown, whole))

        round_ = Round(
            method=offer.method,
            width=self._pass_width(len(ran)),
            drafted=offer.rows.drafted,
            ranks=rows.ranks(path)[len(carried) :],  # carried tokens come first
            target_seconds=target.seconds - target_before,
            draft_seconds=draft_seconds,
            commit_seconds=target.cache.seconds - commit_before,
            probes=whole.probe_count,
            off=self._no_draft_reason(limit - len(context), offer, bool(late)),
            asked={p.traits.name: spent for p, spent in offer.asked.items()},
            evidence=offer.evidence,
            late=offer.late,
            seconds=0.0 if late else time.perf_counter() - started,
            experts=answer.touched,
        )
        self.proposer_set.controller.observe(round_)
        return round_, Piece("", committed, len(path) - 1, logprobs)

    def _notify_observers(self, seen: Seen) -> None:
        for observer in self.observers:
            observer.observe(seen)

    def _pass_width(self, rows: int) -> int:
        return self.widths[bisect_left(self.widths, rows)]

    def _logprobs(
        self, answer: Answer, path: Sequence[int], tokens: Sequence[int]
    ) -> list[Logprob]:
        count = self.options.logprobs
        pairs = () if count is None else zip(path, tokens, strict=True)
        return [Logprob.of(answer, row, token, count or 0) for row, token in pairs]

    def _with_names(self, entry: Logprob) -> Logprob:
        """Return `entry` with its tokens' bytes; call it in the order of the text."""
        names = self._namer.names([entry.token, *(token for token, _ in entry.top)])
        self._namer.push([entry.token])
        return replace(entry, names=names)

    def _no_draft_reason(self, room: int, offer: Offer, late: bool) -> str:
        """Why a round had no draft, for `Stats.off`; empty if it had a draft."""
        if offer.rows.drafted:
            return ""
        if not self.proposers:
            return "no method was asked for"
        if room <= 1:
            return "the answer was at its end, or the buffers full"
        if self.widths[-1] == 1:
            return "no wider pass is exact here; --no-exact can draft"
        if offer.asked and not any(rows for rows, _ in offer.asked.values()):
            return "nothing was proposed"
        return "its pass read the prompt's end" if late else "a draft would not pay"

    def _session_seconds(self) -> float:
        own = self._target.seconds + self._target.cache.seconds
        return own + sum(p.session_seconds for p in self.proposers)


def _check_options(options: Options, parts: LoadedBundle) -> None:
    """Raise `OptionError` for an unusable option; warn if the text is not stored."""
    drafting = options.drafting
    if parts.store_of(drafting.user) is not None and drafting.select_kv:
        fact = "with selected KV rows the store keeps nothing of the text, which may "
        fact += "not be the model's; it is drafted from"
        warnings.warn(fact, stacklevel=2)
    vocabulary = parts.bundle.target.contract.vocab_size
    wrong = [t for t in options.penalties.biases if not 0 <= t < vocabulary]
    if wrong:
        fact = f"logit bias of token {wrong[0]}, which is outside the vocabulary"
        raise OptionError(f"{fact}; ids are 0 to {vocabulary - 1}", "logit_bias")
    if options.ending.stops and not parts.text.has_tokenizer:
        fact = "the bundle has no tokenizer, so no stop string can be found"
        raise OptionError(f"{fact}; leave stop out", "stop")
