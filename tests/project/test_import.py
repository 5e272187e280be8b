"""What importing the package costs, and which names are public."""

from __future__ import annotations

import ast
import functools
import importlib.resources
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from sources import SOURCES, file_of, private

import opintercept

PRIVATE = re.compile(
    r"torch\._(?:C|dynamo|subclasses|guards|functorch|inductor)\b|_python_dispatch|from torch import _"
)


def imports_torch(code: str) -> bool:
    """Whether a fresh interpreter that has run `code` has torch."""
    probe = f"{code}\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return {"True": True, "False": False}[done.stdout.strip()]


def statements(body: list[ast.stmt], functions: bool) -> Iterator[ast.stmt]:
    """The statements of a module except those under TYPE_CHECKING, with those in functions if `functions`."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and not functions:
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from statements(statement.orelse, functions)
            continue
        yield statement
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, part, []), functions)
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body, functions)


def imported(source: str, functions: bool = False) -> set[str]:
    """What a module imports: files of the package as paths, other modules as their top-level name."""
    names: set[str] = set()
    for statement in statements(ast.parse(source).body, functions):
        if isinstance(statement, ast.Import):
            names.update(alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "relative import"
            inner = {f"{statement.module}.{alias.name}" for alias in statement.names}
            names.update({name if file_of(name) in SOURCES else str(statement.module) for name in inner})
    return {file_of(name) if name.partition(".")[0] == "opintercept" else name.partition(".")[0] for name in names}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@functools.cache
def private_names_of_classes(source: str) -> set[str]:
    """The private methods and attributes that a file's classes define."""
    found: set[str] = set()
    for kind in ast.walk(ast.parse(source)):
        if not isinstance(kind, ast.ClassDef):
            continue
        for statement in kind.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(statement.name)
            elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
                found.update(str(node.value) for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node in kind.body:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in found if private(name)}


# Names that both objects of torch, or named tuples, and some class of the package have.
OF_OTHERS = {"_make", "_modules", "_name", "_overloadname", "_schema", "_values"}


def reads_private(name: str, source: str) -> list[str]:
    """The private names of other files that a file imports or reads."""
    own = private_names_of_classes(source)
    others = set().union(*(private_names_of_classes(text) for other, text in SOURCES.items() if other != name))
    others -= own | OF_OTHERS
    found, modules = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "opintercept":
            for alias in node.names:
                if file_of(f"{node.module}.{alias.name}") in SOURCES:
                    modules.add(alias.asname or alias.name)
                elif private(alias.name):
                    found.append(alias.name)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and private(node.attr) and not is_self(node.value):
            holder = ast.unparse(node.value)
            if holder in modules or (node.attr in others and holder.partition(".")[0] != "torch"):
                found.append(ast.unparse(node))
    return sorted(set(found))


def test_importing_the_package_does_not_import_torch() -> None:
    assert not imports_torch("import opintercept")


def test_importing_the_pytest_plugin_does_not_import_torch() -> None:
    assert not imports_torch("import opintercept.testing.plugin")


@pytest.mark.parametrize(
    "code",
    ["import torch", "from opintercept import intercept", "from opintercept.hooks import Stats"],
    ids=lambda code: code,
)
@pytest.mark.slow
def test_the_check_reports_code_that_imports_torch(code: str) -> None:
    assert imports_torch(code)


@pytest.mark.parametrize("name", opintercept.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(opintercept, name)
    assert value is getattr(opintercept, name)
    if hasattr(value, "__qualname__"):
        assert value.__name__ in (name, "Union")  # as Python 3.14 calls `Hook`


def test_each_public_name_is_listed_once() -> None:
    assert sorted(opintercept.__all__) == sorted(set(opintercept.__all__))


def test_unknown_attribute_names_the_module_and_itself() -> None:
    with pytest.raises(AttributeError, match=r"^module 'opintercept' has no attribute 'interceptt'$"):
        _ = opintercept.interceptt


def test_dir_lists_public_names_before_their_first_use() -> None:
    code = "import opintercept; assert set(opintercept.__all__) <= set(dir(opintercept))"
    assert not imports_torch(code)


def test_errors_show_their_public_path() -> None:
    for error in (opintercept.OpInterceptError, opintercept.HookError, opintercept.OpInterceptWarning):
        assert error.__module__ == "opintercept"
    assert issubclass(opintercept.HookError, opintercept.OpInterceptError)


def test_py_typed_ships() -> None:
    assert importlib.resources.files("opintercept").joinpath("py.typed").is_file()


def test_files_read_no_private_names_of_others() -> None:
    assert {name: found for name in SOURCES if (found := reads_private(name, SOURCES[name]))} == {}


READS: dict[str, tuple[str, list[str]]] = {
    "attribute": ("call._spec.written", ["call._spec"]),
    "method": ("def hook(call):\n    return call.module or call._resolved('lhs')", ["call._resolved"]),
    "chain": ("interceptor._pipeline._lock", ["interceptor._pipeline", "interceptor._pipeline._lock"]),
    "assignment": ("call._kept = {}", ["call._kept"]),
    "import": ("from opintercept._core.call import _Secret", ["_Secret"]),
    "import in a function": ("def f():\n    from opintercept._origin.names import _collect", ["_collect"]),
    "of a module": ("from opintercept._core import exits\nexits._room(1)", ["exits._room"]),
    "by another name": ("from opintercept._core import exits as blocks\nblocks._room(1)", ["blocks._room"]),
    "public name of a private module": ("from opintercept._core import exits\nexits.finish(entry, None)", []),
    "own slot": ("class A:\n    __slots__ = ('_spec',)\n    def same(self, other):\n        return other._spec", []),
    "own attribute": ("class A:\n    def __init__(self):\n        self._spec = 1\n        super()._spec", []),
    "of torch and named tuples": ("torch._C._get_sequence_nr()\noverload._schema.name\nrow._replace(a=1)", []),
    "dunder": ("call.__class__", []),
}


@pytest.mark.parametrize(("source", "found"), READS.values(), ids=READS)
def test_the_check_of_private_names_finds_what_it_should(source: str, found: list[str]) -> None:
    assert reads_private("hooks/log.py", source) == found


@pytest.mark.parametrize(
    "name",
    [
        "_core/errors.py",
        "_core/call.py",
        "_core/pipeline.py",
        "testing/snapshot.py",
        "cli/__init__.py",
        "testing/plugin.py",
    ],
)
def test_files_that_need_no_torch_do_not_import_it(name: str) -> None:
    assert "torch" not in imported(SOURCES[name])
    assert "torch" in imported(f"{SOURCES[name]}\nimport torch.nn")


def test_private_torch_api_stays_in_the_engines_and_origin() -> None:
    users = {name for name, source in SOURCES.items() if PRIVATE.search(source)}
    assert {name.partition("/")[0] for name in users} == {"_engines", "_origin"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch._C._dispatch_tls", True),
        ("import torch._dynamo", True),
        ("from torch.utils._python_dispatch import TorchDispatchMode", True),
        ("from torch import _C", True),
        ("torch._ops.OpOverload", False),
        ("torch.compiler.is_compiling()", False),
    ],
    ids=["attribute", "import", "module", "from", "overload type", "public"],
)
def test_the_private_api_check_finds_what_it_should(line: str, found: bool) -> None:
    assert bool(PRIVATE.search(line)) is found


@pytest.mark.slow
def test_making_a_record_does_not_import_sympy() -> None:
    code = (
        "import sys, torch\nfrom opintercept import hooks, intercept\nrecorder = hooks.Recorder()\n"
        "with intercept(recorder):\n    torch.ones(2, 3) @ torch.ones(3, 4)\n"
        "assert recorder.records[0].gemm.batch == 1\nprint('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
