"""The pytest plugin: the fixture `op_calls`, its marker, and the summary of a test run.

Every pytest run loads this file where opintercept is installed. So it must not import torch, or the rest of the
package, before a test asks for it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from opintercept._blocks.intercept import Interceptor
    from opintercept.testing.calls import OpCalls as OpCalls
    from opintercept.testing.calls import Options
    from opintercept.testing.snapshot import Snapshots

_LIBRARY = "opintercept."
_MOST_TESTS = 20  # listed in the summary without -v


def __getattr__(name: str) -> Any:
    if name == "OpCalls":  # for annotations
        from opintercept.testing.calls import OpCalls

        return OpCalls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("opintercept", "the matmuls of tests")
    group.addoption("--opintercept", action="store_true", help="print calls, FLOP and time of matmuls for each test")
    group.addoption("--opintercept-finite", action="store_true", help="fail tests at the first matmul with a NaN")
    group.addoption("--opintercept-update", action="store_true", help="write snapshots instead of comparing them")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "opintercept(level, ops, engine, finite, hooks): how to watch the matmuls of the test's body; for each "
        "argument the closest marker that gives it counts",
    )


@pytest.fixture
def op_calls(request: pytest.FixtureRequest) -> OpCalls:
    """The matmuls that the test's body runs, forward and backward, as a sequence of records."""
    return _watch(request.node).record()


@pytest.fixture(scope="session")
def op_calls_factory(pytestconfig: pytest.Config) -> Callable[..., AbstractContextManager[OpCalls]]:
    """Like `op_calls.block`, for fixtures of a wider scope: `with op_calls_factory(...) as calls:`."""
    from opintercept.testing.calls import OpCalls

    return OpCalls([], snapshots=lambda: pytestconfig.stash[_RUNNING].snapshots()).block


class _TestWatch:
    """The interceptors of one test, which are active while its body runs, and the blocks that it leaves open."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._interceptors: list[Interceptor] = []
        self._body: ExitStack | None = None
        self._snapshots: Snapshots | None = None
        self._calls: OpCalls | None = None
        self.leaks: list[str] = []

    @property
    def watching(self) -> bool:
        """Whether the test is watched at all."""
        return bool(self._interceptors)

    def record(self) -> OpCalls:
        """Return the calls of the body: all of them, or those from now on if it is already running."""
        if self._calls is None:
            from opintercept.testing.calls import recording

            try:
                interceptor, self._calls = recording(self._options(), self.snapshots)
            except (TypeError, ValueError) as error:
                raise pytest.fail.Exception(f"marker opintercept: {error}", pytrace=False) from None
            self._add(interceptor)
        return self._calls

    def follow_the_command_line(self) -> None:
        """Watch the test as `--opintercept` and `--opintercept-finite` say."""
        option = self._item.config.option
        check = option.opintercept_finite and self._options().get("finite", True)
        if not (option.opintercept or check):
            return
        from opintercept._blocks.intercept import intercept
        from opintercept.hooks import NonFinite
        from opintercept.testing.calls import CostProperties

        if option.opintercept:
            self._add(intercept(CostProperties(self._item.user_properties)))
        if check:
            self._add(intercept(NonFinite()))

    def _options(self) -> Options:
        options: dict[str, Any] = {}
        for marker in self._item.iter_markers("opintercept"):  # the closest first
            if marker.args:
                raise pytest.fail.Exception(
                    f"marker opintercept takes keyword arguments only, got {marker.args!r}", pytrace=False
                )
            options = {**marker.kwargs, **options}
        return options  # type: ignore[return-value]

    def snapshots(self) -> Snapshots:
        """Return the snapshots of the test."""
        if self._snapshots is None:
            from opintercept.testing.snapshot import Snapshots

            item = self._item
            name = item.nodeid.partition("::")[2] or item.name
            self._snapshots = Snapshots(item.path, name, item.config.option.opintercept_update)
        return self._snapshots

    def _add(self, interceptor: Interceptor) -> None:
        self._interceptors.append(interceptor)
        if self._body is not None:
            self._body.enter_context(_watching(interceptor))

    def enter(self, body: ExitStack) -> None:
        """Start watching the body; closing `body` stops it."""
        self._body = body
        for interceptor in self._interceptors:
            body.enter_context(_watching(interceptor))
        unittest = sys.modules.get("unittest")
        if self._calls is not None and unittest is not None:
            case = getattr(self._item, "instance", None)
            if isinstance(case, unittest.TestCase):  # a TestCase takes no fixtures
                case.op_calls = self._calls

    def end(self, before: Container[Any]) -> str | None:
        """Leave the blocks that the body has left open, and return a message that names them."""
        self._body = None
        ours = {interceptor.watcher for interceptor in self._interceptors}
        return _forced_out(b for b in _open_blocks() if b not in before and b.watcher not in ours)

    def add_to(self, report: pytest.TestReport, failure: BaseException | None) -> None:
        """Add what ran to the report of a failing test."""
        if report.failed and report.when != "setup" and self._calls is not None:
            text = self._calls.report(failure)
            if text is not None:
                report.sections.append(("matmuls", text))


@contextmanager
def _watching(interceptor: Interceptor) -> Iterator[None]:
    """Watch a test, without the warning about calls in other threads."""
    interceptor.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a block saw no call")
            interceptor.__exit__(*sys.exc_info())


def _watch(item: pytest.Item) -> _TestWatch:
    watch = item.stash.get(_WATCH, None)
    if watch is None:
        watch = item.stash[_WATCH] = _TestWatch(item)
    return watch


_WATCH = pytest.StashKey[_TestWatch]()
_RUNNING = pytest.StashKey[_TestWatch]()
_HELD = pytest.StashKey[dict[Any, list[Any]]]()  # the blocks that each fixture has entered


def _open_blocks() -> tuple[Any, ...]:
    library = sys.modules.get("opintercept._blocks.blocks")
    if library is None:
        return ()
    return tuple(block for block in library.open_blocks() if block.watcher not in library.of_programs)


def _forced_out(blocks: Iterable[Any]) -> str | None:
    forgotten = list(blocks)
    if not forgotten:
        return None
    from opintercept._blocks.blocks import force_out

    return (
        f"{', '.join(force_out(forgotten))} was entered but never left; use a with statement (the plugin has left it "
        "now)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Prepare to watch the test as its marker and the command line say."""
    watch = item.stash[_WATCH] = item.config.stash[_RUNNING] = _TestWatch(item)  # a new one: a test may run again
    if item.get_closest_marker("opintercept") is not None:
        watch.record()
    if item.config.option.opintercept or item.config.option.opintercept_finite:
        watch.follow_the_command_line()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch the body."""
    watch, before = _watch(item), _open_blocks()
    with ExitStack() as body:
        watch.enter(body)
        try:
            result = yield
        except BaseException as failure:
            if leaked := watch.end(before):
                failure.add_note(leaked)
            raise
        if leaked := watch.end(before):
            pytest.fail(leaked, pytrace=False)
        return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
    """Note which blocks a fixture enters, to check its teardown."""
    before = _open_blocks()
    try:
        return (yield)
    finally:
        if entered := [block for block in _open_blocks() if block not in before]:
            held = request.config.stash.setdefault(_HELD, {})
            others = {id(block) for blocks in held.values() for block in blocks}
            held[fixturedef] = [block for block in entered if id(block) not in others]


def pytest_fixture_post_finalizer(fixturedef: Any, request: Any) -> None:
    """Leave the blocks that a fixture has entered and its teardown has left open."""
    entered = request.config.stash.get(_HELD, {}).pop(fixturedef, ())
    if entered and (leaked := _forced_out(block for block in _open_blocks() if block in entered)):
        request.config.stash[_RUNNING].leaks.append(f"fixture {fixturedef.argname}: {leaked}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail if a fixture has left a block open."""
    result = yield
    if leaks := _watch(item).leaks:
        pytest.fail("\n".join(leaks), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what ran to the report of a failing test, and hide our frames in its traceback."""
    watch = _watch(item)
    modules = tuple(sys.modules.items()) if watch.watching else ()
    library = [vars(module) for name, module in modules if name.startswith(_LIBRARY)]
    for namespace in library:
        namespace["__tracebackhide__"] = True  # pytest looks for this in a frame's globals too
    try:
        report = yield
    finally:
        for namespace in library:
            namespace.pop("__tracebackhide__", None)
    watch.add_to(report, None if call.excinfo is None else call.excinfo.value)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the matmuls of the run by test, starting with the tests that spent most time in them."""
    if not config.option.opintercept:
        return
    rows = []
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        found = dict(report.user_properties) if getattr(report, "when", None) == "call" else {}
        if found.get("matmul_calls"):
            rows.append((found["matmul_seconds"], found["matmul_calls"], found["matmul_flops"], report))
    rows.sort(key=lambda row: row[0], reverse=True)
    terminalreporter.section("matmuls")
    terminalreporter.write_line(f"{'calls':>8}{'FLOP':>20}{'ms':>10}{'of test':>9}  test")
    for seconds, calls, flops, report in rows if config.option.verbose > 0 else rows[:_MOST_TESTS]:
        share = seconds / report.duration if report.duration else 0.0
        terminalreporter.write_line(f"{calls:8,}{flops:20,}{seconds * 1e3:10.2f}{share:9.1%}  {report.nodeid}")
    hidden = 0 if config.option.verbose > 0 else len(rows) - _MOST_TESTS
    if hidden > 0:
        terminalreporter.write_line(f"... and {hidden} more tests; -v shows them")
    seconds, calls, flops = (sum(row[i] for row in rows) for i in range(3))
    terminalreporter.write_line(f"{calls:8,}{flops:20,}{seconds * 1e3:10.2f}           {len(rows)} tests with matmuls")
