"""What may happen to a model before a generation, and must not change its text."""

from contextlib import suppress
from pathlib import Path
from random import Random
from unittest import mock

from jetdraft.errors import JetdraftError, OptionError, StoreError
from jetdraft.runtime.model import Model
from jetdraft.runtime.sampling.chooser import Chooser
from tests.fuzz.requests import draw_drafting, draw_options, draw_verifier
from tests.fuzz.worlds import LEARNED
from tests.toy_drafter import put_on_trial, random_arrays


class Disturbances:
    """Leaves a model in some state; prefixes are kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, list[Path]] = {}

    def one(self, draw: Random, model: Model, prompt: list[int]) -> str:
        kinds = [name for name in vars(type(self)) if name.startswith("_do_")]
        kind = draw.choice(kinds).removeprefix("_do_")
        with suppress(OptionError, StoreError):  # contradictions, a missing head
            getattr(self, f"_do_{kind}")(draw, model, prompt)
        return kind

    def _options(self, draw: Random, model: Model) -> dict[str, object]:
        return {**draw_options(draw, model), **draw_drafting(draw, model)}

    def _do_finished(self, draw: Random, model: Model, prompt: list[int]) -> None:
        model.generate(token_ids=prompt, **self._options(draw, model))

    def _do_inexact(self, draw: Random, model: Model, prompt: list[int]) -> None:
        options = {**self._options(draw, model), "exact": False}
        model.generate(token_ids=prompt, **options)

    def _do_verifier(self, draw: Random, model: Model, prompt: list[int]) -> None:
        options = {**draw_options(draw, model), **draw_verifier(draw)}
        model.generate(token_ids=prompt, **options)

    def _do_left(self, draw: Random, model: Model, prompt: list[int]) -> None:
        stream = model.stream(token_ids=prompt, **self._options(draw, model))
        for _ in range(draw.randint(0, 3)):
            next(stream, None)

    def _do_cancelled(self, draw: Random, model: Model, prompt: list[int]) -> None:
        stream = model.stream(token_ids=prompt, **self._options(draw, model))
        next(stream, None)
        model.cancel()
        if stream.result().finish_reason == "":
            raise AssertionError("a cancelled generation has no finish reason")

    def _do_deadline(self, draw: Random, model: Model, prompt: list[int]) -> None:
        model.generate(token_ids=prompt, **self._options(draw, model), max_seconds=1e-6)

    def _do_interrupted(self, draw: Random, model: Model, prompt: list[int]) -> None:
        left, choose = [draw.randint(0, 5)], Chooser.choose

        def interrupted(*arguments: object) -> list[int]:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return choose(*arguments)  # type: ignore[arg-type]

        options = self._options(draw, model)
        with (
            mock.patch.object(Chooser, "choose", interrupted),
            suppress(KeyboardInterrupt),
        ):
            model.generate(token_ids=prompt, **options)

    def _do_forgotten(self, draw: Random, model: Model, prompt: list[int]) -> None:
        model.forget()

    def _do_busy(self, draw: Random, model: Model, prompt: list[int]) -> None:
        with model.stream(token_ids=prompt, max_new_tokens=40, method="none") as stream:
            if next(stream, None) is None:
                return
            try:
                model.generate(token_ids=prompt)
            except JetdraftError:
                return
        if stream.stats.finish_reason == "cancelled":
            raise AssertionError("two generations used the same buffers")

    def _do_learned(self, draw: Random, model: Model, prompt: list[int]) -> None:
        """Other weights are on trial, and enough is drafted for them to begin."""
        if model.parts.learning is None:
            return
        bundle, folder = model.bundle.path, self.folder / LEARNED
        arrays = random_arrays(bundle, seed=draw.randrange(4))
        put_on_trial(folder, bundle, arrays, before=draw.choice(("", *_sets(folder))))
        options = {"method": "draft", "num_draft_tokens": 15, "max_new_tokens": 60}
        for _ in range(draw.randint(1, 6)):
            model.generate(token_ids=prompt, ignore_eos=True, **options)

    def forget(self) -> None:
        """Load none of the prefixes that were saved so far."""
        self._saved.clear()

    def _do_prefix_saved(self, draw: Random, model: Model, prompt: list[int]) -> None:
        owner = str(model.bundle.path)
        files = self._saved.setdefault(owner, [])
        number = list(self._saved).index(owner)
        file = self.folder / f"prefix-{number}-{len(files) % 8}.npz"
        model.save_prefix(file, prompt)
        files.append(file)

    def _do_prefix_loaded(self, draw: Random, model: Model, prompt: list[int]) -> None:
        files = self._saved.get(str(model.bundle.path), [])
        if files:
            model.load_prefix(draw.choice(files))


def _sets(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if len(entry.name) == 64)
