"""See, check and change every matrix multiplication that a PyTorch program runs.

    with intercept(hooks.Print()):
        model(x).sum().backward()

Importing the package does not import torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

from opintercept._core.version import __version__ as __version__

# Type checkers take this name to be true. Importing `typing` would take most of the time of importing this file.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from opintercept import hooks as hooks
    from opintercept import runs as runs
    from opintercept._blocks.intercept import Interceptor as Interceptor
    from opintercept._blocks.intercept import intercept as intercept
    from opintercept._core.call import OpCall as OpCall
    from opintercept._core.errors import HookError as HookError
    from opintercept._core.errors import NonFiniteError as NonFiniteError
    from opintercept._core.errors import OpInterceptError as OpInterceptError
    from opintercept._core.errors import OpInterceptWarning as OpInterceptWarning
    from opintercept._core.gemm import Gemm as Gemm
    from opintercept._core.hook import Handle as Handle
    from opintercept._core.hook import Hook as Hook
    from opintercept._core.hook import HookDeclaration as HookDeclaration
    from opintercept._core.in_kernel import InKernel as InKernel
    from opintercept._core.in_kernel import Work as Work
    from opintercept._core.pipeline import flush as flush
    from opintercept._core.record import CallRecord as CallRecord
    from opintercept._core.record import PendingRecord as PendingRecord
    from opintercept._core.tensors import TensorMeta as TensorMeta
    from opintercept._engines.info import Info as Info
    from opintercept._engines.info import info as info
    from opintercept._ops.register import Registration as Registration
    from opintercept._ops.register import register_op as register_op

_HOMES = {
    "CallRecord": "_core.record",
    "Gemm": "_core.gemm",
    "Handle": "_core.hook",
    "Hook": "_core.hook",
    "HookDeclaration": "_core.hook",
    "HookError": "_core.errors",
    "InKernel": "_core.in_kernel",
    "Info": "_engines.info",
    "Interceptor": "_blocks.intercept",
    "NonFiniteError": "_core.errors",
    "OpCall": "_core.call",
    "OpInterceptError": "_core.errors",
    "OpInterceptWarning": "_core.errors",
    "PendingRecord": "_core.record",
    "Registration": "_ops.register",
    "TensorMeta": "_core.tensors",
    "Work": "_core.in_kernel",
    "flush": "_core.pipeline",
    "hooks": "",
    "info": "_engines.info",
    "intercept": "_blocks.intercept",
    "register_op": "_ops.register",
    "runs": "",
}

__all__ = [  # noqa: PLE0604 - computed, so that each name is written once
    "__version__",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from opintercept._core.after_import import torch_first

    if home.startswith(("_blocks", "_engines", "_ops")):
        torch_first()
    value = import_module(f"opintercept.{home}").__dict__[name] if home else import_module(f"opintercept.{name}")
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic `%%intercept`; `%load_ext opintercept` calls this."""
    from importlib import import_module

    import_module("opintercept.integrations.notebook").add_magic(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
