"""Fits the roofline's constants on published records, and tests the fit on each record.

    python benchmarks/roofline.py

Prints the constants of `jetdraft.devices.cost_model` and the tables of
docs/devices.md.
"""

import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.devices.cost_model import Dimensions, Efficiency, LoadedDecoder
from jetdraft.devices.device import Device, PowerMode
from jetdraft.recipe import Recipe

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

    def predict_ms(self, efficiency: Efficiency, width: int = 1) -> float:
        """The roofline's time of a pass, in the middle of 128 new tokens."""
        capability, context = self.device.compute_capability, self.prompt + 64
        return self.load.pass_ms(width, context, self.mode, capability, efficiency)


def read(file: Path = FILE) -> tuple[list[Record], dict[str, Any]]:
    """The published records, and the whole table of the file."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return [_record(row, table["models"]) for row in table["rows"]], table


def _record(row: dict[str, Any], models: dict[str, dict[str, Any]]) -> Record:
    # The embedding is in half precision, so a tied head is a second tensor.
    sizes = Dimensions.of({**models[row["model"]], "tie_word_embeddings": False})
    device = Device.named(row["device"])
    return Record(
        device,
        device.power_mode(row.get("power_mode")),
        row["model"],
        LoadedDecoder(sizes, Recipe.parse("int4-headnone")),
        row["prompt"],
        row["prefill_ms"],
        1e3 / row["tokens_per_second"],
        row.get("memory_mb"),
    )


def fit(records: Sequence[Record]) -> Efficiency:
    """The constants with the least squares of relative errors.

    Architectures without a record get no compute rate.

        fit(read()[0]).bandwidth
    """
    reading = [
        record.load.pass_bytes(record.prompt + 64) / record.mode.bandwidth_gbs / 1e6
        for record in records
    ]
    ones = np.ones(len(records))
    measured = np.array([record.pass_ms for record in records])
    relative = np.array([reading, ones]).T / measured[:, None]
    (slow, pass_ms), *_ = np.linalg.lstsq(relative, ones, rcond=None)
    return Efficiency(1 / float(slow), float(pass_ms), _compute(records))


def _compute(records: Sequence[Record]) -> dict[str, float]:
    """For each architecture, the median share of the rate that prefills reached."""
    shares: dict[str, list[float]] = {}
    for record in records:
        capability = record.device.compute_capability
        full = Efficiency(1.0, 0.0, {capability: 1.0})
        least = record.load.row_ms(record.mode, capability, full)
        # Less the measured pass of one row, whose error would count twice otherwise.
        added = (record.prefill_ms - record.pass_ms) / (record.prompt - 1)
        shares.setdefault(capability, []).append(least / added)
    return {name: float(np.median(values)) for name, values in shares.items()}


@dataclass(frozen=True)
class Error:
    """The relative errors of a record's prediction, fitted on the other records.

    `speed` is for one row per pass, `prefill` the time of a pass of `prompt` rows;
    None where nothing was published or fitted.
    """

    record: Record
    speed: float
    prefill: float | None
    memory: float | None


def leave_one_out(records: Sequence[Record], capacity: int) -> list[Error]:
    """Predict each record from the others."""
    return [
        _error(record, [other for other in records if other is not record], capacity)
        for record in records
    ]


def _error(record: Record, others: Sequence[Record], capacity: int) -> Error:
    efficiency = fit(others)
    prefill = None
    if record.device.compute_capability in efficiency.compute:
        prefill = record.predict_ms(efficiency, record.prompt) / record.prefill_ms - 1
    memory = None
    if record.memory_mb is not None:
        mb = record.load.memory_mb(capacity) + runtime_mb(others, capacity)
        memory = mb / record.memory_mb - 1
    speed = record.pass_ms / record.predict_ms(efficiency) - 1
    return Error(record, speed, prefill, memory)


def runtime_mb(records: Sequence[Record], capacity: int) -> float:
    """The median memory beside weights and KV, in 10^6 bytes."""
    sizes = [
        record.memory_mb - record.load.memory_mb(capacity)
        for record in records
        if record.memory_mb is not None
    ]
    return float(np.median(sizes))


DRAFTS = 3  # The tokens that an MTP module drafts for a pass of the published rows.


def mtp_line(row: dict[str, Any], models: dict[str, Any], fitted: Efficiency) -> str:
    """A line of the table of MTP: published speeds, and errors of the predictions.

    A round is a pass of four rows and three of the module: a layer with full attention,
    the projection of state and embedding, and the LM head. Of Gemma's assistants the
    sizes are not known, so their time is left out.
    """
    device, config = Device.named(row["device"]), models[row["model"]]
    recipe, mode = Recipe.parse(row["recipe"]), device.power_mode(None)
    load = LoadedDecoder(Dimensions.of(config), recipe)
    where = 128, mode, device.compute_capability, fitted
    plain_ms, round_ms = (load.pass_ms(rows, *where) for rows in (1, 1 + DRAFTS))
    if "gemma" not in row["model"]:
        one = {**config, "num_hidden_layers": 1, "full_attention_interval": 1}
        layer = Dimensions.of(one)
        fc = 2 * layer.hidden_size**2
        module = LoadedDecoder(replace(layer, matrices=layer.matrices + fc), recipe)
        round_ms += DRAFTS * module.pass_ms(1, *where)
    plain, drafted = 1e3 / plain_ms, row["tokens_per_pass"] * 1e3 / round_ms
    published = row["tokens_per_second"], row["mtp_tokens_per_second"]
    return (
        f"| {row['model']} | {row['recipe']} | {published[0]} | "
        f"{plain / published[0] - 1:+.0%} | {published[1]} | "
        f"{drafted / published[1] - 1:+.0%} | {published[1] / published[0]:.2f} | "
        f"{drafted / plain:.2f} |"
    )


def main() -> None:
    """Print the constants, a line for each published record, and medians."""
    records, table = read()
    efficiency = fit(records)
    print(
        f"bandwidth {efficiency.bandwidth:.3f}, pass {efficiency.pass_ms:.3f} ms, ",
        end="",
    )
    print(f"compute {efficiency.compute}, ", end="")
    print(f"runtime {runtime_mb(records, table['capacity']):.0f} MB\n")
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
    print("\n| device | model | pass of 60 rows / of 1 | kept, predicted | published |")
    print("| --- | --- | --- | --- | --- |")
    for tree in table["trees"]:
        key = (tree["device"], tree["model"])
        [record] = [r for r in records if (r.device.name, r.model) == key]
        ratio = record.predict_ms(efficiency, 60) / record.predict_ms(efficiency)
        share = tree["speedup"] / tree["tokens_per_pass"]
        print(f"| {key[0]} | {key[1]} | {ratio:.2f} | {1 / ratio:.2f} | {share:.2f} |")
    print("\n| model | recipe | tokens/s | predicted | MTP | predicted | gain | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in table["mtp"]:
        print(mtp_line(row, table["models"], efficiency))


def line(error: Error) -> str:
    """A line of the table: the published figures and the errors of the prediction."""
    record = error.record
    memory = (
        "- | -" if error.memory is None else f"{record.memory_mb} | {error.memory:+.0%}"
    )
    prefill = "-" if error.prefill is None else f"{error.prefill:+.0%}"
    return (
        f"| {record.device.name} | {record.model} | {1e3 / record.pass_ms:.1f} | "
        f"{error.speed:+.0%} | {record.prompt}: {record.prefill_ms} | {prefill} | "
        f"{memory} |"
    )


if __name__ == "__main__":
    main()
