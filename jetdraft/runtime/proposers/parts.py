"""The parts of a loaded bundle: what proposers are made of and generations run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict

import numpy as np

from jetdraft.bundle import Bundle, GraphEntry, read_streams
from jetdraft.contract import EARLY_EXIT
from jetdraft.devices.providers import AUTO, PROVIDERS, choose
from jetdraft.errors import DraftingError, JetdraftError, OptionError, ProviderError
from jetdraft.runtime.history.similarity import Similarity
from jetdraft.runtime.history.store import Entry, ResponseStore
from jetdraft.runtime.measured.profiles import Profiles
from jetdraft.runtime.passes.cache import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.halves import Halves
from jetdraft.runtime.passes.opener import Opener, Weights
from jetdraft.runtime.passes.prefix import Prefix
from jetdraft.runtime.passes.session import default_threads
from jetdraft.runtime.proposers.follower import Follower
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.constraint import Vocabulary
from jetdraft.runtime.text.stops import StopWatcher

CLOSED = "this model is closed; load the bundle again"

OFF = "off"
"""The name in place of the drafter's provider to run without the drafter."""


class LoadOptions(TypedDict, total=False):
    """Where and how a bundle runs: the keyword arguments of `jetdraft.load`.

    provider          "cpu", "cuda", "tensorrt" or "auto", the fastest of them that runs
                      here; default: the provider that the bundle was exported for
    threads           threads of the target; default: the cores of this process
    streams           a `streams.npz` of the same base; default: the bundle's own
    store             a file that keeps requests and responses to draft from; default:
                      nothing is kept
    drafter_provider  another provider for the drafter, or "off" to run without it
    """

    provider: str | None
    threads: int | None
    streams: str | Path | None
    store: str | Path | None
    drafter_provider: str | None


def _check_options(options: LoadOptions) -> None:
    """Refuse wrong values; only the command line has checked its options before."""
    choices = LoadOptions.__annotations__
    for name in options:
        if name not in choices:
            words = ", ".join(choices)
            raise OptionError(f"unknown option {name!r} of load; choose {words}", name)
    for field in ("streams", "store"):
        value = options.get(field)
        if not isinstance(value, (str, Path, type(None))):
            raise OptionError(f"{field} {value!r} is not a path; give a path", field)
    drafter = options.get("drafter_provider")
    if drafter not in (None, OFF, AUTO, *PROVIDERS):
        names = ", ".join((*PROVIDERS, AUTO, OFF))
        raise ProviderError(
            f"unknown provider {drafter!r} for the drafter; choose {names}"
        )


class Claim:
    """Lets one generation at a time use the buffers.

    with claim.held_by(watcher):
        ...
    """

    BUSY = (
        "this model is already generating; finish or close the other stream, or take "
        "another model from a Pool"
    )

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: StopWatcher | None = None
        self._is_closed = False

    @contextmanager
    def held_by(self, watcher: StopWatcher) -> Iterator[None]:
        """Hold the buffers; raises `JetdraftError` while another generation does.

        After `close` it always raises.
        """
        if self._is_closed:
            raise JetdraftError(CLOSED)
        if not self._lock.acquire(blocking=False):
            raise JetdraftError(self.BUSY)
        self._holder = watcher
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()

    def check_free(self) -> None:
        """Raise `JetdraftError` while a generation uses the buffers."""
        if self._lock.locked():
            raise JetdraftError(self.BUSY)

    def close(self) -> None:
        """Refuse all later generations; raises `JetdraftError` while one is running."""
        self.check_free()
        self._is_closed = True

    def cancel(self) -> None:
        """End the running generation at its next round; any thread may call this."""
        holder = self._holder
        if holder is not None:
            holder.cancelled.set()


class Parts:
    """Graphs, text, store and measurements of a loaded bundle.

    `follower` feeds the drafter's graph, `prefix` knows the rows in the target's
    buffers, `widths` and `curve` were measured on this machine. Parts that are made
    `like` other parts share their sessions on the CPU, and have buffers of their own.

        parts = Parts(Bundle.open("bundle"), {"threads": 2})
        parts.target.run([5, 8])
    """

    def __init__(
        self, bundle: Bundle, options: LoadOptions, like: Parts | None = None
    ) -> None:
        _check_options(options)
        self.bundle, self.options = bundle, options
        threads = options.get("threads")
        self.threads = default_threads() if threads is None else threads
        if like is None:
            self._opener = self._target_opener()
            self._drafter_opener = self._opener_beside(self._opener)
            self.text = TextCodec(bundle.tokenizer)
        else:
            self._opener, self._drafter_opener = like._opener, like._drafter_opener
            self.text = like.text
        self.provider = self._opener.provider.name
        self.store = self._open_store()
        self.similarity = Similarity(bundle.similarity) if bundle.similarity else None
        self._early, self._late = self._stream_weights()
        self.target: Graph = self._opener.graph(bundle.target, self._late)
        self.prefix = Prefix(self.target)
        self.drafter = self._open_drafter()
        self.follower = None if self.drafter is None else Follower(self.drafter)
        self.claim = Claim()
        self._halves: Halves | None = None
        self.profiles = Profiles(bundle, self.placement, self.threads)
        self.measure()

    def measure(self, again: bool = False) -> None:
        """Take `widths` and `curve` from an earlier load, or measure them `again`.

        The times that `jetdraft tune` measured on this machine count for more.
        """
        self.claim.check_free()
        self.target.prepare(exact=True)
        self.widths, self.curve = self.profiles.measured(
            self.target, self.drafter, again
        )
        tuned = self.profiles.tuned()
        if tuned is not None:
            self.curve.take(tuned)

    @property
    def placement(self) -> str:
        """The provider: "cuda", or "cuda+cpu" where the drafter has another."""
        drafter = self.provider
        if self._drafter_opener is not None:
            drafter = self._drafter_opener.provider.name
        elif self.bundle.drafter is not None:
            drafter = OFF
        same = drafter == self.provider
        return self.provider if same else f"{self.provider}+{drafter}"

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that constraints need; raises `OptionError` without it."""
        size, ends = self.target.contract.vocab_size, self.bundle.eos_token_ids
        return self.text.vocabulary(size, tuple(ends))

    @property
    def caches(self) -> dict[str, Cache]:
        """The buffers of the target and the drafter."""
        graphs = {"target": self.target, "drafter": self.drafter}
        return {name: graph.cache for name, graph in graphs.items() if graph}

    def halves(self) -> Halves:
        """The target in two halves; the first call opens them.

        They hold the weights a second time. Raises `OptionError` if the bundle has no
        halves, and on other providers than the CPU.
        """
        if self._halves is not None:
            return self._halves
        if self.provider != "cpu":
            raise DraftingError(
                f"the halves of a target run on the CPU, not on {self.provider}; leave "
                "the prune threshold out"
            )
        entry, opener = self.bundle.target, self._opener
        if entry.halves is None:
            raise DraftingError(
                "the bundle's target is not cut in halves, since all of its layers "
                "have streams; leave the prune threshold out"
            )
        self._halves = Halves(
            opener.session(entry.halves.lower, self._early),
            opener.session(entry.halves.upper, self._late),
            entry.split_contract,
            opener.compaction(entry.halves.lower_compaction),
            opener.compaction(entry.halves.upper_compaction),
        )
        return self._halves

    def store_of(self, user: str) -> ResponseStore | None:
        """A user's earlier responses; None without a store. Raises `OptionError`."""
        if self.store is not None:
            return self.store.of(user)
        if user:
            raise DraftingError(
                f"user {user!r} needs a store; give --store FILE (store=) too"
            )
        return None

    def remember(
        self, prompt: Sequence[int], response: Sequence[int], user: str = ""
    ) -> None:
        """Keep a user's request and its response, if there is a store."""
        if self.store is None:
            return
        empty = np.zeros(0, np.float32)
        vector = self.similarity.vector(prompt) if self.similarity else empty
        entry = Entry(list(prompt), list(response), vector)
        self.store.of(user).add(entry)

    def forget(self) -> None:
        """Read the next prompt from its beginning."""
        self.prefix.forget()
        if self.follower is not None:
            self.follower.forget()

    def _target_opener(self) -> Opener:
        own = self.options.get("provider")
        provider = self.bundle.provider if own is None else own
        opener = self._placed(self.bundle.target, provider, self.threads, spinning=True)
        own_streams = self.options.get("streams") is not None
        if own_streams and opener.provider.name == "tensorrt":
            raise ProviderError(
                "TensorRT builds weights into its engines and cannot swap streams; "
                "export the checkpoint that has them, or choose --provider cuda"
            )
        return opener

    def _opener_beside(self, target: Opener) -> Opener | None:
        """How the drafter is opened; None if it is off or the bundle has no drafter."""
        entry, provider = self.bundle.drafter, self.options.get("drafter_provider")
        beside = self.options.get("provider")
        if provider is None and beside in (None, self.bundle.provider):
            provider = self.bundle.drafter_provider
        if provider == OFF or entry is None:
            return None
        # One quiet thread: a second spinning pool would take the target's cores.
        return self._placed(entry, provider or target.provider.name, 1, spinning=False)

    def _placed(
        self, entry: GraphEntry, provider: str, threads: int, spinning: bool
    ) -> Opener:
        graph = (self.bundle.flavour, entry.contract.dtype)
        return Opener(self.bundle, choose(provider, [graph]), threads, spinning)

    def _open_drafter(self) -> Graph | None:
        if self.bundle.drafter is None or self._drafter_opener is None:
            return None
        drafter = self._drafter_opener.graph(self.bundle.drafter)
        drafter.prepare(exact=False)
        return drafter

    def _open_store(self) -> ResponseStore | None:
        file = self.options.get("store")
        if file is None:
            return None
        return ResponseStore(
            Path(file),
            self.bundle.tokenizer_sha256,
            vocab_size=self.bundle.target.contract.vocab_size,
        )

    def _stream_weights(self) -> tuple[Weights, Weights]:
        """The weights of other streams: for the lower half, and for other graphs."""
        file = self.options.get("streams")
        if file is None:
            return {}, {}
        weights = read_streams(Path(file), self.bundle)
        early: dict[str, Any] = {n: weights[n] for n in EARLY_EXIT if n in weights}
        return early, {n: w for n, w in weights.items() if n not in EARLY_EXIT}
