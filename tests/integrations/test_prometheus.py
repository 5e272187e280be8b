"""`opintercept.integrations.prometheus`, scraped over HTTP."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from torch import nn

from opintercept import OpInterceptError, hooks, intercept

pytest.importorskip("prometheus_client", reason="needs prometheus-client")

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from opintercept.integrations.prometheus import Exporter

Samples = dict[tuple[str, ...], float]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def url(registry: CollectorRegistry) -> Iterator[str]:
    """Where a server shows the registry."""
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()
    with intercept():  # the server's thread may have kept the kernels of the block before installed
        pass


def scraped(url: str) -> dict[str, Samples]:
    """The samples of each metric, by the values of their labels in the order of their names."""
    found: dict[str, Samples] = {}
    with urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name.removeprefix("opintercept_"), {})[labels] = sample.value
    return found


def test_a_scrape_shows_what_the_hooks_have_counted(registry: CollectorRegistry, url: str) -> None:
    profile, stats, search = hooks.Profile(), hooks.Stats(of=("lhs", "output")), hooks.NonFinite(action="record")
    Exporter([profile, stats, search], registry=registry)
    first = nn.Linear(4, 8)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 2))
    with intercept([profile, stats, search]):
        model(torch.randn(3, 4)).sum().backward()
        found = scraped(url)
        assert found["calls_total"] == {
            ("0", "forward", "0"): 1,
            ("0", "backward", "0"): 1,
            ("2", "forward", "0"): 1,
            ("2", "backward", "0"): 2,
        }
        assert found["flops_total"]["2", "backward", "0"] == 2 * 3 * 8 * 2 * 2
        assert found["values_total"]["0", "lhs", "forward", "0"] == 12
        assert sum(found["nan_values_total"].values()) == 0
        rows = {(row.module, row.operand, row.phase): row for row in stats.rows()}
        assert found["absmax"]["2", "output", "forward", "0"] == rows["2", "output", "forward"].absmax
        assert found["rms"]["2", "output", "forward", "0"] == pytest.approx(rows["2", "output", "forward"].rms)
        assert found["mean"]["2", "output", "forward", "0"] == pytest.approx(rows["2", "output", "forward"].mean)
        assert "nonfinite_findings_total" not in found
        with torch.no_grad():
            first.bias.fill_(math.nan)
        model(torch.ones(3, 4))
    found = scraped(url)
    assert found["nan_values_total"]["2", "output", "forward", "0"] == 6
    assert found["nonfinite_findings_total"] == {("came in", "0", "forward", "0"): 1}
    assert found["nonfinite_passed_on_total"] == {("0",): 1}


def test_modules_beyond_the_limit_are_added_up_under_one_label(registry: CollectorRegistry) -> None:
    profile, stats = hooks.Profile(), hooks.Stats()
    exporter = Exporter([profile, stats], limit=3, registry=registry)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    with intercept([profile, stats]):
        model(torch.ones(2, 4))
    counts: dict[str, float] = {labels[0]: value for labels, value in _values(exporter, "opintercept_calls").items()}
    assert counts == {"0": 1, "1": 1, "2": 1, "(other)": 7}
    outputs = _values(exporter, "opintercept_values")
    assert {labels[0]: value for labels, value in outputs.items()} == {"0": 8, "1": 8, "2": 8, "(other)": 56}
    rest = [row for row in stats.rows() if row.module not in ("0", "1", "2")]
    (largest,) = (v for k, v in _values(exporter, "opintercept_absmax").items() if k[0] == "(other)")
    assert largest == max(row.absmax for row in rest)
    (mean,) = (v for k, v in _values(exporter, "opintercept_mean").items() if k[0] == "(other)")
    assert mean == pytest.approx(sum(row.mean for row in rest) / 7)
    (rms,) = (v for k, v in _values(exporter, "opintercept_rms").items() if k[0] == "(other)")
    assert rms == pytest.approx(math.sqrt(sum(row.rms**2 for row in rest) / 7))


def _values(exporter: Exporter, name: str) -> Samples:
    (metric,) = (metric for metric in exporter.collect() if metric.name == name)
    return {tuple(sample.labels.values()): sample.value for sample in metric.samples}


def test_a_module_keeps_its_label(registry: CollectorRegistry) -> None:
    profile = hooks.Profile()
    exporter = Exporter(profile, limit=1, registry=registry)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with intercept(profile):
        for _ in range(3):
            model[1](torch.ones(2, 4))
            first = _values(exporter, "opintercept_calls")
            model(torch.ones(2, 4))
    assert list(first) == [("Linear", "forward", "0"), ("(other)", "forward", "0")]


def test_values_that_are_all_bad_have_no_mean(registry: CollectorRegistry) -> None:
    stats = hooks.Stats()
    exporter = Exporter(stats, registry=registry)
    with intercept(stats):
        torch.full((2, 2), math.nan) @ torch.ones(2, 2)
    assert _values(exporter, "opintercept_nan_values") == {("-", "output", "forward", "0"): 4}
    assert _values(exporter, "opintercept_mean") == {}


def test_scrapes_beside_threads_that_multiply_never_fall(registry: CollectorRegistry, url: str) -> None:
    profile, stats = hooks.Profile(), hooks.Stats()
    Exporter([profile, stats], registry=registry)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            torch.ones(4, 4) @ torch.ones(4, 4)

    threads = [threading.Thread(target=work) for _ in range(2)]
    totals: Counter[str] = Counter()
    with intercept([profile, stats], threads="all"):
        for thread in threads:
            thread.start()
        for _ in range(20):
            found = scraped(url)
            for name in "calls_total", "values_total":
                total = sum(found.get(name, {}).values())
                assert total >= totals[name]
                totals[name] = int(total)
        stop.set()
        for thread in threads:
            thread.join()
    assert totals["calls_total"] > 0
    found = scraped(url)
    assert sum(found["values_total"].values()) == 16 * sum(found["calls_total"].values())


@pytest.mark.usefixtures("one_of_two_ranks")
def test_the_rank_is_a_label(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    profile = hooks.Profile()
    exporter = Exporter(profile, registry=registry)
    with intercept(profile):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert _values(exporter, "opintercept_calls") == {("-", "forward", "1"): 1}


def test_a_registry_has_one_exporter_until_that_is_closed(registry: CollectorRegistry) -> None:
    exporter = Exporter(hooks.Profile(), registry=registry)
    with pytest.raises(OpInterceptError, match="the registry has an exporter already; give all hooks to one"):
        Exporter(hooks.Stats(), registry=registry)
    exporter.close()
    Exporter(hooks.Stats(), registry=registry).close()


@pytest.mark.parametrize("hook", [hooks.Recorder(), print, None])
def test_other_hooks_are_refused(hook: Any) -> None:
    with pytest.raises(TypeError, match="an exporter reads Profile, Stats and NonFinite, got"):
        Exporter(hook)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be a whole number of at least 1, got 0"):
        Exporter([], limit=0)
