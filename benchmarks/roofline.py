"""Fit the planner's constants on published rows, and predict each from the others.

    python benchmarks/roofline.py

Prints the constants of `jetdraft.devices.roofline` and the tables of docs/devices.md.
"""

from __future__ import annotations

import statistics

from fit import Error, fit, leave_one_out, read, runtime_mb


def main() -> None:
    """The constants, a row per published row, and medians."""
    rows, found = read()
    known = fit(rows)
    print(f"bandwidth {known.bandwidth:.3f}, pass {known.pass_ms:.3f} ms, ", end="")
    print(f"compute {known.compute}, ", end="")
    print(f"runtime {runtime_mb(rows, found['capacity']):.0f} MB\n")
    errors = leave_one_out(rows, found["capacity"])
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
    for tree in found["trees"]:
        key = (tree["device"], tree["model"])
        [row] = [r for r in rows if (r.device.name, r.model) == key]
        ratio = row.predict_ms(known, 60) / row.predict_ms(known)
        kept = tree["speedup"] / tree["tokens_per_pass"]
        print(f"| {key[0]} | {key[1]} | {ratio:.2f} | {1 / ratio:.2f} | {kept:.2f} |")


def line(error: Error) -> str:
    """A row as a line of a table: what was published, and how far off we are."""
    row = error.row
    memory = (
        "- | -" if error.memory is None else f"{row.memory_mb} | {error.memory:+.0%}"
    )
    prefill = "-" if error.prefill is None else f"{error.prefill:+.0%}"
    return (
        f"| {row.device.name} | {row.model} | {1e3 / row.pass_ms:.1f} | "
        f"{error.speed:+.0%} | {row.prompt}: {row.prefill_ms} | {prefill} | {memory} |"
    )


if __name__ == "__main__":
    main()
