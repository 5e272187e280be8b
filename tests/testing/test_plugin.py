"""The pytest plugin: the fixture `op_calls`, the marker, reports, and forgotten blocks.

Inner runs share this process where they can, since importing torch takes longer than everything they test.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from threads import run_threads

from opintercept import hooks, intercept
from opintercept.testing.plugin import OpCalls
from opintercept.testing.snapshot import FOLDER

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# An inner run in this process forgets the modules that it is the first to import: their classes would exist twice.
for name in hooks.__all__:
    getattr(hooks, name)

asks_xdist = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
asks_asyncio = pytest.mark.skipif(importlib.util.find_spec("pytest_asyncio") is None, reason="needs pytest-asyncio")

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run inner tests in this process, without other plugins that change how tests run."""

    def run_inner(*options: str, **files: str) -> pytest.RunResult:
        pytester.makepyfile(**files)
        return pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:xdist", "-p", "no:asyncio", *options)

    return run_inner


def test_the_fixture_sees_the_matmuls_of_its_test(op_calls: OpCalls) -> None:
    torch.bmm(torch.ones(5, 2, 3), torch.ones(5, 3, 4))
    op_calls.expect(op="bmm", phase="forward", dtype=torch.float32, count=1, shapes=((5, 2, 3), (5, 3, 4)))
    assert op_calls[0].flops == op_calls.flops == 2 * 5 * 2 * 4 * 3


def test_a_block_inside_a_test_does_not_hide_its_calls(op_calls: OpCalls) -> None:
    recorder = hooks.Recorder()
    with intercept(recorder), op_calls.block() as calls:
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    torch.mv(torch.ones(2, 3), torch.ones(3))
    assert [call.op for call in recorder.records] == [call.op for call in calls] == ["aten::mm"]
    assert [call.op for call in op_calls] == ["aten::mm", "aten::mv"]


def test_a_block_uses_its_options(op_calls: OpCalls) -> None:
    seen: list[str] = []
    with op_calls.block(level="function", ops=["linear"], hooks=[lambda call: seen.append(call.op)]) as calls:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert [call.op for call in calls] == seen == ["torch.nn.functional.linear"]
    with op_calls.block(ops="all", hooks=lambda call: seen.append(call.op)) as calls:
        _ = torch.ones(2) + 1
    assert [call.op for call in calls] == seen[1:]
    assert "aten::add" in seen


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"levels": "function"}, TypeError, r"^unknown option levels; choose from level, ops, engine, finite, hooks$"),
        ({"finite": 1}, TypeError, r"^finite must be True or False, got 1$"),
        ({"level": "both"}, ValueError, r"^level must be one of 'function', 'dispatch', got 'both'$"),
        ({"hooks": [hooks.Recorder]}, TypeError, r"^a hook must be an instance, got the class Recorder"),
        ({"hooks": 3}, TypeError, r"^a hook must be callable or have one of"),
    ],
)
def test_a_block_refuses_wrong_options(
    op_calls: OpCalls, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), op_calls.block(**options):
        pytest.fail("entered")


def test_a_factory_records_calls_of_its_own(op_calls_factory: Any, op_calls: OpCalls) -> None:
    with op_calls_factory(ops="bmm") as calls:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    calls.expect(op="bmm", count=1)
    calls.expect(count=1)
    op_calls.expect(count=2)


# Inner runs.


BODY = """
import pytest
import torch

BEFORE = torch._C._dispatch_dump_table("aten::mm")


def mm():
    return torch.mm(torch.ones(2, 3), torch.ones(3, 4))


@pytest.fixture
def model():
    mm()
    yield
    mm()


@pytest.fixture
def broken(op_calls):
    mm()
    raise ValueError("broken fixture")


@pytest.fixture
def looks_back(op_calls):
    yield
    op_calls.expect(count=2)


def test_only_the_body_is_seen(op_calls, model, looks_back):
    assert len(op_calls) == 0
    x = torch.ones(2, 3, requires_grad=True)
    y = x @ torch.ones(3, 4)
    assert [call.op for call in op_calls] == ["aten::mm"]
    y.sum().backward()
    assert [call.phase for call in op_calls] == ["forward", "backward"]
    op_calls.expect(op="mm", count=2, max_count=2, dtype=torch.float32)


def test_whatever_the_order_of_fixtures(model, op_calls):
    op_calls.expect(count=0)
    mm()
    op_calls.expect(count=1)


def test_fails_by_expectation(op_calls):
    mm()
    op_calls.expect(op="bmm", count=3)


def test_fails_by_an_error_of_its_own(op_calls):
    mm()
    torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def test_fails_in_its_teardown(looks_back):
    mm()


def test_fails_in_a_fixture_that_was_set_up_later(op_calls, broken):
    raise AssertionError("never runs")


def test_torch_is_clean_after_failures():
    assert torch._C._dispatch_dump_table("aten::mm") == BEFORE
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def test_the_body_changes_the_table(op_calls):
    assert torch._C._dispatch_dump_table("aten::mm") != BEFORE


def test_the_fixture_may_be_asked_for_late(request):
    mm()
    op_calls = request.getfixturevalue("op_calls")
    mm()
    op_calls.expect(count=1)
"""


def test_only_the_body_of_a_test_is_watched(run: Run) -> None:
    result = run(test_body=BODY)
    result.assert_outcomes(passed=6, failed=2, errors=2)
    result.stdout.fnmatch_lines(
        [
            '>*op_calls.expect(op="bmm", count=3)',
            "E*Failed: expected 3 bmm calls, got 0",
            "E*what ran: 1 call, 48 FLOP",
            "E*phase * module * op * shapes * dtype * line * calls",
            "E*forward * - * mm * [[]2, 3] @ [[]3, 4] * float32 * test_body.py:8 in mm * 1",
            "*test_body.py:*: Failed",
        ]
    )
    result.stdout.fnmatch_lines(["E*RuntimeError: *mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"])
    result.stdout.fnmatch_lines(["E*Failed: expected 2 matmul calls, got 1", "E*ValueError: broken fixture"])
    # One for the error; the failed expectation shows the table itself.
    sections = [line for line in result.outlines if line.strip("-") == " matmuls "]
    assert len(sections) == 1
    result.stdout.fnmatch_lines(["*- matmuls -*", "what ran: 1 call, 48 FLOP", "phase *", "forward * mm *"])
    for file in ("testing/calls", "_pipeline", "kernels"):  # the traceback ends in the test
        result.stdout.no_fnmatch_line(f"*{file}.py:*")


MARKED = """
import pytest
import torch

from opintercept import hooks

pytestmark = pytest.mark.opintercept(level="function")
recorder = hooks.Recorder()


def linear():
    return torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))


def test_module_marker(op_calls):
    with op_calls.block() as calls:
        linear()
    op_calls.expect(op="linear", count=1)
    calls.expect(op="linear", count=1)


@pytest.mark.opintercept(level="dispatch")
class TestMarked:
    def test_class_marker(self, op_calls):
        linear()
        op_calls.expect(op="addmm", count=1)
        with op_calls.block(level="function") as calls:
            linear()
        calls.expect(op="linear")

    @pytest.mark.opintercept(engine="mode", ops="all")
    def test_the_closest_wins_argument_by_argument(self, op_calls):
        linear()
        op_calls.expect(op="addmm", count=1)
        op_calls.expect(op="ones", count=3)

    @pytest.mark.opintercept(ops=["mv"])
    def test_ops(self, op_calls):
        linear()
        op_calls.expect(count=0)

    @pytest.mark.opintercept(hooks=[recorder])
    def test_hooks_without_the_fixture(self):
        linear()
        assert [call.op for call in recorder.records] == ["aten::addmm"]

    def test_fails_without_the_fixture(self):
        linear()
        assert False

    @pytest.mark.opintercept(levels="function")
    def test_unknown_argument(self):
        pass

    @pytest.mark.opintercept("function")
    def test_positional_argument(self):
        pass

    @pytest.mark.opintercept(level="both")
    def test_unknown_level(self):
        pass

    @pytest.mark.opintercept(ops=["bmmm"])
    def test_unknown_operator(self, op_calls):
        pass

    @pytest.mark.opintercept(hooks=[hooks.Recorder])
    def test_no_hook(self):
        pass

    @pytest.mark.opintercept(finite="yes")
    def test_no_flag(self):
        pass
"""


def test_the_marker_and_its_errors(run: Run) -> None:
    result = run("--strict-markers", test_marked=MARKED)
    result.assert_outcomes(passed=5, failed=1, errors=6)
    result.stdout.fnmatch_lines(
        [
            "marker opintercept: unknown option levels; choose from level, ops, engine, finite, hooks",
            "marker opintercept takes keyword arguments only, got ('function',)",
            "marker opintercept: level must be one of 'function', 'dispatch', got 'both'",
            "marker opintercept: *'bmmm'*",
            "marker opintercept: a hook must be an instance, got the class Recorder; pass Recorder(...)",
            "marker opintercept: finite must be True or False, got 'yes'",
            "*test_fails_without_the_fixture*",
            "*- matmuls -*",
            "what ran: 1 call, 48 FLOP",
        ]
    )


CASES = '''
import unittest

import pytest
import torch


def double(x):
    """Multiply.

    >>> import torch
    >>> op_calls = getfixture("op_calls")
    >>> double(torch.ones(2, 2)).sum().item()
    8.0
    >>> op_calls.expect(op="mm", count=1)
    """
    return x @ (torch.eye(2) * 2)


@pytest.mark.opintercept(level="function")
class Case(unittest.TestCase):
    def setUp(self):
        double(torch.ones(2, 2))

    def test_has_the_calls(self):
        double(torch.ones(2, 2))
        self.op_calls.expect(op="matmul", count=2)

    @pytest.mark.opintercept(level="dispatch")
    def test_fails(self):
        self.assertEqual(self.op_calls.filter(op="mm").count, 2)

    def test_fails_by_expectation(self):
        self.op_calls.expect(max_count=0)

    def test_fails_in_an_operator(self):
        double(torch.ones(2, 3))


class Plain(unittest.TestCase):
    def test_has_none_without_the_marker(self):
        double(torch.ones(2, 2))
        self.assertFalse(hasattr(self, "op_calls"))


class Async(unittest.IsolatedAsyncioTestCase):
    @pytest.mark.opintercept
    async def test_async_case(self):
        double(torch.ones(2, 2))
        self.op_calls.expect(op="mm", count=1)


@pytest.fixture(scope="module")
def trained(op_calls_factory):
    with op_calls_factory(level="function") as calls:
        double(torch.ones(2, 2))
    return calls


@pytest.fixture(scope="class")
def open_all_along(op_calls_factory):
    with op_calls_factory() as calls:
        yield calls
    assert calls.count == 3


def test_calls_of_a_module_fixture(trained):
    trained.expect(op="matmul", count=1)


class TestTogether:
    def test_one(self, open_all_along, trained, op_calls):
        double(torch.ones(2, 2))
        open_all_along.expect(count=1)
        trained.expect(count=1)
        op_calls.expect(count=1)

    def test_two(self, open_all_along):
        double(double(torch.ones(2, 2)))
        open_all_along.expect(count=3)
        open_all_along.match_snapshot()
'''


def test_test_cases_doctests_and_wider_fixtures(run: Run, pytester: pytest.Pytester) -> None:
    result = run("--doctest-modules", "--opintercept-update", test_cases=CASES)
    result.assert_outcomes(passed=7, failed=3)
    result.stdout.no_fnmatch_line("*_core/pipeline.py:*")
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: 1 != 2",
            "*- matmuls -*",
            "what ran: 1 call, 16 FLOP",
            "E*Failed: expected at most 0 matmul calls, got 1",
            "E*torch.Tensor.matmul*",
            "E*RuntimeError: *mat1 and mat2 shapes cannot be multiplied (2x3 and 2x2)",
        ]
    )
    (snapshot,) = (pytester.path / FOLDER).rglob("*.json")
    assert snapshot.relative_to(pytester.path).as_posix() == f"{FOLDER}/test_cases/TestTogether.test_two.json"


LEAKS = """
import threading

import pytest
import torch

from opintercept import hooks, intercept
from opintercept._blocks import outside

left = []


class Hook:
    def post(self, call): ...
    def exit(self): left.append("hook")


@pytest.fixture
def outer():
    with intercept(hooks.Recorder()) as interceptor:
        yield interceptor


@pytest.fixture
def forgets():
    intercept(Hook()).__enter__()


@pytest.fixture
def inside_of_itself(request):
    request.getfixturevalue("wider")


@pytest.fixture(scope="module")
def wider():
    with intercept(Hook()):
        yield


def test_leaks_a_block():
    intercept([Hook(), hooks.Print()]).__enter__()


@pytest.mark.parametrize("options", [{"level": "function"}, {"engine": "mode"}, {"threads": "all"}], ids=str)
def test_leaks(options, outer, op_calls):
    intercept(print, **options).__enter__()


def test_leaks_a_pause(outer):
    outer.paused().__enter__()


def test_leaks_from_another_thread():
    block = intercept(Hook(), threads="all")
    thread = threading.Thread(target=block.__enter__)
    thread.start()
    thread.join()


def test_leaks_and_fails(op_calls):
    intercept(Hook()).__enter__()
    torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def test_leaves_by_a_fixture(forgets):
    pass


def test_a_wider_fixture_may_stay(inside_of_itself):
    pass


def test_nothing_else_stays(op_calls):
    assert left == ["hook"] * 4
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    op_calls.expect(count=1)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert len(outside.PATCHES._users) == 2  # the block of `wider` and that of this test
"""


def test_a_forgotten_block_fails_the_test_that_entered_it(run: Run) -> None:
    result = run(test_leaks=LEAKS)
    result.assert_outcomes(passed=3, failed=7, errors=1)
    what = "{} was entered but never left; use a with statement (the plugin has left it now)"
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaves_by_a_fixture*",
            f"fixture forgets: {what.format('intercept(Hook)')}",
            "*test_leaks_a_block*",
            what.format("intercept(Hook, Print)"),
            *[line for _ in range(3) for line in ("*test_leaks[[]*", what.format("intercept(print)"))],
            "*test_leaks_a_pause*",
            what.format("intercept(Recorder).paused()"),
            "*test_leaks_from_another_thread*",
            what.format("intercept(Hook)"),
            "*test_leaks_and_fails*",
            "E*RuntimeError: *mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
            f"E*{what.format('intercept(Hook)')}",
        ]
    )


COUNTED = """
import pytest
import torch


@pytest.mark.parametrize("size", [2, 20])
def test_size(size):
    for _ in range(3):
        torch.mm(torch.ones(size, size), torch.ones(size, size))


def test_idle():
    pass


def test_function_level(op_calls):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2)) @ torch.ones(2, 2)
    op_calls.match_snapshot()
    op_calls.clear()
"""


def test_a_summary_of_the_run(run: Run, pytester: pytest.Pytester) -> None:
    result = run("--opintercept", "--opintercept-update", "--junitxml=run.xml", test_counted=COUNTED)
    result.assert_outcomes(passed=4)
    lines = [line.split() for line in result.outlines]
    start = next(i for i, line in enumerate(result.outlines) if re.fullmatch(r"=+ matmuls =+", line))
    assert lines[start + 1] == ["calls", "FLOP", "ms", "of", "test", "test"]
    rows = {line[-1]: line for line in lines[start + 2 : start + 5]}
    assert {name: row[:2] for name, row in rows.items()} == {
        "test_counted.py::test_size[2]": ["3", "48"],
        "test_counted.py::test_size[20]": ["3", "48,000"],
        "test_counted.py::test_function_level": ["2", "32"],
    }
    times = [float(row[2]) for row in lines[start + 2 : start + 5]]
    assert times == sorted(times, reverse=True)
    assert lines[start + 5][:2] == ["8", "48,080"]
    assert lines[start + 5][3:] == ["3", "tests", "with", "matmuls"]
    assert '<property name="matmul_flops" value="48000" />' in (pytester.path / "run.xml").read_text()


def test_a_long_summary_is_truncated(run: Run) -> None:
    many = COUNTED.replace("[2, 20]", "range(1, 31)")
    result = run("--opintercept", "--opintercept-update", test_counted=many)
    result.stdout.fnmatch_lines(["... and 11 more tests; -v shows them", "*31 tests with matmuls"])
    assert sum("%  test_counted.py::" in line for line in result.outlines) == 20
    result = run("--opintercept", "-v", test_counted=many)
    result.stdout.no_fnmatch_line("*more tests*")
    assert sum("%  test_counted.py::" in line for line in result.outlines) == 31


def test_without_options_nothing_is_printed(run: Run) -> None:
    result = run("--opintercept-update", test_counted=COUNTED)
    result.assert_outcomes(passed=4)
    result.stdout.no_fnmatch_line("*matmuls*")


NAN = """
import pytest
import torch


def forward(x):
    x = torch.mm(x, torch.eye(2))
    x = torch.mm(x * torch.inf, torch.tensor([[1.0, 1], [-1, -1]]))  # inf - inf
    return torch.mm(x, x)


def test_nan():
    forward(torch.ones(2, 2))


def test_sound():
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.opintercept(finite=False)
def test_means_it():
    forward(torch.ones(2, 2))


@pytest.mark.opintercept(finite=True)
def test_marked():
    forward(torch.ones(2, 2))
"""


@pytest.mark.parametrize(("options", "failed"), [((), 1), (("--opintercept-finite",), 2)], ids=["marker", "option"])
def test_a_test_fails_at_the_operator_that_makes_a_nan(run: Run, options: tuple[str, ...], failed: int) -> None:
    result = run(*options, test_nan=NAN)
    result.assert_outcomes(passed=4 - failed, failed=failed)
    result.stdout.fnmatch_lines([">*# inf - inf", "E*NonFiniteError: *"])
    result.stdout.fnmatch_lines(["*test_marked*", "*- matmuls -*", "what ran: 2 calls, 32 FLOP"])


ASYNC = """
import asyncio

import pytest
import torch


async def mm():
    await asyncio.sleep(0)
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.asyncio
async def test_tasks(op_calls):
    await asyncio.gather(mm(), mm())
    op_calls.expect(op="mm", count=2)
    with op_calls.block() as calls:
        await mm()
    calls.expect(count=1)


@pytest.mark.asyncio
async def test_fails(op_calls):
    await mm()
    op_calls.expect(count=2)


@pytest.mark.asyncio
@pytest.mark.opintercept(level="function")
async def test_marker():
    await mm()
    raise ValueError
"""


@asks_asyncio
def test_async_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_async=ASYNC)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    result = pytester.runpytest_inprocess("-p", "no:xdist")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["E*Failed: expected 2 matmul calls, got 1", "E*ValueError", "*- matmuls -*"])


XDIST = """
import pytest
import torch

BEFORE = torch._C._dispatch_dump_table("aten::mm")


@pytest.fixture(autouse=True)
def clean():
    yield
    assert torch._C._dispatch_dump_table("aten::mm") == BEFORE


@pytest.mark.parametrize("size", range(1, 5))
def test_size(op_calls, size):
    torch.mm(torch.ones(size, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()
    op_calls.match_snapshot()


def test_fails(op_calls):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert False
"""


@asks_xdist
def test_workers_report_and_write_snapshots(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_xdist=XDIST)
    options = ("-n2", "--opintercept", "--opintercept-update", "-p", "no:asyncio")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*- matmuls -*", "what ran: 1 call, 16 FLOP"])
    result.stdout.fnmatch_lines(["       9 *5 tests with matmuls"])
    folder = pytester.path / FOLDER / "test_xdist"
    assert sorted(path.name for path in folder.iterdir()) == [f"test_size[{size}].json" for size in range(1, 5)]
    (folder / "test_size[2].json").write_text((folder / "test_size[3].json").read_text().replace("[3]", "[2]"))
    (folder / "test_size[3].json").unlink()
    (folder / "test_size[4].json").write_text("<<<<<<< HEAD")
    result = run(test_xdist=XDIST)
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            "E *-forward - aten::mm float32[[]3, 2] @ float32[[]2, 2] -> float32[[]3, 2]",
            "E *+forward - aten::mm float32[[]2, 2] @ float32[[]2, 2] -> float32[[]2, 2]",
            "E *no snapshot __opcalls__/test_xdist/test_size[[]3].json; write it with *",
            "E *cannot read the snapshot *test_size[[]4].json: Expecting value*",
        ]
    )


def test_the_plugin_can_be_switched_off(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_without_the_plugin_nothing_is_loaded():
            assert not any(name.startswith("opintercept") for name in sys.modules)
            assert "torch" not in sys.modules

        def test_without_the_plugin_there_is_no_fixture(op_calls):
            raise AssertionError("never runs")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:opintercept")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["E*fixture 'op_calls' not found"])


def test_an_unused_plugin_loads_nothing_else(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        import pytest

        @pytest.fixture
        def fixture():
            yield

        def test_what_is_loaded(fixture):
            loaded = {name for name in sys.modules if name.partition(".")[0] in ("opintercept", "torch", "numpy")}
            version = {"opintercept._core", "opintercept._core.version"}
            assert loaded - version == {"opintercept", "opintercept.testing", "opintercept.testing.plugin"}
        """
    )
    pytester.runpytest_subprocess("-p", "no:anyio").assert_outcomes(passed=1)


def test_the_failure_in_the_guide_is_what_its_test_prints(run: Run) -> None:
    page = (ROOT / "docs" / "guides" / "test-matmuls.md").read_text()
    code, shown = re.findall(r"^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    run(test_step=code).assert_outcomes(passed=1)
    result = run(test_step=code.replace("nn.Linear(16, 4))", "nn.Linear(16, 4), nn.Linear(4, 4))"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([re.sub(r"([\[?*])", r"[\1]", line) for line in shown.splitlines()])


def test_other_threads_are_not_watched(op_calls: OpCalls) -> None:
    run_threads(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)))
    op_calls.expect(count=0)
