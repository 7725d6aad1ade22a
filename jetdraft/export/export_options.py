"""The options of an export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jetdraft.bundle import CONTRIB, DRAFTER, FLAVOURS, TARGET, is_adapter_name
from jetdraft.contracts.tensors import CAPACITY, MAX_WIDTH, MIN_SELECTED
from jetdraft.devices.providers import Provider, provider_named
from jetdraft.errors import OptionError, check_choice, printable
from jetdraft.options import at_least, between, check_fields
from jetdraft.quant.choice import Limit
from jetdraft.recipe import KERNELS, Recipe

# numpy's and torch's names of the types that a graph can compute in.
DTYPES = {"fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True)
class ExportOptions:
    """How a bundle is made.

    A `recipe` of None is the cheapest that keeps the target's text, a `drafter_recipe`
    of None the fastest for the pair; both are measured, unless the export is `fast`.
    `capacity` is the rows of the KV buffers (prompt and output together), `max_width`
    the most rows of a pass. Providers give defaults of `dtype` ("fp32" or "fp16") and
    `flavour`: "contrib" has onnxruntime's own operators, "standard" only operators of
    ai.onnx. A `kernel` of "jetdraft" holds llama.cpp's types as they are. A `limit`
    gives some layers of the target more bits. `adapter_scale`, 0 to 1, is how far
    streams of the shared mode move the weights. `calibration` is a text file for all
    measures; without it the target writes a text. Drafts choose among the `draft_vocab`
    most frequent tokens of it, or all. A graph can read `select_kv` of the committed
    rows. Each of `adapters` is NAME=FOLDER, with a folder of peft.

        ExportOptions(recipe=Recipe("int8", block_size=32), capacity=1024)
    """

    recipe: Recipe | None = Recipe()
    drafter_recipe: Recipe | None = None
    dtype: str | None = None
    capacity: Annotated[int, between(16, 1 << 20)] = CAPACITY
    max_width: int = MAX_WIDTH
    provider: str = "cpu"
    flavour: str | None = None
    kernel: str | None = None
    adapter_scale: Annotated[float, between(0, 1)] = 1.0
    drafter_provider: str | None = None
    calibration: Path | None = None
    limit: Limit | None = None
    fast: bool = False
    draft_vocab: Annotated[int | None, at_least(1)] = None
    select_kv: int | None = None
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        known = {"dtype": DTYPES, "flavour": FLAVOURS, "kernel": KERNELS}
        for name, choices in known.items():
            if (value := getattr(self, name)) is not None:
                check_choice(OptionError, name, value, choices)
        for name in (TARGET, DRAFTER):
            self._check_graph(name)
        if self.kernel == KERNELS[0] != self.kernel_of(TARGET):
            fact = "the kernel jetdraft runs on the CPU in fp32, in the contrib flavour"
            fix = "leave it out, or choose --provider cpu and --dtype fp32"
            raise OptionError(f"{fact}; {fix}")
        if not 2 <= self.max_width <= self.capacity:
            fact = f"max width {self.max_width} is out of range"
            raise OptionError(f"{fact}; choose 2 to the capacity")
        least, most = MIN_SELECTED, self.capacity - 1
        if self.select_kv is not None and not least <= self.select_kv <= most:
            fact = f"a selection of {self.select_kv} KV rows must be a part of a "
            fact += f"context of {self.capacity} tokens"
            raise OptionError(f"{fact}; give --select-kv {least} to {most}")
        if self.limit is not None:
            self.recipe_of(TARGET).raise_units(["0"])  # refuses if it has no more bits
        if self.calibration is not None and not self.calibration.is_file():
            raise OptionError(f"no file at {self.calibration}; give a text")

    def _check_graph(self, name: str) -> None:
        provider, recipe = self.provider_of(name), self.recipe_of(name)
        refusal = provider.refusal(self.effective_flavour, DTYPES[self.dtype_of(name)])
        if refusal:
            raise OptionError(f"{provider.name} cannot run it: {refusal}")
        self.check_kernel(recipe, name)
        if self.effective_flavour != CONTRIB:
            recipe.check_standard()
        if recipe.kv and provider.name != "cpu":
            fact = f"{provider.name} has no fast kernel over integer KV buffers for "
            fact += "several rows"
            raise OptionError(f"{fact}; leave kv out, or choose --provider cpu")

    def check_kernel(self, recipe: Recipe, name: str) -> None:
        """Raise `OptionError` if the graph of that name has no kernel for `recipe`."""
        kernel = self.provider_of(name).name, self.dtype_of(name)
        if recipe.has_grids and kernel != ("cpu", "fp32"):
            option = "--provider" if name == TARGET else "--drafter-provider"
            fact = f"{' in '.join(kernel)} has no kernel for {recipe.name}"
            raise OptionError(f"{fact}; choose int8, or {option} cpu and --dtype fp32")

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The folders of `adapters` by their names; raises `OptionError`."""
        folders = dict[str, Path]()
        for text in self.adapters:
            name, _, folder = text.partition("=")
            if not is_adapter_name(name) or not folder or name in folders:
                raise OptionError(
                    f"adapter {printable(text, 60)!r} is not NAME=FOLDER with a new "
                    "name of letters, digits, dots and dashes",
                    "adapters",
                )
            folders[name] = Path(folder)
        return folders

    def provider_of(self, name: str) -> Provider:
        beside = self.drafter_provider if name == DRAFTER else None
        return provider_named(beside or self.provider)

    @property
    def effective_flavour(self) -> str:
        """The flavour of all graphs: the option, or else the provider's."""
        return self.flavour or provider_named(self.provider).flavour

    def kernel_of(self, name: str) -> str:
        """Whose operators multiply matrices in the graph of that name, of `KERNELS`."""
        best = self.provider_of(name).kernel(self.effective_flavour, self.dtype)
        return KERNELS[1] if self.kernel == KERNELS[1] else best

    def dtype_of(self, name: str) -> str:
        return self.dtype or self.provider_of(name).dtype

    def recipe_of(self, name: str) -> Recipe:
        """Return the recipe of the graph of that name, or a default."""
        target = self.recipe or Recipe()
        if name == TARGET:
            return target
        return self.drafter_recipe or Recipe.for_drafter(target, self.kernel_of(name))
