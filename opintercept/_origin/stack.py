"""The Python stack of a running call: its modules, the program's line, and whether a checkpoint repeats it.

Invariant: no frame is kept.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
import torch.utils.checkpoint

from opintercept._core import pipeline
from opintercept._core.record import Phase

_Context: type[Any] = torch._C._FunctionBase
current_node: Callable[[], Any] = torch._C._current_autograd_node
OUTER_CALL = torch.nn.Module._wrapped_call_impl.__code__
_INNER_CALL = torch.nn.Module._call_impl.__code__
# The code that calls a custom Function's forward; None if that is in C, as in torch 2.15.
_APPLY: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
# The functions by which hooks are run, and those that kernels in C++ ask where a call comes from.
_ENTRIES: tuple[CodeType, ...] = tuple(
    function.__code__
    for function in (
        pipeline.run,
        pipeline.Pipeline.begin_call,
        pipeline.Pipeline.end_call,
        pipeline.Pipeline.lasting_call_site,
        pipeline.Pipeline.forward_of,
        pipeline.Pipeline.link_in_function,
    )
)
_ENTERS = frozenset(map(id, _ENTRIES))
# The code that runs autograd's engine. Without it, as in a torch before 2.11, the walk goes on to the end of the stack.
ENGINE: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_CHECKPOINT = torch.utils.checkpoint.__file__
WALKED_CODE = (OUTER_CALL, _INNER_CALL, _ENTRIES, ENGINE, _CHECKPOINT)
_HERE = os.path.dirname(os.path.dirname(__file__))
NOT_SOURCE = (os.path.dirname(torch.__file__) + os.sep, _HERE + os.sep)


def backward_phase() -> Phase:
    """Return the pass of a call that autograd makes: backward, or one that a checkpoint or custom Function repeats."""
    # Whether gradients are enabled does not tell: `create_graph=True` enables them, and `no_grad` or a custom Function
    # in the repeated pass disables them. A checkpoint has its frames on the stack above autograd's.
    frame = sys._getframe().f_back  # None if it is the only one: compiled kernels have no frame
    in_module = False
    while frame is not None and (code := frame.f_code) is not ENGINE:
        if code.co_filename == _CHECKPOINT:
            return "recompute"
        in_module = in_module or code is OUTER_CALL
        frame = frame.f_back
    # A custom Function that calls modules in its backward: another library's checkpoint, or an adjoint method.
    return "recompute" if in_module and isinstance(current_node(), _Context) else "backward"


def in_checkpoint() -> bool:
    """Whether a checkpoint has its frames anywhere on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


# Whether a code object belongs to the program. Keyed by identity, since hashing a code object reads all of it.
_users: dict[int, tuple[CodeType, bool]] = {}
atexit.register(_users.clear)  # torch 2.15 fails at compiled code that goes after torch's modules
script: Callable[[], str] = str
"""What TorchScript runs on this thread, as in `stack.cpp`; `""` where the library in C++ was never built."""
Walked: TypeAlias = tuple[torch.nn.Module | None, torch.nn.Module | None, CodeType | None, int]
"""The innermost and the outermost module, and the program's code with its instruction; None and -1 without them."""


def walk() -> Walked:
    """Walk the Python stack once, from the operator outwards."""
    top = pipeline_frame()
    # The walk has three parts, since each look at a frame takes time: to the innermost module, to the outermost one,
    # and beyond, where the program may have called `model.forward` directly. The source line is in the first part or,
    # since most modules inside of models are torch's own, in the beginning of the second.
    inner: FrameType | None = None
    frame = top
    while frame is not None:
        code = frame.f_code
        if code is OUTER_CALL or (code.co_name == "forward" and _called_directly(frame)):
            inner = frame
            break
        frame = frame.f_back
    frame = outer = inner
    while frame is not None:
        if frame.f_code is OUTER_CALL:
            outer = frame
        frame = frame.f_back
    frame = None if outer is None else outer.f_back
    while frame is not None:
        if frame.f_code.co_name == "forward" and _called_directly(frame):
            outer = frame
        frame = frame.f_back
    try:
        module = None if inner is None else module_of(inner)
        root = None if outer is None else module_of(outer)
        frame = top
        while frame is not None:
            code = frame.f_code
            known_user = _users.get(id(code))
            if known_user[1] if known_user is not None else is_users(code):
                return module, root, code, frame.f_lasti
            frame = frame.f_back
        return module, root, None, -1
    finally:
        del top, inner, outer, frame  # a frame that refers to itself would be garbage


def pipeline_frame() -> FrameType | None:
    """Return the frame by which hooks are run. Frames above it belong to them, and they may be methods of modules."""
    top: FrameType | None = sys._getframe(1)
    while top is not None and id(top.f_code) not in _ENTERS:
        top = top.f_back
    return top


def _called_directly(frame: FrameType) -> bool:
    """Whether a frame of a function named forward belongs to a module that was not called through `__call__`."""
    caller = frame.f_back
    if caller is not None and caller.f_code is _INNER_CALL:
        return False
    while caller is not None and caller.f_code is not _INNER_CALL and caller.f_code.co_name in ("wrapper", "inner"):
        caller = caller.f_back  # of a decorator, or torch's own around its hooks
    return (caller is None or caller.f_code is not _INNER_CALL) and module_of(frame) is not None


def local_of(frame: FrameType, name: str, default: Any = None) -> Any:
    """Return a variable of a frame.

    To ask a frame for all of them takes long, and before Python 3.13 it keeps them until the frame ends.
    """
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED and not (
        name in code.co_varnames or name in code.co_freevars or name in code.co_cellvars
    ):
        return default
    return frame.f_locals.get(name, default)


def module_of(frame: FrameType) -> torch.nn.Module | None:
    """Return the module whose method a frame runs, or None."""
    code = frame.f_code
    module = local_of(frame, code.co_varnames[0]) if code.co_argcount else None
    return module if isinstance(module, torch.nn.Module) else None


def is_users(code: CodeType) -> bool:
    """Whether a code object is neither torch's nor this package's."""
    if len(_users) > 10_000:  # a program that keeps making code, such as a notebook
        _users.clear()
    users = not code.co_filename.startswith(NOT_SOURCE)
    _users[id(code)] = (code, users)
    return users


def custom_function() -> Any:
    """Return the node of the custom Function whose forward is running, or None if autograd records none.

    The node is the Function's context. Nodes of Functions that it calls in its forward are newer and lead nowhere. A
    Function with `setup_context` has no context on the stack, so that the answer is None.
    """
    frame = pipeline_frame()
    while frame is not None and (caller := frame.f_back) is not None:
        code = frame.f_code
        # Without a caller's frame, the name tells: its own, or that of the decorator `torch.amp.custom_fwd`.
        if caller.f_code is _APPLY if _APPLY is not None else code.co_name in ("forward", "decorate_fwd"):
            first = local_of(frame, code.co_varnames[0]) if code.co_varnames else None
            if not code.co_argcount and isinstance(first, tuple) and first:
                first = first[0]  # the `*args` of a decorator such as `torch.amp.custom_fwd`
            if isinstance(first, _Context) and first.next_functions:
                return first
        frame = caller
    return None


def frame_of(code: CodeType) -> FrameType | None:
    """Return the innermost frame outside of hooks that runs `code`, or None."""
    frame = pipeline_frame()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
