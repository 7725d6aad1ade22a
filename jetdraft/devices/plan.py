"""Predicts memory and speed of a model on another device."""

import itertools
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from jetdraft.contracts.tensors import WIDEST
from jetdraft.devices import cost_model
from jetdraft.devices.best_tree import best_tree
from jetdraft.devices.cost_model import Dimensions, Encoder, EncoderWork, LoadedDecoder
from jetdraft.devices.device import Device, PowerMode
from jetdraft.errors import DeviceError
from jetdraft.options import Checked, Range, at_least, declared
from jetdraft.recipe import GRIDS, Recipe

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 60, 64)  # Rows of a pass.
SYSTEM_MB = 1500.0  # The system without a desktop; an assumption.
# The method of plain decoding, and the shapes of drafts.
NONE, CHAIN, TREE = "none", "chain", "tree"
DRAFTER, PROBES, FREE = "drafter", "probes", "free"
SCHEMES = ("none", "int8", "int4")  # Quantizations that can be exported.
# Providers that a plan may be for; all but the CPU are planned as the GPU.
CPU = "cpu"
PROVIDERS = (CPU, "cuda", "tensorrt")

# The `basis` of a plan for the CPU and for the GPU.
ON_CPU = (
    "at most, for the CPU: the memory's bandwidth alone, and another engine's memory "
    "of the runtime; jetdraft was never measured on this device"
)
ON_GPU = (
    "for the GPU, by the constants of another engine, TensorRT Edge-LLM 0.10; jetdraft "
    "was never measured on this device"
)
_ACCEPTANCE = Range(lambda share: 0.0 <= share < 1.0, "0 to below 1")
STREAM_LAYERS = 2  # The default of `jetdraft train stream`.


@dataclass(frozen=True)
class MethodCost:
    """What a method's drafts cost, and whether it drafts trees too.

    "drafter" is a drafter's pass for each level, "probes" rows in the top layers.
    """

    name: str
    cost: str
    trees: bool


@dataclass(frozen=True)
class Choice:
    """A method at one width, and its predicted speed; plain decoding has `cost` ""."""

    method: str
    cost: str
    shape: str
    width: int
    tokens_per_pass: float
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True)
class Plan:
    """A prediction; memory is in 10^6 bytes, times are in ms.

    `memory_mb` is of the model's parts, `available_mb` what the device has. The first
    of `rows` is plain decoding, all that a CPU's plan has. `basis` says what it is for.
    `pictures` has the encoder's work and ms for each size; a CPU's ms are the least.
    """

    provider: str
    basis: str
    device: str
    power_mode: str
    quantization: str
    context: int
    acceptance: float
    memory_mb: dict[str, float]
    available_mb: float
    pass_ms_by_width: dict[int, float]
    rows: list[Choice]
    sizes: Dimensions
    pictures: list[dict[str, float]]

    @property
    def needed_mb(self) -> float:
        """The memory of all parts, in MB of 10^6 bytes."""
        return sum(self.memory_mb.values())

    @property
    def fits(self) -> bool:
        return self.needed_mb <= self.available_mb

    @property
    def best(self) -> Choice:
        """The fastest row that can run, but not free drafts beside a drafter."""
        left_out = FREE if any(choice.cost == DRAFTER for choice in self.rows) else None
        choices = [c for c in self.rows if c.width <= WIDEST and c.cost != left_out]
        return max(choices, key=lambda choice: choice.tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object, rounded."""
        names = ("provider", "basis", "device", "power_mode", "quantization", "context")
        return {
            **{name: getattr(self, name) for name in names},
            "acceptance": self.acceptance,
            "fits": self.fits,
            "memory_mb": round(self.needed_mb, 1),
            "memory_parts_mb": {n: round(mb, 1) for n, mb in self.memory_mb.items()},
            "available_mb": round(self.available_mb, 1),
            "weights": self.sizes.weights,
            "weights_per_row": self.sizes.row_weights + self.sizes.head,
            "plain_tokens_per_second": round(self.rows[0].tokens_per_second, 2),
            "pass_ms_by_width": {
                str(width): round(ms, 3) for width, ms in self.pass_ms_by_width.items()
            },
            "best": _choice_json(self.best),
            "rows": [_choice_json(choice) for choice in self.rows],
            "pictures": self.pictures,
        }


@dataclass(frozen=True)
class Question(Checked):
    """The model, the device and the methods of a plan.

    `target` and `drafter` are config files or their folders. For the provider "cpu"
    only a bound is known; others are the GPU's. Raises `OptionError`, `DeviceError`.

    device: A device's name; jetdraft doctor --devices lists them.
    drafter: The drafter's config.json, or the folder with it.
    quantization: The recipe of the weights; int4-headnone keeps the head in halves.
        Default: the types of a GGUF file, or else int4.
    context: Tokens of prompt and output that the buffers hold.
    acceptance: Assumed probability that the first drafted token is right; the default
        is a guess.
    power_mode: A power mode of the device; default: the first, without Super.
    provider: What will run the target. Methods are predicted for the GPU only.
    """

    target: Path
    device: str = declared("device", MISSING)
    drafter: str | Path | None = declared("checkpoint", None, kind=str)
    quantization: str | None = declared("quantization", None, names=("--quantize",))
    context: Annotated[int, at_least(1)] = declared("checkpoint", 2048)
    acceptance: Annotated[float, _ACCEPTANCE] = declared("drafting", 0.6)
    power_mode: str | None = declared("device", None)
    methods: tuple[MethodCost, ...] = ()
    encoder: Encoder | None = None
    provider: str = declared("runtime", CPU, choices=PROVIDERS)

    def __post_init__(self) -> None:
        super().__post_init__()
        recipe, device = self.recipe, self.profile
        if not (self.on_cpu or device.compute_capability):
            fact = f"only the CPU of {self.device} can be planned"
            raise DeviceError(f"{fact}; give --provider cpu")
        choices = [name for name in device.quantizations if name in SCHEMES]
        choices += GRIDS if self.on_cpu else ()
        for scheme in (recipe.scheme, recipe.head or recipe.scheme):
            if scheme not in choices:
                fact = f"{scheme!r} cannot be planned on {self.device}"
                raise DeviceError(f"{fact}; choose {', '.join(choices)}")

    @property
    def profile(self) -> Device:
        return Device.named(self.device)

    @property
    def recipe(self) -> Recipe:
        own = cost_model.gguf_recipe(self.target) if self.on_cpu else None
        return Recipe.parse(self.quantization or own or Recipe.scheme)

    @property
    def on_cpu(self) -> bool:
        return self.provider == CPU


def plan(question: Question) -> Plan:
    """Predict memory and speed from config files; runs no model."""
    device = question.profile
    mode = device.power_mode(question.power_mode)
    recipe, on_cpu = question.recipe, question.on_cpu
    float_bytes = cost_model.SINGLE_BYTES if on_cpu else cost_model.HALF_BYTES
    target = LoadedDecoder(Dimensions.read(question.target), recipe, float_bytes)
    drafter = None
    if question.drafter is not None:
        sizes = Dimensions.read(Path(question.drafter))
        drafter = LoadedDecoder(sizes, Recipe.for_drafter(recipe), float_bytes)
    if drafter is not None and drafter.sizes.state_values:
        fact = "has recurrent states, so it is no drafter; give another --drafter"
        raise DeviceError(f"{question.drafter} {fact}")
    fitted = cost_model.FITTED
    efficiency = cost_model.BOUND if on_cpu else fitted[device.compute_capability]
    board = Board(mode, question.context, target, drafter, efficiency)
    methods, widths = ((), (1,)) if on_cpu else (question.methods, WIDTHS)
    memory = {"target": target.memory_mb(question.context) - target.state_mb}
    memory["states"] = target.state_mb
    memory["runtime"] = cost_model.RUNTIME_MB
    if drafter is not None:
        memory["drafter"] = drafter.memory_mb(question.context)
    pictures, encoder = [], question.encoder
    if encoder is not None:
        rows_mb = question.context * encoder.row_size * float_bytes / 1e6
        memory["encoder"] = encoder.weight_mb(target) + rows_mb
        pictures = [board.picture(encoder, work) for work in encoder.work]
    return Plan(
        provider=question.provider,
        basis=ON_CPU if on_cpu else ON_GPU,
        device=device.name,
        power_mode=mode.name,
        quantization=question.quantization or recipe.name,
        context=question.context,
        acceptance=question.acceptance,
        memory_mb=memory,
        available_mb=device.memory_gb * 1.024**3 * 1e3 - SYSTEM_MB,
        pass_ms_by_width={width: board.pass_ms(width) for width in widths},
        rows=list(board.choices(methods, question.acceptance)),
        sizes=target.sizes,
        pictures=pictures,
    )


@dataclass(frozen=True)
class Board:
    """Predicts the times of a target and its drafter on a device in a power mode."""

    mode: PowerMode
    context: int
    target: LoadedDecoder
    drafter: LoadedDecoder | None
    efficiency: cost_model.Efficiency

    def pass_ms(self, width: int, decoder: LoadedDecoder | None = None) -> float:
        """Predict the ms of a pass of a decoder, by default the target's."""
        own = decoder or self.target
        return own.pass_ms(width, self.context, self.mode, self.efficiency)

    def choices(
        self, methods: tuple[MethodCost, ...], acceptance: float
    ) -> Iterator[Choice]:
        """Yield plain decoding, then every method at every width and shape."""
        plain = 1e3 / self.pass_ms(1)
        yield Choice(NONE, "", CHAIN, 1, 1.0, plain, 1.0)
        is_hybrid = self.target.sizes.state_values > 0  # without trees and probes
        costs = (FREE, DRAFTER if self.drafter else FREE if is_hybrid else PROBES)
        compared = [method for method in methods if method.cost in costs]
        for width, shape in itertools.product(WIDTHS[1:], (CHAIN, TREE)):
            levels = expected_levels(width - 1, acceptance, shape == TREE)
            tokens = 1.0 + sum(rate for _, rate in levels)
            for method in compared:
                if shape == TREE and (is_hybrid or not method.trees):
                    continue
                ms = self.pass_ms(width) + self._draft_ms(method.cost, levels)
                name, speed = method.name, 1e3 * tokens / ms
                ratio = speed / plain
                yield Choice(name, method.cost, shape, width, tokens, speed, ratio)

    def picture(self, encoder: Encoder, work: EncoderWork) -> dict[str, float]:
        """Return `work` and its `ms`; on a CPU they are of reading weights alone."""
        mode, share = self.mode, self.efficiency
        reading = encoder.weight_mb(self.target) / mode.bandwidth_gbs / share.bandwidth
        known = share is not cost_model.BOUND
        computing = work.gflop / mode.fp16_tflops / share.compute if known else 0.0
        ms = work.passes * (share.pass_ms + reading) + computing
        return {**vars(work), "ms": round(ms, 1)}

    def _draft_ms(self, cost_kind: str, levels: list[tuple[int, float]]) -> float:
        """Predict the ms of a draft; `levels` are from `expected_levels`."""
        if cost_kind == DRAFTER and self.drafter is not None:
            return sum(self.pass_ms(rows, self.drafter) for rows, _ in levels)
        if cost_kind != PROBES:
            return 0.0
        # Each row carries a probe per level, which run through the top layers and head.
        sizes = self.target.sizes
        top = min(1.0, STREAM_LAYERS / sizes.layers) * sizes.row_weights
        part = (top + sizes.head) / (sizes.row_weights + sizes.head)
        probes = (1 + sum(rows for rows, _ in levels)) * len(levels)
        return probes * part * self.target.row_ms(self.mode, self.efficiency)


def expected_levels(rows: int, rate: float, branching: bool) -> list[tuple[int, float]]:
    """Return the drafted rows and the expected accepted rows of each level.

    The n-th child of a row is right with probability p (1 - p)^(n - 1), p the `rate`.
    """
    ranks = [rate * (1.0 - rate) ** rank for rank in range(rows if branching else 1)]
    parents, chances = best_tree(rows, [ranks] * rows)
    depths, levels = [0], list[tuple[int, float]]()
    for parent, chance in zip(parents, chances, strict=True):
        depth = depths[parent]
        depths.append(depth + 1)
        count, tokens = levels[depth] if depth < len(levels) else (0, 0.0)
        levels[depth : depth + 1] = [(count + 1, tokens + chance)]
    return levels


def does_not_fit_error(question: Question, prediction: Plan) -> DeviceError:
    """Return the error for a plan that does not fit, which says what would fit."""
    needed, available = prediction.needed_mb / 1e3, prediction.available_mb / 1e3
    return DeviceError(
        f"the model needs {needed:.1f} GB, {prediction.device} has {available:.1f} GB "
        f"beside the system: {needed - available:.1f} GB too much; "
        f"{_what_fits(replace(question, methods=()))}"
    )


def _what_fits(question: Question) -> str:
    own = question.recipe.scheme
    for scheme in ("int8", "int4"):
        if scheme != own and plan(replace(question, quantization=scheme)).fits:
            return f"--quantize {scheme} would fit"
    devices = sorted(map(Device.named, Device.names()), key=lambda d: d.memory_gb)
    names = [
        device.name
        for device in devices
        if own in (*device.quantizations, *GRIDS)
        and (question.on_cpu or device.compute_capability)
        and plan(replace(question, device=device.name, power_mode=None)).fits
    ]
    advice = "choose a smaller model or context"
    return f"it fits {', '.join(names)}" if names else advice


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(choice).items()
    }
