"""Counts and rates of all requests so far, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jetdraft.server.desk import Desk

COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "new_tokens": "Tokens that were generated.",
    "target_passes": "Passes of the target, without passes over prompts.",
    "drafted_tokens": "Tokens that were drafted.",
    "accepted_tokens": "Drafted tokens that the target chose too.",
    "reused_tokens": "Tokens of prompts that were still in the buffers.",
}
GAUGES = {
    "acceptance_rate": "Accepted drafted tokens per evaluated drafted token.",
    "tokens_per_pass": "Tokens per pass of the target.",
    "tokens_per_second": "Tokens per second of decoding, after the first round.",
}


class Metrics(Collector):
    """Reads a desk; `answered` counts requests by path and status.

    Metrics(desk).text()
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.answered: Counter[tuple[str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the page that Prometheus reads."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """Yield the families of samples."""
        requests = CounterMetricFamily(
            "jetdraft_requests",
            "Requests by path and status.",
            labels=["path", "status"],
        )
        for (path, status), count in sorted(self.answered.items()):
            requests.add_metric([path, str(status)], count)
        yield requests
        totals = self._desk.total.to_json()
        for name, help_ in COUNTERS.items():
            yield CounterMetricFamily(f"jetdraft_{name}", help_, totals[name])
        for name, help_ in GAUGES.items():
            yield GaugeMetricFamily(f"jetdraft_{name}", help_, totals[name] or 0.0)
        for name, help_ in (
            ("waiting", "Requests that wait for a model."),
            ("generating", "Models in use."),
        ):
            value = getattr(self._desk, name)
            yield GaugeMetricFamily(f"jetdraft_{name}", help_, value)
