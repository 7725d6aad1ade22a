"""The public face of the runtime: load a bundle, generate text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from jetdraft.bundle import Bundle, GraphEntry, read_streams
from jetdraft.contract import EARLY_EXIT
from jetdraft.devices.providers import AUTO as AUTO_PROVIDER
from jetdraft.devices.providers import PROVIDERS, choose
from jetdraft.errors import (
    JetdraftError,
    MethodError,
    OptionError,
    PromptError,
    ProviderError,
)
from jetdraft.runtime.async_stream import AsyncStream
from jetdraft.runtime.drafts.arrays import Int64s
from jetdraft.runtime.generation import Result, Stream
from jetdraft.runtime.history.similarity import Similarity
from jetdraft.runtime.history.store import Entry, ResponseStore
from jetdraft.runtime.history.trigrams import Counts, Trigrams
from jetdraft.runtime.measured.profiles import Profiles
from jetdraft.runtime.measured.widths import Calibration
from jetdraft.runtime.passes import prefix_file as saved
from jetdraft.runtime.passes.cache import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.halves import PrunedGraph
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.prefix import Prefix
from jetdraft.runtime.passes.session import default_threads
from jetdraft.runtime.planning import tuning
from jetdraft.runtime.planning.drafting import AUTO
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.planning.planner import Planner
from jetdraft.runtime.planning.tuning import Tuning
from jetdraft.runtime.proposers import (
    CascadeProposer,
    DraftProposer,
    LookupProposer,
    Proposer,
    RecallProposer,
    StreamProposer,
    TrigramProposer,
)
from jetdraft.runtime.proposers.draft_stops import AcceptanceHead
from jetdraft.runtime.proposers.follower import Follower
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.constraint import Vocabulary
from jetdraft.runtime.text.prompt import check_ids
from jetdraft.runtime.text.stops import StopWatcher
from jetdraft.runtime.text.template import (
    ChatTemplate,
    Message,
    check_messages,
    read_template,
)

OFF = "off"
"""In place of the drafter's provider: no drafter."""

_BUSY = (
    "this model is already generating; finish or close the other stream, or take "
    "another from a Pool"
)


def load(
    path: str | Path,
    provider: str | None = None,
    threads: int | None = None,
    streams: str | Path | None = None,
    store: str | Path | None = None,
    user: str = "",
    table: str | Path | None = None,
    drafter_provider: str | None = None,
    method: str | None = None,
) -> Model:
    """Open a bundle, check it and get it ready to generate.

    `provider` ("cpu", "cuda", "tensorrt" or "auto", the fastest of them that can)
    defaults to the one it was exported for; so does `drafter_provider`, or to a
    `provider` that was given, and "off" leaves the drafter out. `threads` defaults to
    the cores of this process, `streams` (a `streams.npz` of the same base) to those in
    the bundle. In `store`, a file, the requests and responses of `user` are kept to
    draft from; none are without it. `table` is a trigram table of the same tokenizer.
    `method` is that of generations which ask for none. Raises `BundleError`,
    `ProviderError` or `StoreError`.

        with jetdraft.load("bundle") as model:
            print(model.generate("def fib(n):").text)
    """
    bundle = Bundle.open(path)
    return Model(
        bundle,
        provider,
        threads,
        streams,
        store,
        user,
        table,
        drafter_provider,
        method,
    )


def _check_types(**given: object) -> None:
    """Programs may pass anything; the command line has checked its own."""
    for name, value in given.items():
        kinds = (str,) if name == "user" else (str, Path, type(None))
        if not isinstance(value, kinds):
            what = "a text" if name == "user" else "a path"
            raise OptionError(f"{name} {value!r} is not {what}; give one")


class Model:
    """A loaded bundle; one generation at a time. See `Pool` for several.

    model = jetdraft.load("bundle")
    result = model.generate("def fib(n):", max_new_tokens=64)
    for piece in model.stream("def fib(n):", temperature=0.8, seed=1):
        print(piece.text, end="")
    """

    def __init__(
        self,
        bundle: Bundle,
        provider: str | None = None,
        threads: int | None = None,
        streams: str | Path | None = None,
        store: str | Path | None = None,
        user: str = "",
        table: str | Path | None = None,
        drafter_provider: str | None = None,
        method: str | None = None,
        like: Model | None = None,
    ) -> None:
        _check_types(store=store, table=table, streams=streams, user=user)
        self.bundle = bundle
        self._claim = Lock()
        self._current: StopWatcher | None = None
        self._template: ChatTemplate | None = None
        self._arguments = (
            *(bundle, provider, threads, streams, store, user, table),
            *(drafter_provider, method),
        )
        self.threads = default_threads() if threads is None else threads
        if like is None:
            self._opening, self._drafting = self._places(provider, drafter_provider)
        else:
            self._opening, self._drafting = like._opening, like._drafting
        self.provider = self._opening.provider.name
        self._check_streams(streams)
        self.profiles = Profiles(bundle, self.placement, self.threads)
        self.text: TextCodec = TextCodec(bundle.tokenizer) if not like else like.text
        self.store = self._open_store(store, user)
        self.similarity = Similarity(bundle.similarity) if bundle.similarity else None
        given = {} if streams is None else read_streams(Path(streams), bundle)
        # The early exit's weights are in the lower half, all others in the upper one.
        self._early = {name: given[name] for name in EARLY_EXIT if name in given}
        self._late = {n: w for n, w in given.items() if n not in EARLY_EXIT}
        self.target = self._opening.graph(bundle.target, self._late)
        self._prefix = Prefix(self.target)
        self.drafter = None
        if bundle.drafter is not None and self._drafting is not None:
            self.drafter = self._drafting.graph(bundle.drafter)
            self.drafter.prepare(exact=False)
        self.follower = None if self.drafter is None else Follower(self.drafter)
        self.trigrams = Trigrams(self._read_counts(table))
        self.planner = self._make_planner(self.calibrate())
        self._halves: PrunedGraph | None = None
        self._use_tuning()
        self.method = method or AUTO
        if method is not None:
            self.planner.choose(Options(method=method))  # refuses what there is not

    def _places(
        self, provider: str | None, drafter_provider: str | None
    ) -> tuple[Opener, Opener | None]:
        """Where the target runs, and the drafter."""
        bundle = self.bundle
        own = bundle.provider if provider is None else provider
        target = self._placed(bundle.target, own, self.threads, True)
        if drafter_provider is None and own == bundle.provider:
            drafter_provider = bundle.drafter_provider
        return target, self._beside(drafter_provider or target.provider.name)

    def _open_store(self, file: str | Path | None, user: str) -> ResponseStore | None:
        if file is None:
            if user:
                raise OptionError(f"user {user!r} needs a store; give --store FILE too")
            return None
        vocabulary = self.bundle.target.contract.vocab_size
        ids = self.bundle.tokenizer_sha256
        return ResponseStore(Path(file), ids, user, vocabulary)

    def _read_counts(self, table: str | Path | None) -> Counts | None:
        if table is None:
            return None
        vocabulary = self.bundle.target.contract.vocab_size
        return Counts.load(Path(table), self.bundle.tokenizer_sha256, vocabulary)

    def _placed(
        self, entry: GraphEntry, provider: str, threads: int, spinning: bool
    ) -> Opener:
        graph = (self.bundle.flavour, entry.contract.dtype)
        return Opener(self.bundle, choose(provider, [graph]), threads, spinning)

    def _check_streams(self, given: str | Path | None) -> None:
        """TensorRT builds weights into its engines."""
        if given is not None and self.provider == "tensorrt":
            raise ProviderError(
                "TensorRT cannot swap streams; export the checkpoint that has them, or "
                "choose --provider cuda"
            )

    def _beside(self, asked: str) -> Opener | None:
        """Where the drafter runs."""
        entry = self.bundle.drafter
        if asked not in (OFF, AUTO_PROVIDER, *PROVIDERS):
            names = ", ".join((*PROVIDERS, AUTO_PROVIDER, OFF))
            raise ProviderError(
                f"unknown provider {asked!r} for the drafter; choose {names}"
            )
        if asked == OFF or entry is None:
            return None
        # One quiet thread: a second spinning pool would take the target's cores.
        return self._placed(entry, asked, 1, False)

    @property
    def placement(self) -> str:
        """The provider, and the drafter's where that is another."""
        beside = self.provider
        if self._drafting is not None:
            beside = self._drafting.provider.name
        elif self.bundle.drafter is not None:
            beside = OFF
        return self.provider if beside == self.provider else f"{self.provider}+{beside}"

    def target_for(self, options: Options) -> Graph | PrunedGraph:
        """The target, or its halves where a generation prunes.

        The halves are opened when first asked for; on the CPU they hold the weights a
        second time.
        """
        if options.prune_threshold is None:
            self.target.prepare(options.exact)
            return self.target
        entry, opening = self.bundle.target, self._opening
        if self.provider != "cpu":
            raise MethodError(
                f"pruning runs between two graphs on the CPU, not on {self.provider}; "
                "leave the prune threshold out"
            )
        if entry.halves is None:
            raise MethodError(
                "the bundle's target has no layers below its streams to exit from; "
                "leave the prune threshold out"
            )
        if self._halves is None:
            self._halves = PrunedGraph(
                opening.session(entry.halves.lower, self._early),
                opening.session(entry.halves.upper, self._late),
                entry.split_contract,
                opening.compaction(entry.halves.lower_compaction),
                opening.compaction(entry.halves.upper_compaction),
            )
        given = options.prune_threshold
        fixed = None if given == AUTO else float(given)
        self._halves.prepare(fixed, self.planner.widths(options))
        return self._halves

    def prefix_of(self, target: Graph | PrunedGraph) -> Prefix:
        """What a target's buffers hold, where that can be used."""
        if target is not self.target or not self.planner.prefills:
            return Prefix(target)
        return self._prefix

    def save_prefix(self, file: str | Path, token_ids: Sequence[int] | Int64s) -> None:
        """Read a prompt and keep its rows in a file, for prompts that begin with it.

        model.save_prefix("system.npz", model.text.encode(long_text))
        """
        tokens = self.prompt(token_ids=token_ids).tolist()
        self.generate(token_ids=tokens, method="none", max_new_tokens=1)
        if self.follower is not None:
            self.follower.follow(tokens)
        # A prompt as long as the buffers leaves its last token unread.
        rows = tokens[: self.target.cache.length]
        saved.save(Path(file), rows, self._caches, self.machine())

    def load_prefix(self, file: str | Path) -> None:
        """Put a prefix that was saved with this bundle into the buffers.

        Rows that another machine has computed serve generations only that are not
        exact. Raises `BundleError`.
        """
        self.check_idle()
        self.forget()
        tokens, ours = saved.load(Path(file), self._caches, self.machine())
        self._prefix.restore(tokens, exact=ours)
        if self.follower is not None:
            self.follower.restore(tokens)

    @property
    def _caches(self) -> dict[str, Cache]:
        """Of the target and the drafter."""
        graphs = {"target": self.target, "drafter": self.drafter}
        return {name: graph.cache for name, graph in graphs.items() if graph}

    @property
    def vocabulary(self) -> Vocabulary:
        """What texts can be constrained with."""
        size = self.bundle.target.contract.vocab_size
        return self.text.vocabulary(size, tuple(self.bundle.eos_token_ids))

    def check_idle(self) -> None:
        """Raise `JetdraftError` while a generation uses the buffers."""
        if self._claim.locked():
            raise JetdraftError(_BUSY)

    @contextmanager
    def claimed(self, ending: StopWatcher) -> Iterator[None]:
        """Generate alone; `JetdraftError` where another generation is under way."""
        if not self._claim.acquire(blocking=False):
            raise JetdraftError(_BUSY)
        self._current = ending
        try:
            yield
        finally:
            self._current = None
            self._claim.release()

    def cancel(self) -> None:
        """End the generation under way at its next round; any thread may ask."""
        current = self._current
        if current is not None:
            current.cancelled.set()

    def twin(self) -> Model:
        """Another model of the same bundle, with buffers of its own.

        On the CPU it shares the sessions, and so the weights.
        """
        return Model(*self._arguments, like=self)

    def close(self) -> None:
        """Free all memory; whatever is asked of it later raises `JetdraftError`."""
        self.check_idle()
        vars(self).clear()

    def __getattr__(self, name: str) -> Any:
        if vars(self):
            raise AttributeError(name)
        raise JetdraftError("this model is closed; load the bundle again")

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        # An error on the way out is more than a stream that somebody still has.
        with suppress(JetdraftError) if error[0] else nullcontext():
            if vars(self):
                self.close()

    def calibrate(self, again: bool = False) -> Calibration:
        """The measured width classes and pass times of this machine.

        Read from the bundle's `profiles` folder, or measured and kept there.
        """
        self.check_idle()
        self.target.prepare(exact=True)
        return self.profiles.calibration(self.target, self.drafter, again)

    def tune(self, tick: Callable[[], None] = lambda: None) -> Tuning:
        """Measure with care, plan with that from now on, and keep it in the bundle."""
        self.check_idle()
        self.target.prepare(exact=True)
        found = tuning.tune(self.target, self.planner.proposers, tick)
        self.forget()  # what was drafted from is no text
        self.profiles.keep_tuning(found)
        self.planner.plan_with(found)
        return found

    def _use_tuning(self) -> None:
        """Plan with what `tune` measured, unless that was on another machine."""
        try:
            found = self.profiles.tuning()
        except ValueError as error:
            warnings.warn(
                f"{self.profiles.tuning_file} is left out for what was measured at "
                f"this load ({error}); run jetdraft tune again",
                stacklevel=3,
            )
            return
        if found is not None:
            self.planner.plan_with(found)

    def machine(self) -> dict[str, Any]:
        """What a measurement depends on."""
        return self.profiles.machine

    def _make_planner(self, calibration: Calibration) -> Planner:
        proposers = self._make_proposers(calibration)
        # Without a corpus trigrams know little, and a cascade is one more drafter.
        asked = {"cascade"} if self.trigrams.has_corpus else {"cascade", "trigram"}
        unasked = [name for name in proposers if name not in asked]
        return Planner(
            self.target, self.follower, calibration, proposers, unasked, self._head
        )

    def _head(self) -> AcceptanceHead:
        size = 0 if self.drafter is None else self.drafter.contract.hidden_size
        file = self.profiles.acceptance_file
        return AcceptanceHead.load(file, self.bundle.sha256, size)

    def _make_proposers(self, calibration: Calibration) -> dict[str, Proposer]:
        known: dict[str, Proposer] = {"lookup": LookupProposer(store=self.store)}
        if self.follower is not None:
            cost = calibration.drafter_ms[1]
            known["draft"] = DraftProposer(self.follower, cost)
        if self.target.contract.streams:
            known["stream"] = StreamProposer(self.target)
        found = {name: known[name] for name in self.bundle.methods if name in known}
        if self.store is not None and self.similarity is not None:
            found["recall"] = RecallProposer(self.store, self.similarity)
        found["trigram"] = TrigramProposer(self.trigrams)
        if self.follower is not None:
            below = LookupProposer(store=self.store)
            found["cascade"] = CascadeProposer(self.follower, below, cost)
        return found

    def forget(self) -> None:
        """Unlearn what earlier generations taught the trigram table, and their rows."""
        self.trigrams.forget()
        self._prefix.forget()
        if self.follower is not None:
            self.follower.forget()

    def remember(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Keep a request and its response to draft from, where there is a store."""
        if self.store is None:
            return
        nowhere = np.zeros(0, np.float32)
        vector = self.similarity.vector(prompt) if self.similarity else nowhere
        self.store.add(Entry(list(prompt), list(response), vector))

    @property
    def methods(self) -> tuple[str, ...]:
        """What `method` may be, "auto" aside."""
        return self.planner.methods

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | Int64s | None = None,
        **options: Any,
    ) -> Result:
        """Generate to the end; the options are those of `Options`.

        model.generate("def fib(n):", max_new_tokens=64, temperature=0.8, seed=3)
        """
        return self.stream(prompt, token_ids=token_ids, **options).result()

    def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | Int64s | None = None,
        **options: Any,
    ) -> Stream:
        """Generate round by round; the prompt and options are checked at once.

        stream = model.stream("def fib(n):")
        for piece in stream:
            print(piece.text, end="")
        stream.stats.tokens_per_pass
        """
        known = {option.name for option in fields(Options) if option.init}
        for name in options:
            if name not in known:
                raise OptionError(f"unknown option {name!r}; see Options")
        chosen = Options(**{"method": self.method, **options})
        return Stream(self, self.prompt(prompt, token_ids), chosen)

    def astream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | Int64s | None = None,
        **options: Any,
    ) -> AsyncStream:
        """`stream` for asyncio: rounds run in a thread of their own.

        async for piece in model.astream("def fib(n):"):
            print(piece.text, end="")
        """
        return AsyncStream(self.stream(prompt, token_ids=token_ids, **options))

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> Result:
        """The assistant's next message; see `Conversation` for several turns.

        `tools`, as OpenAI has them, are shown to the template.

        model.chat([{"role": "user", "content": "Hello"}], max_new_tokens=32).text
        """
        more = {"tools": list(tools)} if tools else {}
        return self.generate(token_ids=self.chat_prompt(messages, **more), **options)

    def chat_prompt(self, messages: Sequence[Message], **more: Any) -> list[int]:
        """The ids of messages in the checkpoint's template; `more` is given to it.

        model.stream(token_ids=model.chat_prompt(messages))
        """
        text = self.template.render(check_messages(messages), **more)
        return self.text.encode(text, special=False)

    @property
    def template(self) -> ChatTemplate:
        """The checkpoint's own; `TemplateError` where there is none."""
        if self._template is None:
            ends = self.bundle.eos_token_ids
            self._template = ChatTemplate(
                read_template(self.bundle.chat_template),
                {
                    "bos_token": self.text.bos_token,
                    "eos_token": self.text.token(ends[0]) if ends else "",
                },
            )
        return self._template

    def prompt(
        self, prompt: str | None = None, token_ids: Sequence[int] | Int64s | None = None
    ) -> Int64s:
        """A prompt's ids, int64 [length], or a `PromptError` that says why not."""
        if (prompt is None) == (token_ids is None):
            raise PromptError("give either a prompt text or token_ids")
        if prompt is not None and not isinstance(prompt, str):
            raise PromptError("the prompt must be a text; give ids as token_ids=")
        given = self.text.encode(prompt) if prompt is not None else token_ids
        return check_ids(given, self.bundle.target.contract)
