"""The stats of a generation in a few lines of text."""

from __future__ import annotations

from jetdraft.runtime.measured.stats import Stats


def summary(stats: Stats) -> str:
    """Return the line that ends a generation."""
    parts = [f"{stats.new_tokens} tokens in {stats.target_passes} passes"]
    for value, form in (
        (stats.tokens_per_pass, "{:.2f} tokens/pass"),
        (stats.acceptance_rate, "acceptance {:.2f}"),
        (stats.tokens_per_second, "{:.1f} tokens/s"),
        (stats.time_to_first_token, "first after {:.3f} s"),
        (stats.seed, "seed {}"),
        (stats.select_kv, "{} KV rows in a pass"),
    ):
        if value is not None:
            parts.append(form.format(value))
    choices = sorted(stats.rounds_by_choice.items(), key=lambda item: -item[1])
    chosen = " ".join(f"{choice} x{rounds}" for choice, rounds in choices)
    ends = [f"{stats.method}: {chosen}", stats.finish_reason]
    if stats.lossy:
        exits = f", {stats.exited_tokens} exits" if stats.exited_tokens else ""
        ends.append(f"lossy: {stats.lossy}{exits}")
    return f"[{', '.join(parts)}; {'; '.join(ends)}]"


def explanation(stats: Stats) -> str:
    """Return what each method did, and why rounds had no draft, line by line."""
    # A method saves the time of its tokens in plain decoding, less its own time.
    lines = [f"one by one a token takes {stats.plain_ms:.1f} ms"]
    lines += ["method     rounds  drafted  accepted   tokens     saved"]
    for name, share in sorted(stats.by_method.items(), key=lambda i: -i[1].rounds):
        lines.append(
            f"{name:10} {share.rounds:6} {share.drafted_tokens:8} "
            f"{share.accepted_tokens:9} {share.new_tokens:8} {share.saved_ms:+8.1f} ms"
        )
    lines += [f"off in {rounds} of them: {why}" for why, rounds in stats.off.items()]
    return "\n".join(lines)
