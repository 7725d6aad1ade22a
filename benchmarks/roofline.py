"""Fits the roofline's constants on published records, and tests the fit on each record.

    python benchmarks/roofline.py

Prints the constants of `jetdraft.devices.planning.roofline` and the tables of
docs/devices.md.
"""

from __future__ import annotations

import statistics

from fit import Error, fit, leave_one_out, read, runtime_mb


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
