"""`Exporter`: exports what hooks have counted as Prometheus metrics.

Invariant: the hooks are read when a scrape asks for them, so calls pay nothing, and the number of series is bounded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from opintercept._core.checks import check_count
from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.tables import Held
from opintercept._ranks.rank import rank_and_world_size
from opintercept.hooks import NonFinite, Profile, Stats

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise needs("opintercept.integrations.prometheus", "prometheus_client", "prometheus-client") from missing

OTHER = "(other)"
"""The label of all modules beyond the limit."""

_CALLS = ("module", "phase", "rank")
_VALUES = ("module", "operand", "phase", "rank")
_FAMILIES: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], tuple[str, ...], str]] = {
    "opintercept_calls": (CounterMetricFamily, _CALLS, "Calls of watched operators."),
    "opintercept_flops": (CounterMetricFamily, _CALLS, "Floating-point operations, where there is a formula."),
    "opintercept_seconds": (
        CounterMetricFamily,
        _CALLS,
        "Time of the operators: the host's on a CPU, else the device's.",
    ),
    "opintercept_values": (CounterMetricFamily, _VALUES, "Values of operands and outputs."),
    "opintercept_nan_values": (CounterMetricFamily, _VALUES, "NaN among the values."),
    "opintercept_inf_values": (CounterMetricFamily, _VALUES, "Infinite values among the values."),
    "opintercept_absmax": (GaugeMetricFamily, _VALUES, "Largest magnitude of a finite value so far."),
    "opintercept_mean": (GaugeMetricFamily, _VALUES, "Mean of the finite values so far."),
    "opintercept_rms": (GaugeMetricFamily, _VALUES, "Root mean square of the finite values so far."),
    "opintercept_nonfinite_findings": (
        CounterMetricFamily,
        ("module", "phase", "kind", "rank"),
        "Operators of modules that made values that are not finite, or were the first to receive them.",
    ),
    "opintercept_nonfinite_passed_on": (CounterMetricFamily, ("rank",), "Calls that only passed such values on."),
}


class Exporter(Held, Collector):
    """Shows the counts of hooks to Prometheus.

    `Profile` gives calls, FLOP and seconds by module and phase; `Stats` gives values, NaN, Inf, absmax, mean and rms by
    module, operand and phase; `NonFinite` gives findings by module, and calls that passed them on. All have the label
    `rank`. A module is `-` for calls outside all modules and `unknown` if it is not known.

    A scrape waits for the devices whose values or times it reads.

    Args:
        hooks: One or several of `Profile`, `Stats` and `NonFinite`. They need not be in one block.
        limit: How many modules get a label of their own, the first ones to be seen. All others are added up as
            `(other)`.
        registry: The registry of `prometheus_client` to join; by default the one that its servers show.

    Raises:
        TypeError: A hook is of another type.
        ValueError: `limit` is below 1.
        OpInterceptError: The registry has an exporter already.

    Example:
        >>> import torch
        >>> from prometheus_client import CollectorRegistry
        >>> from opintercept import hooks, intercept
        >>> profile, registry = hooks.Profile(), CollectorRegistry()
        >>> exporter = Exporter(profile, registry=registry)
        >>> with intercept(profile):
        ...     _ = torch.nn.Linear(3, 2)(torch.zeros(4, 3))
        >>> registry.get_sample_value(
        ...     "opintercept_flops_total", {"module": "Linear", "phase": "forward", "rank": "0"}
        ... )
        48
    """

    def __init__(
        self,
        hooks: Profile | Stats | NonFinite | Iterable[Profile | Stats | NonFinite],
        *,
        limit: int = 100,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        found: list[Any] = [*hooks] if isinstance(hooks, Iterable) else [hooks]
        for hook in found:
            if not isinstance(hook, (Profile, Stats, NonFinite)):
                raise TypeError(f"an exporter reads Profile, Stats and NonFinite, got {hook!r}")
        self._hooks = found
        self._limit = check_count("limit", limit)
        self._registry = registry
        self._modules: set[str] = set()
        self._lock = threading.Lock()  # a server answers scrapes in threads
        try:
            registry.register(self)
        except ValueError as error:
            raise OpInterceptError(
                "the registry has an exporter already; give all hooks to one exporter, or pass another registry"
            ) from error

    def close(self) -> None:
        """Leave the registry."""
        self._registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """The metrics without their values."""
        for name, (family, labels, text) in _FAMILIES.items():
            yield family(name, text, labels=labels)

    def collect(self) -> Iterator[Metric]:
        """The metrics; prometheus_client calls this for each scrape."""
        with self._lock:
            found = self._read()
        for metric in self.describe():
            for labels, value in found[metric.name].items():
                metric.add_metric(labels, value)  # type: ignore[attr-defined]
            yield metric

    def _read(self) -> dict[str, dict[tuple[str, ...], float]]:
        rank = str(rank_and_world_size()[0])
        found: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _FAMILIES}

        def add(name: str, labels: tuple[str, ...], value: float) -> None:
            sums = found[f"opintercept_{name}"]
            sums[labels] = sums.get(labels, 0) + value

        for hook in self._hooks:
            if isinstance(hook, Profile):
                for row in hook.rows():
                    labels = (self._label(row.module), row.phase, rank)
                    add("calls", labels, row.calls)
                    add("flops", labels, row.flops or 0)
                    add("seconds", labels, row.seconds)
            elif isinstance(hook, NonFinite):
                add("nonfinite_passed_on", (rank,), hook.passed_on)
                for finding in hook.findings:
                    record = finding.record
                    add("nonfinite_findings", (self._label(record.module), record.phase, finding.kind, rank), 1)
            else:
                self._add_values(hook, rank, add, found["opintercept_absmax"])
        values, bad = found["opintercept_values"], (found["opintercept_nan_values"], found["opintercept_inf_values"])
        means, roots = found["opintercept_mean"], found["opintercept_rms"]
        for key in means:
            finite = values[key] - sum(counts[key] for counts in bad)
            means[key], roots[key] = means[key] / finite, math.sqrt(roots[key] / finite)
        return found

    def _add_values(self, stats: Stats, rank: str, add: Any, largest: dict[tuple[str, ...], float]) -> None:
        """Add the rows of a `Stats`; mean and rms as sums of the values and of their squares."""
        for row in stats.rows():
            labels = (self._label(row.module), row.operand, row.phase, rank)
            add("values", labels, row.count)
            add("nan_values", labels, row.nan)
            add("inf_values", labels, row.inf)
            finite = row.count - row.nan - row.inf
            if finite:
                add("mean", labels, row.mean * finite)
                add("rms", labels, row.rms**2 * finite)
                largest[labels] = max(row.absmax, largest.get(labels, 0.0))

    def _label(self, module: str | None) -> str:
        """A module's label. A module that has one keeps it, so that no counter ever falls."""
        name = "unknown" if module is None else module or "-"
        if name not in self._modules:
            if len(self._modules) >= self._limit:
                return OTHER
            self._modules.add(name)
        return name
