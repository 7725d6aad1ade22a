"""Fits the roofline's constants on published records, and tests the fit on each record.

    python benchmarks/roofline.py

Prints the constants of `jetdraft.devices.cost_model` and the tables of
docs/devices.md.
"""

import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jetdraft.devices.cost_model import Dimensions, Efficiency, LoadedDecoder
from jetdraft.devices.device import Device, PowerMode
from jetdraft.recipe import Recipe

Floats = NDArray[np.float64]
FILE = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Record:
    """A published measurement of a model on a device.

    `pass_ms` is a pass of one row, `prefill_ms` a pass of `prompt` rows. `memory_mb` is
    None where it was not published.
    """

    device: Device
    mode: PowerMode
    model: str
    load: LoadedDecoder
    prompt: int
    prefill_ms: float
    pass_ms: float
    memory_mb: float | None

    @property
    def kernels(self) -> tuple[str, str]:
        """The architecture and the recipe; a pair has constants of its own."""
        return self.device.compute_capability, self.load.recipe.name

    def predict_ms(self, efficiency: Efficiency, width: int = 1) -> float:
        """The roofline's time of a pass, in the middle of 128 new tokens."""
        return self.load.pass_ms(width, self.prompt + 64, self.mode, efficiency)


def read(file: Path = FILE) -> tuple[list[Record], dict[str, Any]]:
    """The published records, and the whole table of the file."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return [_record(row, table["models"]) for row in table["rows"]], table


def _record(row: dict[str, Any], models: dict[str, dict[str, Any]]) -> Record:
    # The embedding is in half precision, so a tied head is a second tensor.
    sizes = Dimensions.of({**models[row["model"]], "tie_word_embeddings": False})
    device = Device.named(row["device"])
    load = LoadedDecoder(sizes, Recipe.parse(row.get("recipe", "int4-headnone")))
    return Record(
        device, device.power_mode(row.get("power_mode")), row["model"], load,
        row["prompt"], row["prefill_ms"], 1e3 / row["tokens_per_second"],
        row.get("memory_mb"),
    )  # fmt: skip


def fit(records: Sequence[Record]) -> tuple[Efficiency, float]:
    """The constants of records with the same kernels, and the ms of a prompt.

    Both have the least squares of relative errors: a pass of one row, and what a prompt
    takes beside it, which is a time of its own and a time for each further row.

        fit([r for r in read()[0] if r.kernels == ("8.7", "int4-rtn-b128-headnone")])
    """
    full = Efficiency(1.0, 0.0, 1.0)
    passes, prefills = np.array([[r.pass_ms, r.prefill_ms] for r in records]).T
    slow, pass_ms = _line([r.predict_ms(full) for r in records], passes, passes)
    rows = [(r.prompt - 1) * r.load.row_ms(r.mode, full) for r in records]
    # Less the measured pass of one row, whose error would count twice otherwise.
    idle, prompt_ms = _line(rows, prefills - passes, prefills)
    return Efficiency(1 / slow, pass_ms, 1 / idle), prompt_ms


def _line(x: list[float], y: Floats, scale: Floats) -> tuple[float, float]:
    """Slope and offset with the least squares of errors relative to `scale`."""
    sides = np.array([x, np.ones(len(x))]) / scale
    (slope, offset), *_ = np.linalg.lstsq(sides.T, y / scale, rcond=None)
    return float(slope), float(offset)


@dataclass(frozen=True)
class Error:
    """The relative errors of a record's prediction, fitted on the other records.

    `speed` is for one row per pass, `prefill` the time of a pass of `prompt` rows;
    `memory` is None where it was not published.
    """

    record: Record
    speed: float
    prefill: float
    memory: float | None


def leave_one_out(
    records: Sequence[Record], capacity: int, asked: Sequence[Record] = ()
) -> list[Error]:
    """Predict each record, or each of `asked`, from the others with its kernels."""
    errors = []
    for record in asked or records:
        others = [r for r in records if r.kernels == record.kernels and r is not record]
        efficiency, prompt_ms = fit(others)
        prefill_ms = record.predict_ms(efficiency, record.prompt) + prompt_ms
        memory = None
        if record.memory_mb is not None:
            mb = record.load.memory_mb(capacity) + runtime_mb(others, capacity)
            memory = mb / record.memory_mb - 1
        speed = record.pass_ms / record.predict_ms(efficiency) - 1
        prefill = prefill_ms / record.prefill_ms - 1
        errors.append(Error(record, speed, prefill, memory))
    return errors


def runtime_mb(records: Sequence[Record], capacity: int) -> float:
    """The median memory beside weights and KV, in 10^6 bytes."""
    sizes = [
        record.memory_mb - record.load.memory_mb(capacity)
        for record in records
        if record.memory_mb is not None
    ]
    return float(np.median(sizes))


DRAFTS = 3  # The tokens that an MTP module drafts for a pass of the published rows.
NVFP4 = Recipe.parse("int4-b32-headnone")  # A recipe with the bytes of NVFP4.


@dataclass(frozen=True)
class Mtp:
    """The relative errors of speed without MTP and with it, and the predicted gain."""

    row: dict[str, Any]
    plain: float
    speed: float
    gain: float


def predict_mtp(table: dict[str, Any], records: Sequence[Record]) -> Iterator[Mtp]:
    """Predict each row of MTP by the records of other models in NVFP4.

    A round is a pass of four rows and three steps of the module. Of Gemma's assistants
    the sizes are not known: their steps have the median time that the other assistants'
    rows leave to them.
    """
    rounds = [_round(row, table["models"], records) for row in table["mtp"]]
    left = {id(each): each[3] - each[1] for each in rounds if each[2] is None}
    for row, each in zip(table["mtp"], rounds, strict=True):
        plain_ms, pass_ms, steps_ms, published_ms = each
        rest = [ms for number, ms in left.items() if number != id(each)]
        round_ms = pass_ms + (steps_ms or statistics.median(rest))
        plain = 1e3 / plain_ms / row["tokens_per_second"] - 1
        gain = row["tokens_per_pass"] * plain_ms / round_ms
        yield Mtp(row, plain, published_ms / round_ms - 1, gain)


def _round(
    row: dict[str, Any], models: dict[str, Any], records: Sequence[Record]
) -> tuple[float, float, float | None, float]:
    """The ms of a pass of one row, of four, of the steps, and of a published round."""
    device, config = Device.named(row["device"]), models[row["model"]]
    kernels = device.compute_capability, NVFP4.name
    others = [r for r in records if r.model != row["model"] and r.kernels == kernels]
    efficiency, _ = fit(others)
    load = LoadedDecoder(Dimensions.of(config), Recipe.parse(row["recipe"]))
    where = row["prompt"] + 64, device.power_mode(None)
    plain_ms, pass_ms = (load.pass_ms(n, *where, efficiency) for n in (1, 1 + DRAFTS))
    steps_ms = None
    if "gemma" not in row["model"]:  # a step has the time of its bytes only
        reading = replace(efficiency, pass_ms=0.0)
        steps_ms = DRAFTS * module_of(config).pass_ms(1, *where, reading)
    published_ms = 1e3 * row["tokens_per_pass"] / row["mtp_tokens_per_second"]
    return plain_ms, pass_ms, steps_ms, published_ms


def module_of(config: dict[str, Any]) -> LoadedDecoder:
    """The MTP module of a model in NVFP4, with its LM head.

    It is a layer with full attention, and the projection of state and embedding.
    """
    one = {**config, "num_hidden_layers": 1, "full_attention_interval": 1}
    layer = Dimensions.of(one)
    matrices = layer.matrices + 2 * layer.hidden_size**2
    return LoadedDecoder(replace(layer, matrices=matrices), replace(NVFP4, head=None))


def main() -> None:
    """Print the constants, a line for each published record, and medians."""
    records, table = read()
    fits = {}
    print("| kernels | bandwidth | pass, ms | arithmetic | prompt, ms |")
    print("| --- | --- | --- | --- | --- |")
    for kernels in dict.fromkeys(record.kernels for record in records):
        fits[kernels], ms = fit([r for r in records if r.kernels == kernels])
        shares = " | ".join(f"{share:.3f}" for share in (*astuple(fits[kernels]), ms))
        print(f"| {' '.join(kernels)} | {shares} |")
    print(f"\nruntime {runtime_mb(records, table['capacity']):.0f} MB\n")
    errors = leave_one_out(records, table["capacity"])
    print("| device | model | tokens/s | predicted | pass of n rows, ms | | MB | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for error in errors:
        print(line(error))
    print()
    for name in ("speed", "prefill", "memory"):
        sizes = [abs(x) for e in errors if (x := getattr(e, name)) is not None]
        median, worst = statistics.median(sizes), max(sizes)
        print(f"{name}: median {median:.1%}, worst {worst:.1%} of {len(sizes)}")
    mixtures = [_record(row, table["models"]) for row in table["mixtures"]]
    for error in leave_one_out(records, table["capacity"], mixtures):
        print(line(error))
    print("\n| device | model | pass of 60 rows / of 1 | kept, predicted | published |")
    print("| --- | --- | --- | --- | --- |")
    for tree in table["trees"]:
        key = (tree["device"], tree["model"])
        record = next(r for r in records if (r.device.name, r.model) == key)
        efficiency = fits[record.kernels]
        ratio = record.predict_ms(efficiency, 60) / record.predict_ms(efficiency)
        share = tree["speedup"] / tree["tokens_per_pass"]
        print(f"| {key[0]} | {key[1]} | {ratio:.2f} | {1 / ratio:.2f} | {share:.2f} |")
    print("\n| device | model | tokens/s | predicted | MTP | predicted | gain | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for mtp in predict_mtp(table, records):
        print(mtp_line(mtp))


def mtp_line(mtp: Mtp) -> str:
    """A line of the table of MTP: published speeds, and errors of the predictions."""
    plain, drafted = (mtp.row[f"{name}tokens_per_second"] for name in ("", "mtp_"))
    name = mtp.row["model"] + (" in halves" if mtp.row["recipe"] == "none" else "")
    return (
        f"| {mtp.row['device']} | {name} | {plain} | {mtp.plain:+.0%} | {drafted} | "
        f"{mtp.speed:+.0%} | {drafted / plain:.2f} | {mtp.gain:.2f} |"
    )


def line(error: Error) -> str:
    """A line of the table: the published figures and the errors of the prediction."""
    record = error.record
    memory = f"{record.memory_mb} | {error.memory:+.0%}" if error.memory else "- | -"
    name = record.model + (", NVFP4" if record.load.recipe == NVFP4 else "")
    return (
        f"| {record.device.name} | {name} | {1e3 / record.pass_ms:.1f} | "
        f"{error.speed:+.0%} | {record.prompt}: {record.prefill_ms} | "
        f"{error.prefill:+.0%} | {memory} |"
    )


if __name__ == "__main__":
    main()
