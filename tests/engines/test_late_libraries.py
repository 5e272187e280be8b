"""Operators and functions that come while a block is open: seen or told from their first call, as those before it."""

from __future__ import annotations

import gc
import itertools
import os
import shlex
import subprocess
import sys
import sysconfig
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiler import BELOW_FUNCTIONS, COMPILED, needs_compiler
from processes import run_python

from opintercept import OpInterceptWarning, hooks, intercept, register_op
from opintercept._engines import arrivals
from opintercept._engines.kernels import KERNELS

A, B = torch.randn(4, 8), torch.randn(8, 6)
NUMBERS = itertools.count()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(a.numpy().dot(b.numpy()))  # without the dispatcher


class Library:
    """A library with one operator, under a name of its own: a warning is told once in a process."""

    def __init__(self, short: str = "gemm") -> None:
        self.short = f"{short}_{next(NUMBERS)}"
        self.name = f"late_tests::{self.short}"
        self._library: Any = None

    def load(self, schema: str = "(Tensor a, Tensor b) -> Tensor", function: Callable[..., Any] = product) -> None:
        self._library = torch.library.Library("late_tests", "FRAGMENT")
        self._library.define(f"{self.short}{schema}")
        self._library.impl(self.short, function, "CPU")

    def implement(self, function: Callable[..., Any], key: str) -> None:
        self._library.impl(self.short, function, key)

    def destroy(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None

    def delete(self) -> None:
        self._library = None
        gc.collect()

    def __call__(self, *args: Any) -> Any:
        return getattr(torch.ops.late_tests, self.short)(*args)


@pytest.fixture
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.destroy()


@pytest.fixture(params=BELOW_FUNCTIONS)
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test after which torch or Python has still something of ours."""
    before = (*vars(torch.library.Library).items(), *sys.meta_path)
    kernels = set(torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect"))
    yield
    assert (*vars(torch.library.Library).items(), *sys.meta_path) == before
    assert set(torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect")) == kernels
    assert not arrivals._users  # noqa: SLF001
    assert not KERNELS.installed


def ops(recorder: hooks.Recorder) -> list[str]:
    return [record.op for record in recorder.records]


@pytest.mark.parametrize("watched", ["matmul", ("matmul", "convolution"), "all", ("all", "matmul")])
def test_a_declared_operator_is_seen_from_its_first_call(engine: Any, library: Library, watched: Any) -> None:
    with register_op(library.name, lhs="a", rhs="b"), intercept(recorder := hooks.Recorder(), ops=watched, **engine):
        library.load()
        result = library(A, B)
    assert torch.equal(result, product(A, B))
    (record,) = recorder.records
    assert (record.op, record.gemm and record.gemm[:4]) == (library.name, (1, 4, 6, 8))


def test_a_declaration_in_the_block_holds_at_once(engine: Any, library: Library) -> None:
    with intercept(recorder := hooks.Recorder(), **engine) as interceptor:
        library.load()
        with register_op(library.name, lhs="a", rhs="b"):
            library(A, B)
    assert ops(recorder) == [library.name]
    assert interceptor.opaque == {}


def test_a_declared_operator_is_seen_at_function_level(library: Library) -> None:
    def called(enter_first: bool) -> list[Any]:
        with register_op(library.name, lhs="a", rhs="b"):
            if not enter_first:
                library.load()
            with intercept(recorder := hooks.Recorder(), level="function"):
                if enter_first:
                    library.load()
                getattr(torch.ops.late_tests, library.short).default(A, B)
        library.destroy()
        return [(record.op, record.gemm) for record in recorder.records]

    assert called(enter_first=True) == called(enter_first=False) != []


def test_an_undeclared_product_is_told_at_its_first_call(engine: Any, library: Library) -> None:
    with intercept(hooks.Recorder(), **engine) as interceptor:
        library.load()
        with pytest.warns(OpInterceptWarning, match=f'register_op."{library.name}", lhs="a", rhs="b", layout="kn"'):
            library(A, B)
        library(A, B)
    assert interceptor.opaque == {library.name: 2}


@pytest.mark.parametrize("watched", ["all", ("all", "-matmul"), ("all", "-view")])
def test_every_operator_includes_late_ones(engine: Any, watched: Any) -> None:
    other = Library("twice")
    with intercept(recorder := hooks.Recorder(), ops=watched, **engine):
        other.load("(Tensor x) -> Tensor", lambda x: torch.from_numpy(x.numpy() * 2))
        other(A)
    assert ops(recorder) == [other.name]
    other.destroy()


@pytest.mark.parametrize("watched", ["matmul", "norm"])
def test_a_late_operator_of_no_watched_family_gets_no_kernel(watched: str, library: Library) -> None:
    with intercept(recorder := hooks.Recorder(), ops=watched, engine="kernel"):
        other = Library("twice")
        other.load("(Tensor x) -> Tensor", lambda x: x.clone())
        assert other.name not in KERNELS.installed
        other(A)
        other.destroy()
    assert ops(recorder) == []


def test_a_family_that_is_left_out_leaves_out_late_ones(engine: Any, library: Library) -> None:
    with (
        register_op(library.name, lhs="a", rhs="b"),
        intercept(recorder := hooks.Recorder(), ops=("all", "-matmul"), **engine),
    ):
        library.load()
        library(A, B)
    assert library.name not in ops(recorder)


def test_an_overload_that_comes_later_of_a_named_operator_is_seen(engine: Any, library: Library) -> None:
    library.load()
    more = torch.library.Library("late_tests", "FRAGMENT")
    with intercept(recorder := hooks.Recorder(), ops=library.name, **engine):
        more.define(f"{library.short}.scaled(Tensor a, Tensor b, float scale) -> Tensor")
        more.impl(f"{library.short}.scaled", lambda a, b, scale: product(a, b) * scale, "CPU")
        library(A, B, 2.0)
        library(A, B)
    assert ops(recorder) == [library.name] * 2
    more._destroy()


def made_by_custom_op(name: str) -> Callable[..., Any]:
    @torch.library.custom_op(name, mutates_args=())
    def made(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b)

    return made


def made_by_triton_op(name: str) -> Callable[..., Any]:
    @torch.library.triton_op(name, mutates_args={})
    def made(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b)

    return made  # type: ignore[no-any-return]


def made_by_functions(name: str) -> Callable[..., Any]:
    torch.library.define(name, "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl(name, "cpu")(product)
    return getattr(torch.ops.late_tests, name.partition("::")[2])  # type: ignore[no-any-return]


def made_in_reverse(name: str) -> Callable[..., Any]:
    """The kernel first, as where a library in C++ brings the kernels of another one."""
    short = name.partition("::")[2]
    kernels, definition = (torch.library.Library("late_tests", kind) for kind in ("IMPL", "FRAGMENT"))
    torch.library._keep_alive += [kernels, definition]
    kernels.impl(short, product, "CPU")
    definition.define(f"{short}(Tensor a, Tensor b) -> Tensor")
    return getattr(torch.ops.late_tests, short)  # type: ignore[no-any-return]


MAKERS = [made_by_custom_op, made_by_triton_op, made_by_functions, made_in_reverse]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("watched", ["matmul", "all"])
def test_whatever_defines_an_operator_in_python(engine: Any, make: Any, watched: str) -> None:
    if make is made_by_triton_op and not hasattr(torch.library, "triton_op"):
        pytest.skip("this torch has no triton_op")
    name = Library(make.__name__).name
    with register_op(name, lhs="a", rhs="b"), intercept(recorder := hooks.Recorder(), ops=watched, **engine):
        result = make(name)(A, B)
    assert torch.equal(result, product(A, B))
    (record,) = recorder.records
    assert (record.op, record.gemm and record.gemm[:4]) == (name, (1, 4, 6, 8))


@pytest.mark.parametrize("ops", ["matmul", "all"])
@pytest.mark.parametrize("how", ["destroy", "delete"])
def test_an_operator_that_is_defined_again_is_seen(engine: Any, library: Library, how: str, ops: str) -> None:
    if how == "delete" and not hasattr(torch.library, "_clear_torch_ops_cache"):
        pytest.skip("this torch keeps the operators of a deleted library, and crashes when a program calls them")
    recorder, results = hooks.Recorder(), []
    with (
        warnings.catch_warnings(action="error"),
        register_op(library.name, lhs="a", rhs="b"),
        intercept(recorder, ops=ops, **engine),
    ):
        for factor in (1.0, 2.0, 3.0):
            library.load("(Tensor b, float f, Tensor a) -> Tensor", lambda b, f, a: product(a.add(f), b))
            results.append((library(B, factor, A), factor))
            getattr(library, how)()
            library.load()
            results.append((library(A, B), 0.0))
            getattr(library, how)()
    assert all(torch.equal(result, product(A + added, B)) for result, added in results)
    assert ops_and_shapes(recorder) == [(library.name, (4, 8), (8, 6))] * 6


def ops_and_shapes(recorder: hooks.Recorder) -> list[Any]:
    return [(r.op, r.lhs and tuple(r.lhs.shape), r.rhs and tuple(r.rhs.shape)) for r in recorder.records]


@pytest.mark.parametrize("engine", [*BELOW_FUNCTIONS[:1], COMPILED])
def test_no_kernel_stays_on_a_dead_operator(engine: Any, library: Library) -> None:
    with register_op(library.name, lhs="a", rhs="b"), intercept(hooks.Recorder(), **engine):
        library.load()
        assert torch._C._dispatch_has_kernel_for_dispatch_key(library.name, "BackendSelect")
        assert library.name in KERNELS.installed
        library.destroy()
        assert library.name not in KERNELS.installed
        with pytest.raises(RuntimeError, match=library.short):  # torch has forgotten the name
            torch._C._dispatch_has_kernel_for_dispatch_key(library.name, "BackendSelect")
        A @ B


def test_a_library_that_goes_from_under_two_blocks(engine: Any, library: Library) -> None:
    outer, inner = hooks.Recorder(), hooks.Recorder()
    with register_op(library.name, lhs="a", rhs="b"), intercept(outer, **engine):
        library.load()
        with intercept(inner, ops="all", **engine):
            library(A, B)
            library.destroy()
            library.load()
            library(A, B)
        library(A, B)
    assert (ops(outer), ops(inner)) == ([library.name] * 3, [library.name] * 2)


def test_a_block_of_products_beside_one_of_everything(engine: Any, library: Library) -> None:
    products, every = hooks.Recorder(), hooks.Recorder()
    other = Library("twice")
    with intercept(products, **engine) as looking, intercept(every, ops="all", **engine):
        library.load()
        other.load("(Tensor x) -> Tensor", lambda x: torch.from_numpy(x.numpy() * 2))
        with pytest.warns(OpInterceptWarning, match=library.name):
            library(A, B)
        other(A)
    other.destroy()
    assert ops(products) == []
    assert looking.opaque == {library.name: 1}
    assert ops(every) == [library.name, other.name]


def test_blocks_of_all_engines_beside_each_other(library: Library) -> None:
    recorders = [hooks.Recorder() for _ in range(3)]
    with (
        register_op(library.name, lhs="a", rhs="b"),
        intercept(recorders[0], engine="kernel"),
        intercept(recorders[1], engine="mode"),
        intercept(recorders[2], level="function"),
    ):
        library.load()
        getattr(torch.ops.late_tests, library.short).default(A, B)
    assert [ops(recorder) for recorder in recorders] == [[library.name]] * 3


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_another_thread_may_bring_it(engine: Any, library: Library) -> None:
    with register_op(library.name, lhs="a", rhs="b"), intercept(recorder := hooks.Recorder(), **engine):
        in_thread(library.load)
        library(A, B)
    assert ops(recorder) == [library.name]


@pytest.mark.parametrize("engine", [*BELOW_FUNCTIONS[:1], COMPILED])
def test_a_block_for_all_threads_sees_what_a_thread_brings_and_calls(engine: Any, library: Library) -> None:
    def body() -> None:
        library.load()
        library(A, B)

    with register_op(library.name, lhs="a", rhs="b"), intercept(recorder := hooks.Recorder(), threads="all", **engine):
        in_thread(body)
    assert ops(recorder) == [library.name]


def test_many_threads_bring_operators_while_others_run(engine: Any) -> None:
    libraries = [Library() for _ in range(24)]
    recorder, done = hooks.Recorder(), threading.Event()

    def work() -> None:
        while not done.is_set():
            assert (A @ B).shape == (4, 6)

    with intercept(recorder, ops="all", **engine):
        workers = [threading.Thread(target=work) for _ in range(2)]
        loaders = [
            threading.Thread(target=lambda mine=libraries[i::3]: [each.load() for each in mine]) for i in range(3)
        ]
        for thread in (*workers, *loaders):
            thread.start()
        for thread in loaders:
            thread.join()
        done.set()
        for thread in workers:
            thread.join()
        for each in libraries:
            each(A, B)
    assert ops(recorder) == [each.name for each in libraries]
    for each in libraries:
        each.destroy()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_child_has_blocks_and_libraries_of_its_own(engine: Any) -> None:
    code = f"""
        import os, torch
        from opintercept import hooks, intercept, register_op
        register_op("late_fork::gemm", lhs="a", rhs="b")
        parent, options = hooks.Recorder(), {engine!r}

        def load():
            lib = torch.library.Library("late_fork", "DEF")
            lib.define("gemm(Tensor a, Tensor b) -> Tensor")
            lib.impl("gemm", lambda a, b: torch.from_numpy(a.numpy().dot(b.numpy())), "CPU")
            return lib

        a, b = torch.ones(2, 3), torch.ones(3, 4)
        with intercept(parent, **options):
            if not (pid := os.fork()):
                with intercept(child := hooks.Recorder(), **options):
                    kept = load()
                    torch.ops.late_fork.gemm(a, b)
                print("child", [r.op for r in child.records], len(parent.records), flush=True)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            kept = load()
            torch.ops.late_fork.gemm(a, b)
        print("parent", [r.op for r in parent.records])
        """
    done = run_python("-c", textwrap.dedent(code), check=True)
    assert done.stdout.splitlines() == ["child ['late_fork::gemm'] 0", "parent ['late_fork::gemm']"]


def test_a_body_that_is_suspended_sees_what_came_meanwhile(engine: Any, library: Library) -> None:
    recorder = hooks.Recorder()

    @intercept(recorder, **engine)
    def body() -> Iterator[None]:
        yield
        library(A, B)
        library.destroy()
        library.load()
        yield
        library(A, B)

    with register_op(library.name, lhs="a", rhs="b"):
        steps = body()
        next(steps)
        library.load()
        next(steps)
        assert list(steps) == []
    assert ops(recorder) == [library.name] * 2


def test_a_hook_may_bring_operators(engine: Any, library: Library) -> None:
    def bring(call: Any) -> None:
        if call.op == "aten::mm":
            library.load()
            library(A, B)  # what a hook runs is not seen

    with register_op(library.name, lhs="a", rhs="b"), intercept([recorder := hooks.Recorder(), bring], **engine):
        A @ B
        library(A, B)
    assert ops(recorder) == ["aten::mm", library.name]


def test_other_kernels_where_ours_would_go(engine: Any) -> None:
    """A custom operator without tensors chooses its device there."""
    with warnings.catch_warnings(action="error"), intercept(recorder := hooks.Recorder(), ops="all", **engine):

        @torch.library.custom_op(name := Library("made").name, mutates_args=(), device_types="cpu")
        def made(device: torch.device) -> torch.Tensor:
            return torch.from_numpy(A.numpy())

        result = made(torch.device("cpu"))
    made._lib._destroy()
    assert torch.equal(result, A)
    assert (name in ops(recorder)) is (engine.get("engine") == "mode")


def test_a_declared_operator_that_cannot_be_watched_is_told(library: Library) -> None:
    with register_op(library.name, lhs="a", rhs="b"), intercept(recorder := hooks.Recorder(), engine="kernel"):
        library.load()
        with pytest.warns(OpInterceptWarning, match=f"BackendSelect must be free, got .* for {library.name}") as told:
            library.implement(product, "BackendSelect")
        assert torch.equal(library(A, B), product(A, B))
        Library().load()
    assert len(told) == 1
    assert ops(recorder) == []


def test_an_operator_that_a_block_names_and_loses_is_told(library: Library) -> None:
    library.load()
    with intercept(recorder := hooks.Recorder(), ops=library.name, engine="kernel"):
        library(A, B)
        with pytest.warns(OpInterceptWarning, match=f"blocks do not see {library.name} from now on: a kernel of other"):
            library.implement(product, "BackendSelect")
        assert torch.equal(library(A, B), product(A, B))
    assert ops(recorder) == [library.name]


@pytest.mark.parametrize("engine", ["kernel", pytest.param("compiled", marks=needs_compiler)])
def test_an_operator_of_torch_that_comes_late_gives_no_warning(engine: Any) -> None:
    with intercept(hooks.Recorder(), ops="all", engine=engine), warnings.catch_warnings():
        warnings.simplefilter("error")
        late = torch.library.Library("prims", "FRAGMENT")
        late.define("opintercept_comes_late(int seed) -> Tensor")  # as Inductor's `inductor_seed`
        late.impl("opintercept_comes_late", lambda seed: torch.tensor(seed), "BackendSelect")
        assert torch.ops.prims.opintercept_comes_late(3).item() == 3
    late._destroy()


def test_a_definition_that_fails_leaves_all_as_it_was(library: Library) -> None:
    with register_op(library.name, lhs="a", rhs="b"), intercept(recorder := hooks.Recorder(), engine="kernel"):
        library.load()
        with pytest.raises(RuntimeError, match="Tried to register an operator"):
            library._library.define(f"{library.short}(Tensor a, Tensor b) -> Tensor")
        with pytest.raises(RuntimeError, match="either a name or an OpOverload object"):
            library._library.impl(3, product, "CPU")
        library(A, B)
    assert ops(recorder) == [library.name]


def test_what_was_kept_of_a_block_does_nothing_after_it(library: Library) -> None:
    with intercept(hooks.Recorder(), engine="kernel"):
        kept: Any = torch.library.Library.impl
    made = torch.library.Library("late_tests", "FRAGMENT")
    made.define(f"{library.short}(Tensor a, Tensor b) -> Tensor")
    kept(made, library.short, product, "CPU")
    assert torch.equal(library(A, B), product(A, B))
    made._destroy()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes modules, which the test may import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, code: str) -> None:
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(code)

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("late_"):
            del sys.modules[name]


FUNCTION = "def gemm(a, b): return a @ b\n"


@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_a_function_of_a_module_that_is_imported_in_the_block(modules: Any, level: Any) -> None:
    modules("late_functions.gemms", FUNCTION)
    modules("late_functions.user", "from late_functions.gemms import gemm\ndef run(a, b): return gemm(a, b)\n")
    with (
        register_op("late_functions.gemms:gemm", lhs="a", rhs="b"),
        intercept(recorder := hooks.Recorder(), level=level),
    ):
        from late_functions import gemms, user  # type: ignore[import-not-found]

        user.run(A, B)
        gemms.gemm(A, B)
    assert ops(recorder) == ["late_functions.gemms:gemm"] * 2
    assert user.gemm is gemms.gemm
    assert "opintercept" not in gemms.gemm.__code__.co_filename
    assert vars(gemms.__spec__.loader).keys() == vars(user.__spec__.loader).keys()


def test_a_function_that_is_declared_after_its_module_came(modules: Any) -> None:
    modules("late_plain", FUNCTION)
    with intercept(recorder := hooks.Recorder()):
        import late_plain  # type: ignore[import-not-found]

        with register_op(late_plain.gemm, lhs="a", rhs="b"):
            late_plain.gemm(A, B)
    assert ops(recorder) == ["late_plain:gemm"]


def test_a_module_that_fails_to_import_fails_as_without_us(modules: Any) -> None:
    modules("late_broken", "raise ImportError('broken')")
    with register_op("late_broken:gemm", lhs="a", rhs="b"), intercept(recorder := hooks.Recorder()):
        for _ in range(2):
            with pytest.raises(ImportError, match="broken"):
                import late_broken  # type: ignore[import-not-found]  # noqa: F401
        modules("late_broken", FUNCTION + "# of another size\n")
        import late_broken as mended

        mended.gemm(A, B)
    assert ops(recorder) == ["late_broken:gemm"]


def test_another_finder_may_ask_all_of_them_too(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            others = (finder for finder in sys.meta_path if finder is not self)
            return next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)

    modules("late_asked", FUNCTION)
    with register_op("late_asked:gemm", lhs="a", rhs="b"), intercept(recorder := hooks.Recorder()):
        for place in (0, 1):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "meta_path", [*sys.meta_path[:place], Finder(), *sys.meta_path[place:]])
                importlib_import("late_asked").gemm(A, B)
            del sys.modules["late_asked"]
    assert ops(recorder) == ["late_asked:gemm"] * 2


def test_a_pack_of_functions_comes_with_its_library(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls as in a block that is entered later."""
    code = "def general_gemm(A, B, layout='TN', out=None, bias=None):\n    return (B @ A.T,)\n"
    package = "transformer_engine.pytorch.cpp_extensions"
    modules(f"{package}.gemm", code)
    weight = torch.randn(6, 8)
    seen = []
    for when in ("before", "after"):
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            monkeypatch.delitem(sys.modules, name)
        with warnings.catch_warnings(action="ignore", category=OpInterceptWarning):
            if when == "after":
                importlib_import(f"{package}.gemm")
            with intercept(recorder := hooks.Recorder()):
                gemm = importlib_import(f"{package}.gemm")
                gemm.general_gemm(weight, A)
        seen.append([(r.op, r.gemm) for r in recorder.records])
    assert seen[0] == seen[1]
    assert [op for op, _ in seen[0]] == [f"{package}.gemm:general_gemm"]
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)


def importlib_import(name: str) -> ModuleType:
    __import__(name)
    return sys.modules[name]


SOURCE = """
#include <ATen/ops/zeros.h>  // and not all of ATen, which takes seconds
#include <torch/library.h>
at::Tensor gemm(const at::Tensor& a, const at::Tensor& b) {  // without the dispatcher
  auto c = at::zeros({a.size(0), b.size(1)});
  auto x = a.accessor<float, 2>(), y = b.accessor<float, 2>(), z = c.accessor<float, 2>();
  for (int64_t i = 0; i < c.size(0); i++)
    for (int64_t j = 0; j < c.size(1); j++)
      for (int64_t k = 0; k < a.size(1); k++) z[i][j] += x[i][k] * y[k][j];
  return c;
}
"""
DEFINITION = 'TORCH_LIBRARY(late_cpp, m) { m.def("scaled_gemm(Tensor a, Tensor b) -> Tensor"); }'
KERNEL = 'TORCH_LIBRARY_IMPL(late_cpp, CPU, m) { m.impl("scaled_gemm", gemm); }'
MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "late_extension"};
PyMODINIT_FUNC PyInit_late_extension() { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Libraries in C++: one that is an extension module too, one that defines, and one that has the kernels of that."""
    folder = tmp_path_factory.mktemp("late_cpp")
    compiler, torchs = shlex.split(os.environ.get("CXX", "c++")), Path(torch.__file__).parent
    includes = [f"-isystem{path}" for path in (torchs / "include", sysconfig.get_path("include", "posix_prefix"))]

    def run(*arguments: str) -> None:
        subprocess.run([*compiler, *arguments], cwd=folder, check=True)

    # Each part is compiled once: the headers of torch take the compiler five seconds.
    parts = {"definition": "#include <torch/library.h>\n" + DEFINITION, "kernel": SOURCE + KERNEL, "module": MODULE}
    for name, source in parts.items():
        (folder / f"{name}.cpp").write_text(source)
        run("-O0", "-std=c++20", "-fPIC", *includes, "-c", f"{name}.cpp")
    libraries = {"late_extension": [*parts], "late_definition": ["definition"], "late_kernel": ["kernel"]}
    for name, its in libraries.items():
        objects = [f"{part}.o" for part in its]
        run("-shared", *objects, f"-L{torchs / 'lib'}", "-lc10", "-ltorch_cpu", "-o", f"{name}.so")
    return {name: str(folder / f"{name}.so") for name in libraries}


LOADS = {
    "load_library": "torch.ops.load_library({late_extension!r})",
    "ctypes": "import ctypes; ctypes.CDLL({late_extension!r})",
    "import": "import os, sys; sys.path.insert(0, os.path.dirname({late_extension!r})); import late_extension",
    "in_two": "torch.ops.load_library({late_definition!r}); torch.ops.load_library({late_kernel!r})",
    "in_a_thread": "import threading as t; load = t.Thread(target=torch.ops.load_library, args=({late_extension!r},)); "
    "load.start(); load.join()",
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("options", ['engine="kernel"', 'engine="compiled"', 'engine="mode"'])
def test_a_library_in_cpp(built: dict[str, str], load: str, options: str) -> None:
    code = f"""
        import torch, warnings
        from opintercept import hooks, intercept, register_op
        a, b = torch.randn(2, 3), torch.randn(3, 4)
        declared, every = hooks.Recorder(), hooks.Recorder()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with intercept(declared, {options}) as products, intercept(every, {options}, ops="all"):
        {textwrap.indent(LOADS[load].format(**built), " " * 8)}
                torch.ops.late_cpp.scaled_gemm(a, b)
                register_op("late_cpp::scaled_gemm", lhs="a", rhs="b")
                torch.ops.late_cpp.scaled_gemm(a, b)
        print(products.opaque)
        print([r.op for r in every.records if "late" in r.op], [(r.op, str(r.gemm)) for r in declared.records])
        print(["late_cpp::scaled_gemm looks like" in str(w.message) for w in told if "late_cpp" in str(w.message)])
        """
    done = run_python("-c", textwrap.dedent(code), timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "{'late_cpp::scaled_gemm': 1}",
        "['late_cpp::scaled_gemm', 'late_cpp::scaled_gemm'] [('late_cpp::scaled_gemm', '[2, 3] @ [3, 4]')]",
        "[True]",
    ]


FOLDERS = [str(Path(__file__).parents[1] / folder) for folder in ("ops/packs", "helpers")]


@pytest.mark.slow
@pytest.mark.parametrize("watched", ["matmul", "all"])
def test_the_operators_of_packs_are_those_of_a_block_that_is_entered_later(engine: Any, watched: str) -> None:
    def calls(late: bool) -> list[str]:
        code = f"""
            import sys
            sys.path[:0] = {FOLDERS!r}
            from contextlib import nullcontext
            from test_schemas import CASES, operator
            from opintercept import hooks, intercept
            block = intercept(recorder := hooks.Recorder(), ops={watched!r}, **{engine!r})
            with block if {late} else nullcontext():
                found = [operator(case) for case in CASES]
                with nullcontext() if {late} else block:
                    for case, call in zip(CASES, found):
                        call(*case.given().values())
            for record in recorder.records:
                print(record.op, record.lhs, record.rhs, record.gemm, record.flops)
            print(block.opaque)
            """
        return run_python("-W", "ignore", "-c", textwrap.dedent(code), check=True).stdout.splitlines()

    late = calls(late=True)
    assert late == calls(late=False)
    assert len(late) > 70


PROGRAM = """
import torch
lib = torch.library.Library("latelib", "DEF")
lib.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
lib.impl("onednn_mm", lambda a, b: torch.from_numpy(a.numpy().dot(b.numpy())), "CPU")
lib.define("fused_gemm_mystery(Tensor a, Tensor b) -> Tensor")
lib.impl("fused_gemm_mystery", lambda a, b: torch.from_numpy(a.numpy().dot(b.numpy())), "CPU")
a, b = torch.randn(4, 8), torch.randn(8, 6)
torch.ops.latelib.onednn_mm(a, b); torch.ops.latelib.fused_gemm_mystery(a, b); a @ b
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["kernel", "mode", pytest.param("compiled", marks=needs_compiler)])
def test_a_program_under_opintercept_run(tmp_path: Path, engine: str) -> None:
    program = tmp_path / "late.py"
    program.write_text(PROGRAM)
    run = ("-m", "opintercept", "run", "--engine", engine)
    done = run_python("-W", "default", *run, program, check=True)
    assert "opintercept: 1 call," in done.stderr
    opaque = "opaque (matmuls inside are not shown): latelib::onednn_mm x1, latelib::fused_gemm_mystery x1"
    assert opaque in done.stderr
    program.write_text(
        f"from opintercept import register_op\nregister_op('latelib::onednn_mm', lhs='a', rhs='b')\n{PROGRAM}"
    )
    done = run_python(*run, program, check=True)
    assert "opintercept: 2 calls," in done.stderr
    assert "latelib::onednn_mm" in done.stderr
    done = run_python(*run, "--hooks", "print", "--ops", "all", program, check=True)
    assert "latelib::fused_gemm_mystery" in done.stderr
