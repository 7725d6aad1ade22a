"""The public face of the runtime: load a bundle, generate text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Unpack, cast

from jetdraft.bundle import Bundle
from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.devices.memory import use_huge_pages
from jetdraft.errors import ConstraintError, JetdraftError, OptionError
from jetdraft.runtime.claim import CLOSED_MESSAGE
from jetdraft.runtime.generation import Generation
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes import pictures
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.passes.prefix import load_prefix, save_prefix
from jetdraft.runtime.piece import Result
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.options import GenerateOptions, Options
from jetdraft.runtime.planning.planner import Planner
from jetdraft.runtime.planning.registry import AUTO
from jetdraft.runtime.speech.segments import Transcript
from jetdraft.runtime.speech.sound import check_sound, read_sound
from jetdraft.runtime.speech.transcription import (
    DEFAULT_TRANSCRIPT,
    TRANSCRIBE,
    TranscribeOptions,
    Transcription,
    check_speech,
)
from jetdraft.runtime.stream import AsyncStream, Embedder, Stream, embedding_prompt
from jetdraft.runtime.text.call_grammar import CallFormat
from jetdraft.runtime.text.codec import check_characters, check_ids
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.stops import Thinking
from jetdraft.runtime.text.template import (
    ChatTemplate,
    Message,
    check_messages,
    take_images,
)
from jetdraft.runtime.text.tools import Tools
from jetdraft.runtime.text.worker_process import Vocabulary

MOST_ADAPTED = 8  # The most adapters of a model that have buffers.


def load(
    path: str | Path, *, method: str | None = None, **options: Unpack[LoadOptions]
) -> Model:
    """Open a bundle, check it and get it ready to generate.

    `method` is for calls that give options by name, but no `method`. The other keywords
    are the fields of `LoadOptions`. Raises `BundleError`, `ProviderError`, `StoreError`
    or `OptionError`.

        with jetdraft.load("bundle", threads=2) as model:
            print(model.generate("def fib(n):").text)
    """
    return Model(Bundle.open(path), options, method)


class Model(AbstractContextManager["Model"]):
    """A loaded bundle; it runs one generation at a time, a `Pool` runs several.

        model = jetdraft.load("bundle")
        result = model.generate("def fib(n):", max_new_tokens=64)
        for piece in model.stream("def fib(n):", temperature=0.8, seed=1):
            print(piece.text, end="")

    `parts`, `planner`, `fitted`, `twin` and `measure_again` are public since commands,
    server and `Pool` use them; a program needs them to look inside or to measure.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: LoadOptions | None = None,
        method: str | None = None,
        like: Model | None = None,
    ) -> None:
        self.bundle = bundle
        shared = None if like is None else like.parts
        parts = LoadedBundle(bundle, options or {}, shared)
        self._planner: Planner | None = Planner(parts)
        # It takes seconds, and would disturb the first measurements on a new machine.
        has_survey = parts.profiles.read_survey() is not None
        if like is None and (has_survey or bundle.embedding is not None):
            Thread(target=use_huge_pages, name="jetdraft-gather", daemon=True).start()
        self._adapted: dict[str, Model] = {}
        self._adapted_lock = Lock()
        self.method = method or AUTO
        if method is not None:
            self.planner.proposer_set(Drafting(method))  # refuses an unknown method

    def __repr__(self) -> str:
        methods = ", ".join(self.methods) if self._planner else "closed"
        return f"<Model {self.bundle.path}: {methods}>"

    @property
    def parts(self) -> LoadedBundle:
        """The bundle's graphs, text and timings; raises `JetdraftError` if closed."""
        return self.planner.parts

    @property
    def planner(self) -> Planner:
        """The planner, which makes proposers; raises `JetdraftError` if closed."""
        if self._planner is None:
            raise JetdraftError(CLOSED_MESSAGE)
        return self._planner

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that this bundle can draft with, "none" first."""
        return self.planner.methods

    @property
    def provider(self) -> str:
        """The name of the execution provider that runs the target, such as "cuda"."""
        return self.parts.provider

    @property
    def defaults(self) -> GenerateOptions:
        """The checkpoint's own sampling options, from its generation_config.json."""
        return cast(GenerateOptions, dict(self.bundle.generation))

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary for constraints; its first use starts a process to read it."""
        vocabulary = self.parts.vocabulary
        vocabulary.start()
        return vocabulary

    @cached_property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template; raises `OptionError` if it is missing."""
        bundle = self.parts.bundle
        return ChatTemplate.open(bundle.chat_template, bundle.special_tokens)

    def generate(
        self,
        prompt: str | None = None,
        options: Options | None = None,
        *,
        token_ids: Sequence[int] | Int64s | None = None,
        **fields: Unpack[GenerateOptions],
    ) -> Result:
        """Generate a whole text, with `options` or with their fields by name.

        model.generate("def fib(n):", max_new_tokens=64, temperature=0.8, seed=3)
        """
        return self.stream(prompt, options, token_ids=token_ids, **fields).result()

    def stream(
        self,
        prompt: str | None = None,
        options: Options | None = None,
        *,
        token_ids: Sequence[int] | Int64s | None = None,
        **fields: Unpack[GenerateOptions],
    ) -> Stream:
        """Start a generation; returns the iterator of its pieces, a piece per round.

        Raises `OptionError` for the prompt or the options now, not in the first round.

            stream = model.stream("def fib(n):")
            for piece in stream:
                print(piece.text, end="")
            stream.stats.tokens_per_pass
        """
        return Stream(self._make_generation(prompt, options, token_ids, fields, True))

    def astream(
        self,
        prompt: str | None = None,
        options: Options | None = None,
        *,
        token_ids: Sequence[int] | Int64s | None = None,
        **fields: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """`stream` for asyncio: rounds run in a thread of their own.

        A constraint is compiled there too, so the first piece raises its errors.

            async for piece in model.astream("def fib(n):"):
                print(piece.text, end="")
        """
        generation = self._make_generation(prompt, options, token_ids, fields)
        return AsyncStream(Stream(generation))

    def _make_generation(
        self,
        prompt: str | None,
        options: Options | None,
        token_ids: Sequence[int] | Int64s | None,
        fields: GenerateOptions,
        prepared: bool = False,
        thinking: Thinking | None = None,
    ) -> Generation:
        """Make a generation, with its constraint compiled if `prepared`."""
        options, parts = self._as_options(options, fields), self.parts
        source, ids = parts.split_prompt(self.prompt(prompt, token_ids).tolist())
        ids, tiles = parts.place_pictures(ids, options.images)
        given = parts, self.planner, ids, options, prepared, source
        return Generation(*given, thinking=thinking, pictures=tiles)

    def _as_options(self, options: Options | None, fields: GenerateOptions) -> Options:
        if options is None:
            fields.setdefault("method", self.method)
            return Options.of(**fields)
        if fields or not isinstance(options, Options):
            fact = "give either an Options object or options by their names"
            raise OptionError(fact, "options")
        return options

    def transcribe(
        self,
        sound: str | Path | bytes | Float32s,
        options: Options | None = None,
        *,
        language: str | None = None,
        task: str = TRANSCRIBE,
        timestamps: bool = True,
        **fields: Unpack[GenerateOptions],
    ) -> Transcript:
        """Write down what is said in a sound, with a bundle of Whisper.

        The sound is a WAV file or its bytes, or float32 samples of one channel at 16
        kHz. Raises `OptionError` for another file, and for a model without speech.

            model.transcribe("question.wav", language="en").segments
        """
        wanted = TranscribeOptions(language, task, timestamps)
        return self.transcription(sound, wanted, options, **fields).result()

    def transcription(
        self,
        sound: str | Path | bytes | Float32s,
        wanted: TranscribeOptions = DEFAULT_TRANSCRIPT,
        options: Options | None = None,
        **fields: Unpack[GenerateOptions],
    ) -> Transcription:
        """`transcribe` window by window; this call already checks sound and options.

        for segment in model.transcription("talk.wav"):
            print(segment.start, segment.text)
        """
        started, parts = time.perf_counter(), self.parts
        check_speech(parts)
        if options is None:
            fields.setdefault("max_new_tokens", parts.target.contract.capacity // 2)
        chosen = self._as_options(options, fields)
        if isinstance(sound, (str, Path, bytes)):
            samples = read_sound(sound)
        else:
            samples = check_sound(sound)
        return Transcription(parts, self.planner, samples, wanted, chosen, started)

    def embed(
        self,
        texts: Sequence[str | Sequence[int] | Int64s],
        prompt_name: str | None = None,
    ) -> Float32s:
        """Return embeddings of length 1, float32 [len(texts), width].

        The checkpoint's prompt of that name, such as "query", stands before each text;
        token ids are embedded as they are. Raises `OptionError` for a model that
        writes.

            query, first, second = model.embed(["a robot", "a lamp", "an arm"])
        """
        return self.embedder(texts, prompt_name).result().vectors

    def embedder(
        self,
        texts: Sequence[str | Sequence[int] | Int64s],
        prompt_name: str | None = None,
        max_seconds: float | None = None,
    ) -> Embedder:
        """`embed` text by text, for at most `max_seconds`; checks the texts now."""
        begin = embedding_prompt(self.parts, prompt_name)
        if isinstance(texts, str):
            raise OptionError("give a list of texts, not a text alone", "input")
        split = [(begin + t, None) if isinstance(t, str) else (None, t) for t in texts]
        ids = [self.prompt(text, token_ids) for text, token_ids in split]
        return Embedder(self.parts, ids, max_seconds)

    def chat(
        self,
        messages: Sequence[Message],
        options: Options | None = None,
        *,
        tools: Tools | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Unpack[GenerateOptions],
    ) -> Result:
        """Generate the assistant's next message; see `Conversation` for several turns.

        The result has the model's `thought` apart from its text, and the `calls` of
        `tools` in the message. The chat template reads the variables in `template`.
        A content may be parts, such as {"type": "image", "image": "meter.png"}.

        ask = [{"role": "user", "content": "Hello"}]
        model.chat(ask, max_new_tokens=32, template={"enable_thinking": False}).text
        """
        tools = tools and self.fitted(tools)
        functions = tools and tools.functions
        ids = self.chat_prompt(messages, **{"tools": functions, **(template or {})})
        if images := take_images(messages)[1]:
            given = self._as_options(options, fields)
            options = replace(given, images=pictures.read_pictures(images))
            fields = {}
        result = self.stream_reply(ids, options, tools=tools, **fields).result()
        return replace(result, calls=tools.calls(result.text) if tools else [])

    def fitted(self, tools: Tools) -> Tools:
        """Return `tools` with the format of calls in the chat template."""
        if not isinstance(tools, Tools):
            raise OptionError("tools must be Tools; give Tools([...])", "tools")
        form, lark = CallFormat.of(self.template.source), self.parts.text.to_lark
        return replace(tools, format=form, lark=lark)

    def stream_reply(
        self,
        token_ids: Sequence[int] | Int64s,
        options: Options | None = None,
        *,
        tools: Tools | None = None,
        **fields: Unpack[GenerateOptions],
    ) -> Stream:
        """Start a `stream` of a reply to a `chat_prompt`; pieces have a `thought` too.

        The text may call `tools`, which `fitted` returned.

        ids = model.chat_prompt(messages, tools=tools.functions)
        model.stream_reply(ids, tools=model.fitted(tools))
        """
        thinking = self.template.thinking
        if tools is not None:
            if thinking is not None and tools.format.turn:
                thinking = replace(thinking, rest="")  # the grammar has the turn
            grammar = Constraint("grammar", tools.grammar())
            if options is None:
                fields["grammar"] = grammar.source
            else:
                options = replace(options, constraint=grammar)
        given = None, options, token_ids, fields, True, thinking
        try:
            return Stream(self._make_generation(*given))
        except ConstraintError as error:
            if tools is None:
                raise
            fact = "the tools take too much time or memory; make their schemas simpler"
            raise OptionError(fact, "tools") from error
        except OptionError as error:
            if tools is not None and error.field == "grammar":
                tools.check(self.vocabulary)  # names the tool
            raise

    def chat_prompt(
        self, messages: Sequence[Message], /, **variables: Any
    ) -> list[int]:
        """Return the token ids of messages in the checkpoint's chat template.

        The template reads `variables` too, such as `tools`. Raises `LengthError` for
        more characters than can fit, and `OptionError` for a speech model.

            model.stream_reply(model.chat_prompt(messages))
        """
        self.parts.split_prompt([])
        messages, images = take_images(check_messages(messages))
        if images and self.bundle.vision is None:
            raise OptionError(pictures.NO_IMAGES, "images")
        text = self.template.render(messages, **variables)
        check_characters(len(text), self.bundle.target.contract.capacity)
        return self.parts.text.encode(text, add_special=False)

    def encode_image(self, image: pictures.PictureInput) -> bool:
        """Encode an image that a later prompt shows, so that its text begins sooner.

        Any thread may call it, also during a generation; it does nothing and returns
        False if the buffer has no room beside earlier images. Raises `OptionError`.

        thread.submit(model.encode_image, camera.next_frame())
        """
        rows, vision = self.parts.target.pictures, self.bundle.vision
        if rows is None or vision is None:
            raise OptionError(pictures.NO_IMAGES, "images")
        return rows.encode_ahead(pictures.cut(pictures.read_picture(image), vision))

    def encode(self, text: str) -> list[int]:
        """The ids of a text's tokens, as of a prompt; raises `OptionError`.

        len(model.encode("def fib(n):"))  # how many tokens it has
        """
        return self.parts.text.encode(text)

    def decode(self, token_ids: Sequence[int] | Int64s) -> str:
        """The text of some tokens, special tokens included; raises `OptionError`.

        model.decode(model.generate("def fib(n):").token_ids)
        """
        contract = self.bundle.target.contract
        ids = check_ids(token_ids, contract).tolist() if len(token_ids) else []
        return self.parts.text.decode(ids)

    def prompt(
        self, prompt: str | None = None, token_ids: Sequence[int] | Int64s | None = None
    ) -> Int64s:
        """Return a prompt's token ids, int64 [length]; raises `OptionError`."""
        if (prompt is None) == (token_ids is None):
            raise OptionError("give either a prompt text or token_ids", "prompt")
        contract = self.bundle.target.contract
        if prompt is not None:
            if not isinstance(prompt, str):
                fact = "the prompt must be a text; give ids as token_ids="
                raise OptionError(fact, "prompt")
            check_characters(len(prompt), contract.capacity)
            token_ids = self.parts.text.encode(prompt)
        return check_ids(token_ids, contract)

    def save_prefix(self, file: str | Path, token_ids: Sequence[int] | Int64s) -> None:
        """Run a prompt and write its KV rows to a file, for prompts that begin with it.

        model.save_prefix("system.npz", model.chat_prompt(messages))
        """
        self.check_prefix_support()
        tokens, parts = self.prompt(token_ids=token_ids).tolist(), self.parts
        with parts.claim.held():
            # Rows of a longer text can be copied, but a head reads features beside.
            is_held = parts.prefix.reusable_rows([*tokens, 0], True) == len(tokens)
            cache = parts.draft_cache if "drafter" in parts.caches else None
            if cache is not None or not is_held or parts.target.cache.states:
                # All proposers see the prompt. A stream left early is in no store.
                left = self.stream(token_ids=tokens, method=AUTO, max_new_tokens=1)
                with left:
                    next(left, None)
            # A prompt as long as the buffers leaves its last token unread.
            rows, waiting = tokens[: parts.target.cache.length], None
            if cache is not None:
                cache.follow(tokens)
                waiting = cache.waiting(rows)
            save_prefix(Path(file), rows, parts.caches, parts.profiles.machine, waiting)

    def load_prefix(self, file: str | Path) -> None:
        """Replace the rows in the buffers by the file's; raises `BundleError`.

        Exact generations do not use rows that another machine computed.
        """
        self.check_prefix_support()
        parts, drafter = self.parts, self.parts.drafter
        size = 0 if drafter is None else drafter.contract.feature_input
        given = Path(file), parts.caches, parts.profiles.machine, size
        with parts.claim.held():
            parts.forget()
            tokens, is_own, waiting = load_prefix(*given)
            parts.prefix.record(tokens, exact=is_own)
            if parts.draft_cache is not None and "drafter" in parts.caches:
                parts.draft_cache.restore(tokens, waiting)

    def check_prefix_support(self) -> None:
        """Raise `OptionError` for an encoder-decoder, or a model of embeddings."""
        if self.bundle.start_token_ids or self.bundle.embedding is not None:
            fact = "no prefix can be kept of an encoder-decoder, or of a model that "
            fact += "embeds; give the whole text each time"
            raise OptionError(fact, "prefix")

    def measure_again(self) -> None:
        """Measure the width classes and pass times of this machine again."""
        with self.parts.held():
            self.parts.measure_again()
            self._planner = Planner(self.parts)

    def forget(self) -> None:
        """Reset what proposers learned, and forget which rows are in the buffers."""
        self.parts.forget()
        self.planner.forget()
        for changed in self._adapted.values():
            changed.forget()

    def cancel(self) -> None:
        """End the running generation, or a constraint's compilation; for any thread."""
        if (planner := self._planner) is not None:  # another thread may close the model
            planner.parts.claim.cancel()

    def twin(self) -> Model:
        """Another model with its own buffers; on the CPU it has the same weights."""
        return Model(self.bundle, self.parts.options, self.method, like=self)

    def adapted(self, adapter: str) -> Model:
        """The model with another adapter: the same weights, and its own buffers.

        The `MOST_ADAPTED` that were asked for last are kept, and closed with this
        model; another is freed where nobody holds it. Raises `OptionError`.

            model.adapted("sql").generate("SELECT")
        """
        with self._adapted_lock:
            changed = self._adapted.pop(adapter, None)
            if changed is None or changed._planner is None:
                options: LoadOptions = {**self.parts.options, "adapter": adapter}
                changed = Model(self.bundle, options, self.method, like=self)
            kept = [*self._adapted.items()][1 - MOST_ADAPTED :]
            self._adapted = {**dict(kept), adapter: changed}
            return changed

    def close(self) -> None:
        """Free all memory; later calls, except for `close`, raise `JetdraftError`."""
        with self._adapted_lock:
            for changed in self._adapted.values():
                changed.close()
            if (planner := self._planner) is not None:
                planner.parts.claim.close()
            self._planner = None
            vars(self).pop("template", None)  # It was cached.

    def __exit__(self, *error: object) -> None:
        # An error in the block must not be hidden by the error of an open stream.
        with suppress(JetdraftError) if error[0] else nullcontext():
            self.close()
