"""Operators of other libraries: loads the pack that knows them, and finds those that nobody has declared.

Invariant: a look costs a microsecond while no library has registered operators.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch

from opintercept._core import locks
from opintercept._core.call import OpCall
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.hook import Read
from opintercept._core.pipeline import Pipeline
from opintercept._core.tensors import is_tensor
from opintercept._engines.overloads import (
    Overloads,
    forget_unloaded,
    is_composite,
    is_runnable,
    note,
    registered,
    successor,
)
from opintercept._ops import packs
from opintercept._ops.op import bound, parameters_of
from opintercept._ops.register import recheck
from opintercept._ops.table import ROWS, exact, overloads, rows_for

# Private. Where a torch lacks them, operators of other libraries that are not loaded before the first block are not
# found, or none of those that nobody has declared.
_defined: Any = getattr(torch.library, "_defs", ())
_implemented: Any = getattr(torch.library, "_impls", ())
_all_names: Any = getattr(torch._C, "_dispatch_get_all_op_names", list)

# The namespaces of torch's own operators.
_TORCH = frozenset(
    word
    for words in (
        "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test aten c10d debug_mode_ops",
        "debugprims export fsdp higher_order inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn onnx",
        "prepacked prim prims profiler quantization quantized quantized_decomposed rngprims sparse static_runtime",
        "_inductor_debug _inductor_test _torch_testing bucketing c10d_functional device_mesh flex_lib semi_structured",
        "streams symm_mem torch_attn torch_nn triton",
    )
    for word in words.split()
)
# Packages that register none, and are imported with torch or by every program.
_PLAIN = frozenset(sys.stdlib_module_names) | frozenset(
    word
    for words in (
        "__main__ __mp_main__ _distutils_hack _pytest filelock fsspec functorch hypothesis iniconfig jinja2 markupsafe",
        "mpmath networkx numpy opintercept packaging pluggy pytest setuptools sympy torch torchgen tqdm",
        "typing_extensions",
    )
    for word in words.split()
)
_LOOKS_LIKE = r"gemm|gemv|matmul|linear|attn|attention|mm(?![a-z])"

# Where a library may have kernels for operators that another one has defined.
_WITH_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd")

_seen: tuple[int, ...] = (0, 0, 0, 0)
_counts: tuple[Any, ...] = ()
_with_kernels: set[str] = set()
_modules: frozenset[str] = frozenset()
_known: frozenset[str] = frozenset()
_unknown: Overloads = {}
_unknown_at = -1
_told: set[str] = set()
_told_of_change: set[str] = set()


def _loads() -> Any:
    return len(sys.modules), len(_defined), len(_implemented), len(torch.ops.loaded_libraries)


registrations: Callable[[], Any] = _loads
"""Returns a value that changes whenever operators may have come or gone. Compiled kernels count them exactly."""


def look() -> None:
    """Load the packs of libraries that have come since the last look. `ROWS.version` grows if any came or went."""
    global _seen, _modules
    now = _loads()
    gone = forget_unloaded()
    if now == _seen and not gone:
        return
    with locks.shared:
        modules = frozenset(sys.modules)
        fresh = {name.partition(".")[0] for name in modules - _modules} - _PLAIN
        fresh = {name for name in fresh if not name.startswith(("_sysconfigdata", "__editable__"))}
        if gone or fresh or (now[1:] != _seen[1:] and (now[3] or _from_python() - _TORCH)):
            _scan(fresh)
        _modules, _seen = modules, now


def arrive(names: Collection[str], gone: Collection[str]) -> None:
    """Take in overloads that have come, and that others have gone, as `look` does with what it finds itself.

    `ROWS.version` grows if that changes which products there are.
    """
    global _known
    with locks.shared:
        fresh = [name for name in names if not is_torchs(name)]
        packs.load({name.partition("::")[0] for name in fresh})
        _known = _known.union(fresh)
        if gone or any(rows_for(name) or _looks_like_one(name) for name in fresh):
            ROWS.changed()
            recheck()


def loaded() -> list[str]:
    """The operators that a library in C++ may have brought since this was asked last, or of which it has kernels."""
    global _counts, _with_kernels
    count = len(_all_names()) if registrations is _loads else registrations()
    counts = (count, *(len(registered(key)) for key in _WITH_KERNELS))
    if counts == _counts:
        return []
    _counts = counts
    others = [name for name in _all_names() if not is_torchs(name)]
    before, _with_kernels = _with_kernels, {n for n in others if any(map(is_runnable, overloads(exact(n))))}
    return [name for name in others if name not in _known or (name in _with_kernels and name not in before)]


def may_register(module: str) -> bool:
    """Whether a module in C++ may register operators, as far as its name tells."""
    return module.partition(".")[0] not in _PLAIN


def is_torchs(name: str) -> bool:
    """Whether an operator has come with torch, by its namespace."""
    return name.partition("::")[0] in _TORCH


def _from_python() -> set[str]:
    """The namespaces of operators that Python has defined or given kernels."""
    names = {name.partition("::")[0] for name in tuple(_defined)}
    return names.union(name.partition("/")[0] for name in tuple(_implemented))


def _scan(modules: set[str]) -> None:
    global _known
    names = frozenset(name for name in _all_names() if name.partition("::")[0] not in _TORCH)
    packs.load({name.partition("::")[0] for name in names}, modules)
    _known = names
    ROWS.changed()
    recheck()


def unknown() -> Overloads:
    """Overloads of other libraries that look like matmuls and that nobody has declared, by name."""
    global _unknown, _unknown_at
    with locks.shared:
        if _unknown_at != ROWS.version:
            _unknown = {
                name: overload
                for name in sorted(_known)
                if _looks_like_one(name)
                for overload in overloads(exact(name))
            }
            _unknown = note({name: overload for name, overload in _unknown.items() if not is_composite(overload)})
            _unknown_at = ROWS.version
        return _unknown


def _looks_like_one(name: str) -> bool:
    packet = name.partition(".")[0]
    if packet in ROWS or exact(name) in ROWS:
        return False
    return re.search(_LOOKS_LIKE, packet.partition("::")[2].lower()) is not None


def has_changed(overload: Any, now: Any = None) -> bool:
    """Whether an operator of another library was unloaded while a block watched it. One warning tells.

    Args:
        overload: The overload that the block watches.
        now: The one that is called; by default that which torch.ops has now.
    """
    now = successor(overload) if now is None else now
    if now is overload or (now is not None and now._schema == overload._schema):
        return False
    name = overload._schema.name
    if now is not None and name not in _told_of_change:
        _told_of_change.add(name)
        warnings.warn(
            f"{name} was unloaded in a block and loaded again with another schema: the block does not see its calls; "
            "leave it and enter it again to see them",
            OpInterceptWarning,
            stacklevel=caller_level(),
        )
    return True


class Tell:
    """A hook that tells of products of operators that nobody has declared.

    An operator that runs products which are seen hides nothing. One without two matrices that fit is no product.

    Args:
        pipeline: Counts the operators in `opaque`, and the products that are seen.
    """

    reads: tuple[Read, ...] = ()

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def pre(self, call: OpCall) -> None:
        """Note how many products have been seen."""
        call.once(Tell, lambda _: self._pipeline.calls)

    def post(self, call: OpCall) -> None:
        """Count and tell."""
        before = call.once(Tell, lambda _: self._pipeline.calls)
        roles = _roles(call)
        if roles is None or self._pipeline.calls != before:
            return
        self._pipeline.count_opaque(call.op)
        if call.op not in _told:
            _told.add(call.op)
            lhs, rhs, layout = roles
            warnings.warn(
                f"{call.op} looks like a matmul of another library, and hooks do not see it; declare it: "
                f'opintercept.register_op("{call.op}", lhs="{lhs}", rhs="{rhs}", layout="{layout}")',
                OpInterceptWarning,
                stacklevel=caller_level(),
            )


def _roles(call: OpCall) -> tuple[str, str, str] | None:
    """The first two matrices that share a dimension, by their parameters, and how the second lies."""
    named = bound(parameters_of(call.func), call.args, call.kwargs).items()
    matrices = [(name, value.shape) for name, value in named if is_tensor(value) and value.dim() > 1]
    for place, (lhs, one) in enumerate(matrices):
        for rhs, other in matrices[place + 1 :]:
            if one[-1] == other[-2]:
                return lhs, rhs, "kn"
            if one[-1] == other[-1]:
                return lhs, rhs, "nk"
    return None
