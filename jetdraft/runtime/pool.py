"""Several models over one set of weights, for several generations at once."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Unpack

from jetdraft.errors import JetdraftError, OptionError, refusing
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.passes.opener import LoadOptions


class Pool(AbstractContextManager["Pool"]):
    """`size` models of a bundle, each with KV buffers of its own.

    On the CPU they share their sessions, and so all weights and cores: a pool answers
    several requests at once, but not faster. The options are those that `load` takes.

        with Pool("bundle", size=2) as pool, pool.take() as model:
            model.generate("def fib(n):")
    """

    def __init__(
        self,
        path: str | Path,
        size: int,
        method: str | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            fact = f"pool size must be at least 1, not {size!r}; give 1 or more"
            raise OptionError(fact, "size")
        first = load(path, method=method, **options)
        self.models = [first, *(first.twin() for _ in range(size - 1))]
        self._free: LifoQueue[Model] = LifoQueue()
        for model in reversed(self.models):
            self._free.put(model)

    @contextmanager
    def take(self, seconds: float | None = None) -> Iterator[Model]:
        """Take a free model for the block; wait at most `seconds`, None: no limit.

        Raises `JetdraftError` if no model becomes free.
        """
        fact = f"all {len(self.models)} models of the pool are generating"
        busy = JetdraftError(f"{fact}; wait longer, or make a larger pool")
        with refusing(busy, Empty):
            model = self._free.get(timeout=seconds)
        try:
            yield model
        finally:
            self._free.put(model)

    def close(self) -> None:
        """Close all models; raises `JetdraftError` during a generation."""
        for model in self.models:
            model.close()

    def __exit__(self, *error: object) -> None:
        with suppress(JetdraftError) if error[0] else nullcontext():
            self.close()
