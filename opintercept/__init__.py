"""See, check and change every matrix multiplication that a PyTorch program runs.

    with intercept(hooks.Print()):
        model(x).sum().backward()

Importing the package does not import torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

# Type checkers take this name to be true. Importing `typing` would take most of the time of importing this file.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from opintercept import hooks as hooks
    from opintercept import runs as runs
    from opintercept._call import OpCall as OpCall
    from opintercept._errors import HookError as HookError
    from opintercept._errors import NonFiniteError as NonFiniteError
    from opintercept._errors import OpInterceptError as OpInterceptError
    from opintercept._errors import OpInterceptWarning as OpInterceptWarning
    from opintercept._hook import Handle as Handle
    from opintercept._hook import Hook as Hook
    from opintercept._hook import HookDeclaration as HookDeclaration
    from opintercept._info import Info as Info
    from opintercept._info import info as info
    from opintercept._intercept import Interceptor as Interceptor
    from opintercept._intercept import intercept as intercept
    from opintercept._ops.register import Registration as Registration
    from opintercept._ops.register import register_op as register_op
    from opintercept._record import CallRecord as CallRecord
    from opintercept._record import Gemm as Gemm
    from opintercept._tensors import TensorMeta as TensorMeta

__version__ = "0.1.0"

_HOMES = {
    "CallRecord": "_record",
    "Gemm": "_record",
    "Handle": "_hook",
    "Hook": "_hook",
    "HookDeclaration": "_hook",
    "HookError": "_errors",
    "Info": "_info",
    "Interceptor": "_intercept",
    "NonFiniteError": "_errors",
    "OpCall": "_call",
    "OpInterceptError": "_errors",
    "OpInterceptWarning": "_errors",
    "Registration": "_ops.register",
    "TensorMeta": "_tensors",
    "hooks": "",
    "info": "_info",
    "intercept": "_intercept",
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

    value = import_module(f"opintercept.{home}").__dict__[name] if home else import_module(f"opintercept.{name}")
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic `%%intercept`; `%load_ext opintercept` calls this."""
    from importlib import import_module

    import_module("opintercept._notebook").add_magic(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
