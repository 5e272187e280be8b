"""`Log`: calls as `logging` records that another thread or process can write."""

from __future__ import annotations

import io
import logging
import logging.handlers
import pickle
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_calls import product_of

from opintercept import CallRecord, OpCall, hooks, intercept


class Kept(logging.Handler):
    """Keeps the log records, and the thread that handled each."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []
        self.threads: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.threads.append(threading.current_thread().name)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger of this test alone, at INFO, that does not propagate."""
    logger = logging.getLogger("opintercept.test")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def kept(logger: logging.Logger) -> Kept:
    handler = Kept()
    logger.addHandler(handler)
    return handler


def multiply() -> torch.Tensor:
    return torch.mm(torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4))


def test_by_default_only_shapes_are_logged(logger: logging.Logger, kept: Kept) -> None:
    with intercept(hooks.Log(logger)):
        multiply()
    [record] = kept.records
    assert record.getMessage() == "0 forward aten::mm float32[2, 3] @ float32[3, 4] -> float32[2, 4]"
    assert (record.levelno, record.values) == (logging.INFO, None)
    assert type(record.call) is CallRecord
    assert (record.call.op, record.call.flops) == ("aten::mm", 48)


def test_stats_of_the_output_are_logged(logger: logging.Logger, kept: Kept) -> None:
    with intercept(hooks.Log(logger, values="stats")):
        torch.mm(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, float("nan")]]).nan_to_num(6.0))
    [record] = kept.records
    # The values are 1, 2, 3 and 6; their mean square deviation from 3 is 14 / 4.
    assert record.values == {"min": 1.0, "max": 6.0, "mean": 3.0, "std": pytest.approx(3.5**0.5), "nonfinite": 0}
    assert record.getMessage() == (
        "0 forward aten::mm float32[2, 2] @ float32[2, 2] -> float32[2, 2] | min 1 max 6 mean 3 std 1.87"
    )


def test_a_sample_is_drawn_from_the_output(logger: logging.Logger, kept: Kept) -> None:
    with intercept(hooks.Log(logger, values="sample", size=5)):
        product = multiply()
    [record] = kept.records
    assert len(record.values) == 5
    assert set(record.values) <= set(product.flatten().tolist())
    shown = " ".join(f"{value:.4g}" for value in record.values)
    assert record.getMessage().endswith(f"-> float32[2, 4] | sample {shown}")


def test_a_sample_is_reproduced_by_its_seed(logger: logging.Logger, kept: Kept) -> None:
    output = torch.arange(1000.0)
    samples = []
    for seed in (1, 1, 2):
        hook = hooks.Log(logger, values="sample", size=16, seed=seed)
        for _ in range(2):
            hook.post(product_of(output))
        first, second = kept.records[-2].values, kept.records[-1].values
        assert first != second
        samples.append([first, second])
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]


# What `stats` shows of any output is in test_print.py.
@pytest.mark.parametrize(
    ("output", "sample"),
    [
        (torch.tensor([float("nan"), float("inf"), 2.0]), {"nan", "inf", "2.0"}),
        (torch.tensor([-1, 1]), {"-1.0", "1.0"}),
        (torch.tensor([3 + 4j]), {"5.0"}),
        (torch.tensor([448.0]).to(torch.float8_e4m3fn), {"448.0"}),
        (torch.eye(2).to_sparse(), {"0.0", "1.0"}),
        ((torch.tensor([7.0]), torch.tensor([9.0])), {"7.0"}),
        (torch.empty(0, 3), set()),
        (torch.ones(2, device="meta"), set()),
        (None, set()),
    ],
    ids=["nonfinite", "integer", "complex", "float8", "sparse", "several", "empty", "meta", "none"],
)
def test_values_of_any_output(output: Any, sample: set[str], logger: logging.Logger, kept: Kept) -> None:
    hooks.Log(logger, values="stats").post(product_of(output))
    hooks.Log(logger, values="sample", size=64).post(product_of(output))
    stats, drawn = kept.records
    assert {repr(value) for value in drawn.values} == sample
    assert len(drawn.values) == (64 if sample else 0)
    assert (stats.values is not None) is ("|" in stats.getMessage()) is bool(sample)


@pytest.mark.parametrize("values", ["none", "stats", "sample"])
def test_a_record_can_be_pickled(values: Any, logger: logging.Logger, kept: Kept) -> None:
    with intercept(hooks.Log(logger, values=values)):
        x = torch.ones(1, 2, 3, 4)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    [record] = kept.records
    copy = pickle.loads(pickle.dumps(record))
    assert copy.call == record.call
    assert copy.values == record.values
    assert copy.getMessage() == record.getMessage()


def test_a_queue_hands_the_records_to_another_thread(logger: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "calls.log"
    file, far = logging.FileHandler(path), Kept()
    file.setFormatter(logging.Formatter("%(name)s %(message)s"))
    records: queue.SimpleQueue[Any] = queue.SimpleQueue()
    logger.addHandler(logging.handlers.QueueHandler(records))
    listener = logging.handlers.QueueListener(records, file, far)
    listener.start()
    try:
        with intercept(hooks.Log(logger, values="stats")):
            for _ in range(3):
                multiply()
    finally:
        listener.stop()
        file.close()
    with intercept():
        pass  # the listener's thread kept the kernels installed; this exit finds it gone and removes them
    assert path.read_text("utf-8").splitlines() == [
        f"opintercept.test {index} forward aten::mm float32[2, 3] @ float32[3, 4] -> float32[2, 4]"
        " | min 20 max 92 mean 49.2 std 26.6"
        for index in range(3)
    ]
    assert [record.call.index for record in far.records] == [0, 1, 2]
    assert far.records[0].values["max"] == 92.0
    assert threading.current_thread().name not in far.threads


@pytest.mark.parametrize(("values", "reader"), [("stats", "summarize"), ("sample", "sample")], ids=["stats", "sample"])
def test_if_the_logger_drops_the_message_no_value_is_read(
    values: Any, reader: str, logger: logging.Logger, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []

    def read(*args: Any) -> Any:
        computed.append(reader)
        return None if reader == "summarize" else []

    def record(call: OpCall) -> Any:
        computed.append("record")

    monkeypatch.setattr(f"opintercept.hooks.log.{reader}", read)
    monkeypatch.setattr(OpCall, "record", record)
    with intercept(hooks.Log(logger, values=values, level=logging.DEBUG)):
        multiply()
    assert computed == []
    assert kept.records == []
    logger.setLevel(logging.DEBUG)
    with intercept(hooks.Log(logger, values=values, level=logging.DEBUG)):
        multiply()
    assert computed == [reader, "record"]
    assert len(kept.records) == 1


def test_a_logger_can_be_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "opintercept"), caplog.at_level(logging.WARNING, "mine"):
        with intercept([hooks.Log(level=logging.WARNING), hooks.Log("mine", level=logging.ERROR)]):
            multiply()
        with intercept(hooks.Log("mine")):
            multiply()
    assert [(record.name, record.levelno) for record in caplog.records] == [
        ("opintercept", logging.WARNING),
        ("mine", logging.ERROR),
    ]


def test_a_handlers_own_matmuls_are_not_seen(logger: logging.Logger) -> None:
    seen: list[str] = []

    class Multiplies(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            multiply()
            seen.append(record.getMessage())

    logger.addHandler(Multiplies())
    with intercept(hooks.Log(logger)):
        multiply()
    assert len(seen) == 1


def test_a_formatter_can_show_the_fields_of_the_call(logger: logging.Logger) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("{call.op} {call.gemm} {call.flops}", style="{"))
    logger.addHandler(handler)
    with intercept(hooks.Log(logger)):
        multiply()
    assert stream.getvalue() == "aten::mm [2, 3] @ [3, 4] 48\n"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"values": "all"}, ValueError, r"^values must be one of 'none', 'stats', 'sample', got 'all'$"),
        ({"values": None}, ValueError, r"^values must be one of .*, got None$"),
        ({"size": 0}, ValueError, r"^size must be .*at least 1, got 0$"),
        ({"size": -3}, ValueError, r"^size must be .*at least 1, got -3$"),
        ({"size": 1.5}, ValueError, r"^size must be .*, got 1\.5$"),
        ({"level": "INFO"}, TypeError, r"^level must be .*, got 'INFO'$"),
        ({"logger": None}, TypeError, r"^logger must be .*, got None$"),
    ],
    ids=["values", "no values", "size 0", "negative size", "half a size", "level", "logger"],
)
def test_bad_arguments_are_refused_at_once(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hooks.Log(**options)
