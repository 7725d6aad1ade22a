"""A loaded bundle: what proposers are made of and generations run on."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jetdraft import errors
from jetdraft.bundle import CONTRIB, Bundle, read_streams
from jetdraft.contracts.step_contract import EARLY_EXIT
from jetdraft.devices import providers
from jetdraft.devices.memory import use_huge_pages
from jetdraft.devices.providers import Provider, check_on_cpu, choose_provider
from jetdraft.learning.lessons import (
    OWN,
    Choice,
    Lessons,
    Tally,
    WeightSets,
    drafter_sha256,
    judge_trial,
    label,
)
from jetdraft.manifest import GraphEntry
from jetdraft.runtime.claim import Claim, Idle
from jetdraft.runtime.drafters.ahead_cache import AheadCache
from jetdraft.runtime.drafters.draft_cache import DraftCache, LastRowCache, LedCache
from jetdraft.runtime.drafts.rows import Tokens
from jetdraft.runtime.history.store import Entry, ResponseStore, Similarity
from jetdraft.runtime.measured.cost_model import Curve
from jetdraft.runtime.measured.survey import Survey
from jetdraft.runtime.measured.widths import Profiles, Widths
from jetdraft.runtime.passes.buffers import Cache, SourceInput
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.halves import LeadingHalf, SplitSessions
from jetdraft.runtime.passes.opener import LoadOptions, Opener, Weights, check_options
from jetdraft.runtime.passes.pictures import NO_IMAGES, Tiles, cut
from jetdraft.runtime.passes.prefix import Prefix
from jetdraft.runtime.passes.pruned_halves import PrunedHalves
from jetdraft.runtime.passes.session import Spinning, default_threads, threads_of_pair
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.worker_process import Vocabulary

LARGE_DRAFTER_PARAMETERS = 30_000_000  # A larger drafter gets all threads.
log = logging.getLogger("jetdraft.learning")


class LearnedWeights:
    """Chooses the drafter's weights for all twins of a model; a new set is on trial.

    After `VERDICT_TOKENS` of the earlier and then of the new weights' drafts,
    `judge_trial` compares both. A twin of another `version` takes a new `graph`.
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
                    self._weights = self._sets.arrays(self._name)
                    own = self._opener  # its sessions have other weights
                    self._opener = Opener(own.bundle, own.provider, own.threads)
                return self._opener.graph(self._entry, self._weights)
            except errors.JetdraftError as error:
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


class Learning(NamedTuple):
    """The lessons of a folder, and the weights that were learned from them."""

    lessons: Lessons
    weights: LearnedWeights


class LoadedBundle:
    """Graphs, text, store and measurements; shares sessions with the bundle `like`."""

    def __init__(
        self, bundle: Bundle, options: LoadOptions, like: "LoadedBundle | None" = None
    ) -> None:
        check_options(options)
        self.bundle, self.options = bundle, options
        threads = options.get("threads")
        self.threads = default_threads() if threads is None else threads
        adapter = options.get("adapter")
        # A twin shares measurements too, and a model with another adapter does not.
        twin = like if like and like.options.get("adapter") == adapter else None
        if like is None:
            target, drafter, placement = self._choose_providers()
        else:
            placement = like.profiles.machine["provider"]
        measured = bundle, placement, self.threads, adapter
        self.profiles: Profiles = twin.profiles if twin else Profiles(*measured)
        if like is None:
            self._opener, self._drafter_opener = self._make_openers(target, drafter)
        else:
            self._opener, self._drafter_opener = like._opener, like._drafter_opener
        self.provider = self._opener.provider.name
        if adapter is not None:
            fix = "choose --provider cpu, or leave --adapter out"
            check_on_cpu("adapters run", self.provider, fix, "adapter")
        self.store = self.similarity = None
        vocab_size = bundle.target.contract.vocab_size
        if (file := options.get("store")) is not None:
            tokenizer = bundle.tokenizer_sha256
            self.store = ResponseStore(Path(file), tokenizer, vocab_size=vocab_size)
        if bundle.similarity is not None:
            self.similarity = Similarity(bundle.similarity, vocab_size)
        self._lower_weights, self._upper_weights = self._read_stream_weights()
        with ThreadPoolExecutor(1) as thread:  # half a second for 150,000 tokens
            reading = thread.submit(
                lambda: like.text if like else TextCodec(bundle.tokenizer)
            )
            entry = bundle.adapted(adapter)
            self.target: Graph = self._opener.graph(entry, self._upper_weights)
            self.drafter = self._open_drafter()
            self.text = reading.result()
        self.prefix = Prefix(self.target)
        self.predicted: Sequence[int] = ()  # Of the current generation.
        self.draft_cache = (
            None if self.drafter is None else self._make_draft_cache(self.drafter)
        )
        self.learning = self._open_learning(like)
        self._curve: Curve | None = None
        self._idle: Idle = like._idle if like else Idle(use_huge_pages)
        self.claim = Claim(self._idle)
        if twin is None:
            self.survey = Survey(self.target, self.drafter, self.profiles)
            self._tuned = self.profiles.read_tuning()
            if bundle.embedding is None:  # its passes have no other width
                self._idle.add(self.survey.step)
            self._survey_claim = self.claim
        else:
            self.survey, self._tuned = twin.survey, twin._tuned
            self._survey_claim = twin._survey_claim

    @property
    def widths(self) -> Widths:
        """Which widths of the target agree bit by bit; the first call may measure."""
        return self.survey.widths

    @property
    def curve(self) -> Curve:
        """What passes and drafts cost, measured now or by `jetdraft tune`."""
        if self._curve is None:
            curve, own = self.survey.curve, self.survey.target is self.target
            # Each round corrects the curve, and twins may generate at the same time.
            self._curve = curve if own else deepcopy(curve)
            if self._tuned is not None:
                self._curve.adopt(self._tuned)
        return self._curve

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the buffers of this bundle and of the survey, see `Claim.held`."""
        with self.claim.held(), self._survey_claim.held():
            yield

    def measure_again(self) -> None:
        """Measure all widths and pass times again; the caller holds the buffers."""
        self.survey.measure_again()
        self.forget()
        self._curve, self._tuned = None, self.profiles.read_tuning()

    @property
    def drafter_threads(self) -> int:
        """The number of threads of the drafter; 1 without a drafter."""
        return self._drafter_opener.threads.number if self._drafter_opener else 1

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary for constraints; raises `OptionError` if it cannot be had."""
        size, ends = self.target.contract.vocab_size, self.bundle.eos_token_ids
        return self.text.vocabulary(size, ends)

    @property
    def caches(self) -> dict[str, Cache]:
        """The caches of a saved prefix: "target", and "drafter" if it skips none."""
        cache = self.draft_cache
        drafter = self.drafter if cache is not None and not cache.skips else None
        graphs = {"target": self.target, "drafter": drafter}
        return {name: graph.cache for name, graph in graphs.items() if graph}

    def split_prompt(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Split a prompt into ids for the encoder and the decoder, or `OptionError`."""
        if self.bundle.embedding is not None:
            fact = "the bundle's model embeds texts, and writes none"
            fix = "use jetdraft embed (Model.embed)"
            raise errors.OptionError(f"{fact}; {fix}", "prompt")
        if self.bundle.speech is not None:
            fact = "the bundle's model hears, and reads no text"
            fix = "give a WAV file to jetdraft transcribe (Model.transcribe)"
            raise errors.OptionError(f"{fact}; {fix}", "prompt")
        start = list(self.bundle.start_token_ids)
        return (prompt, start) if start else ([], prompt)

    def encode_source(self, source: SourceInput, for_drafter: bool = True) -> None:
        """Run the encoders on a new source; the decoders' buffers are forgotten."""
        for graph in (self.target, self.drafter if for_drafter else None):
            if graph and graph.source and graph.source.encode(source):
                self.forget()

    @property
    def picture_token(self) -> int | None:
        """The id of the token for each row of a picture; None for text alone."""
        vision = self.bundle.vision
        return None if vision is None else self.text.token_id(vision.token)

    @property
    def picture_place(self) -> int | None:
        """The id of the token for a whole picture in a prompt; None for text alone."""
        vision = self.bundle.vision
        return None if vision is None else self.text.token_id(vision.place)

    def place_pictures(
        self, prompt: list[int], images: Sequence[npt.NDArray[np.uint8]]
    ) -> tuple[list[int], list[Tiles]]:
        """Return a prompt with a token for each row of its images, and their tiles.

        Raises `OptionError` unless the prompt has a place for each image.
        """
        vision = self.bundle.vision
        if vision is None:
            if images:
                raise errors.OptionError(NO_IMAGES, "images")
            return prompt, []
        token, mark = self.picture_token, self.picture_place
        places = [place for place, id in enumerate(prompt) if id == mark]
        is_row = bool(images) and token != mark and token in prompt
        if is_row or len(places) != len(images):
            fact = f"the prompt has {len(places)} places for {len(images)} images"
            if is_row:
                fact = f"the prompt has {vision.token}, which stands for an image's row"
            fix = f"write {vision.place} once for each image, and in no other text"
            raise errors.OptionError(f"{fact}; {fix}", "images")
        pictures, ids, start = list[Tiles](), list[int](), 0
        capacity = self.target.contract.capacity
        for place, image in zip(places, images, strict=True):
            pictures.append(cut(image, vision))
            text, ids = pictures[-1].text, [*ids, *prompt[start:place]]
            # Line breaks around a picture are one token with its own, as in a text.
            while text.startswith("\n") and ids and self._breaks_line(ids[-1]):
                text = self.text.decode([ids.pop()]) + text
            start = place + 1
            while text.endswith("\n") and self._breaks_line(*prompt[start : start + 1]):
                text, start = text + self.text.decode([prompt[start]]), start + 1
            rows = self.text.encode(text, False)
            if sum(id == token for id in rows) != pictures[-1].rows:
                fact = f"the tokenizer has no token {vision.token}"
                raise errors.BundleError(f"{fact}; export the bundle again")
            ids += rows
            if len(ids) > capacity:
                break  # further images would change nothing
        ids += prompt[start:]
        if pictures and len(ids) > capacity:
            fact = f"with its images the prompt has at least {len(ids)} tokens, the "
            fact += f"capacity is {capacity}"
            fix = "give fewer images, or export with a larger --capacity"
            raise errors.OptionError(f"{fact}; {fix}", "images")
        return ids, pictures

    def _breaks_line(self, *ids: int) -> bool:
        text = self.text.decode(ids)
        return bool(text) and not text.strip("\n")

    @property
    def source(self) -> Sequence[int]:
        """Token ids that a text may repeat: what the encoder read, a prediction."""
        reader = self.target.source
        return [*(() if reader is None else reader.tokens), *self.predicted]

    @cached_property
    def pruned(self) -> PrunedHalves:
        """The target in two halves, which drops rows between them."""
        sessions = self._open_halves("leave the prune threshold out")
        entry = self.bundle.target.halves
        assert entry is not None
        files = entry.lower_compaction, entry.upper_compaction
        compactions = [*map(self._opener.commit_session, files)]
        return PrunedHalves(sessions, compactions, self.target)

    @cached_property
    def leading(self) -> LeadingHalf:
        """The target in two halves over the same buffers; the lower half runs ahead."""
        return LeadingHalf(self.target, self._open_halves("choose another method"))

    def _open_halves(self, advice: str) -> SplitSessions:
        """Open the target's halves; raises `OptionError`, which ends with `advice`."""
        check_on_cpu(providers.HALVES, self.provider, advice, "drafting")
        opener, halves = self._opener, self.bundle.target.halves
        if halves is None:
            fact = "the bundle's target is not cut in halves, since all of its layers "
            fact += f"have streams, or its upper layers read images; {advice}"
            raise errors.DraftingError(fact)
        # They run in turns, and threads that spin after a pass slow the next session.
        threads = opener.threads._replace(spinning=Spinning.IN_PASSES)
        return SplitSessions(
            opener.session(halves.lower, self._lower_weights, threads=threads),
            opener.session(halves.upper, self._upper_weights, threads=threads),
            self.bundle.target.split_contract,
        )

    def store_of(self, user: str) -> ResponseStore | None:
        """Return a user's store, or None; `OptionError` if nothing is kept of users."""
        if self.store is not None:
            return self.store.of(user)
        if user and self.learning is None:
            fact = f"user {user!r} needs a store; give --store FILE (store=) too"
            raise errors.DraftingError(fact)
        return None

    def remember(self, prompt: Tokens, response: Tokens, user: str = "") -> None:
        """Add a request and its response to the user's store, if there is a store."""
        if self.store is None:
            return
        vector = np.zeros(0, np.float32)
        if self.similarity is not None:
            vector = self.similarity.vector(prompt)
        self.store.of(user).add(Entry(list(prompt), list(response), vector))

    def forget(self) -> None:
        """Forget the rows in the buffers, so that the next prompt is read whole."""
        self.prefix.forget()
        if self.draft_cache is not None:
            self.draft_cache.forget()

    def _choose_providers(self) -> tuple[Provider, Provider | None, str]:
        bundle, own = self.bundle, self.options.get("provider")
        name = bundle.provider if own is None else own
        target = self._choose_provider(bundle.target, name)
        own_streams = self.options.get("streams") is not None
        if own_streams and target.name == "tensorrt":
            fact = "TensorRT builds weights into its engines and cannot swap streams"
            fix = "export the checkpoint that has them, or choose --provider cuda"
            raise errors.ProviderError(f"{fact}; {fix}")
        entry, beside = bundle.drafter, self.options.get("drafter_provider")
        if beside is None and own in (None, bundle.provider):
            beside = bundle.drafter_provider
        if entry is None:
            return target, None, target.name
        if beside == providers.OFF:
            return target, None, f"{target.name}+{providers.OFF}"
        drafter = self._choose_provider(entry, beside or target.name)
        pair = f"{target.name}+{drafter.name}"
        return target, drafter, target.name if drafter is target else pair

    def _choose_provider(self, entry: GraphEntry, name: str) -> Provider:
        graphs = [(self.bundle.flavour, entry.contract.dtype)]
        return choose_provider(name, graphs, entry.only_on_cpu(name))

    def _make_openers(
        self, target: Provider, drafter: Provider | None
    ) -> tuple[Opener, Opener | None]:
        bundle, entry = self.bundle, self.bundle.drafter
        if drafter is None or entry is None:
            return Opener(bundle, target, threads_of_pair(self.threads, 1)[0]), None
        by_size = 1 if entry.parameters < LARGE_DRAFTER_PARAMETERS else self.threads
        pair = threads_of_pair(self.threads, self.profiles.drafter_threads() or by_size)
        return Opener(bundle, target, pair[0]), Opener(bundle, drafter, pair[1])

    def _open_drafter(self) -> Graph | None:
        if self.bundle.drafter is None or self._drafter_opener is None:
            return None
        drafter = self._drafter_opener.graph(self.bundle.drafter)
        drafter.prepare(exact=False)
        if drafter.contract.reads:
            if self.target.memory.device != drafter.memory.device:
                fact = "the drafter reads the target's buffers, so both run on one "
                fact += "device; leave --drafter-provider out"
                raise errors.ProviderError(fact)
            drafter.target_cache = self.target.cache
        return drafter

    def _make_draft_cache(self, drafter: Graph) -> DraftCache:
        """The cache that keeps the drafter in step, as its contract needs it."""
        contract = drafter.contract
        if contract.ahead:
            return AheadCache(drafter)
        if contract.feature_input and not contract.kv_shapes:
            return LastRowCache(drafter)
        if contract.block or contract.carried_size or not contract.feature_input:
            return DraftCache(drafter)
        return LedCache(drafter, lambda: self.leading)

    def _open_learning(self, like: "LoadedBundle | None") -> Learning | None:
        """Open the folder `learn`, or None; raises `OptionError`, `ProviderError`."""
        folder, opener = self.options.get("learn"), self._drafter_opener
        if folder is None:
            return None
        bundle, entry = self.bundle, self.bundle.drafter
        if entry is None or opener is None or not entry.contract.learns:
            fact = "only a drafter model, or a head of EAGLE or MTP, learns from use"
            fix = "export with one of them, or leave --learn out"
            raise errors.OptionError(f"{fact}; {fix}", "learn")
        if opener.provider.name == "tensorrt" or bundle.flavour != CONTRIB:
            fact = "the drafter's weights can be swapped in contrib graphs only"
            fix = "choose --drafter-provider cpu or cuda, or leave --learn out"
            raise errors.ProviderError(f"{fact}; {fix}")
        if entry.contract.feature_input and self.options.get("adapter"):
            fact = "a head learns from the states of the target without an adapter"
            raise errors.OptionError(f"{fact}; leave --learn or --adapter out", "learn")
        if like is not None:
            return like.learning
        vocab_size = bundle.target.contract.vocab_size
        lessons = Lessons(Path(folder), bundle.tokenizer_sha256, vocab_size)
        sets = WeightSets(Path(folder), drafter_sha256(bundle))
        sets.check()
        return Learning(lessons, LearnedWeights(sets, opener, entry))

    def _read_stream_weights(self) -> tuple[Weights, Weights]:
        """Read the option `streams`: the weights of the early exit, and all others."""
        file = self.options.get("streams")
        if file is None:
            return {}, {}
        weights = read_streams(Path(file), self.bundle)
        early: dict[str, Any] = {n: weights[n] for n in EARLY_EXIT if n in weights}
        return early, {n: w for n, w in weights.items() if n not in EARLY_EXIT}
