"""`Origin`, which tells where a call comes from: its module, source line, forward call and autocast dtype.

Invariant: what is unknown is None, never a guess. Nothing here keeps a tensor, a frame, a module or a graph alive.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import CodeType

import torch

from opintercept._core.call import OpCall
from opintercept._core.call_site import NOWHERE, CallSite
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.record import Phase
from opintercept._origin import compiled_graphs
from opintercept._origin.autocast import autocast_above, autocast_below
from opintercept._origin.graph_places import GraphPlaces, Needs
from opintercept._origin.links import Link, Links, address, grad_of
from opintercept._origin.names import Labels, running_part, tells_parts
from opintercept._origin.stack import Walked


class _Stack:
    """Reads the Python stack of a running call, and names the modules on it for one interceptor."""

    def __init__(self, walk: Callable[[], Walked]) -> None:
        self._labels = Labels()
        self._walk = walk
        self.graphs = GraphPlaces(self._labels, walk)

    def here(self, phase: Phase) -> CallSite:
        """Return the place of the running call."""
        module, root, code, instruction = self._walk()
        if code is not None and compiled_graphs.is_generated(code):
            return self.graphs.find(phase, code)[0]
        if module is None or root is None:
            return CallSite(("",), code, instruction)
        if not (issubclass(type(module), torch.nn.Module) and issubclass(type(root), torch.nn.Module)):
            return CallSite((), code, instruction)  # a mock, which only says that it is a module
        module = running_part(module)
        again = self._labels.recomputed(module) if phase == "recompute" else None
        return CallSite(again or self._labels.names(root, module), code, instruction)

    def lasting(
        self, module: torch.nn.Module | None, root: torch.nn.Module | None, code: CodeType | None, instruction: int
    ) -> tuple[CallSite, Needs | None] | None:
        """Return the place of a forward call with this stack, and what else decides it; None if it is a new one.

        In a wrapper of Inductor these are the modules around the graph. Such calls also have the same function of
        Dynamo on the stack, and code of the program that calls the graph. A place is the same for all of them if no
        module is needed. If `Needs` cannot tell, they are None, and who asks again gets the same place if it is right.
        """
        if code is not None and compiled_graphs.is_generated(code):
            if not compiled_graphs.is_wrapper(code):
                own = self.graphs.in_program(code)
                if own is None or module is None or root is None or not self._labels.lasts(root, module):
                    return None
                return own, ()
            place, needs, kept = self.graphs.find("forward", code)
            return (place, needs) if kept else None
        if tells_parts(module):
            return None
        if module is None or root is None:
            return CallSite(("",), code, instruction), ()
        names = self._labels.names(root, module)
        return (CallSite(names, code, instruction), ()) if self._labels.lasts(root, module) else None


class Origin:
    """Tells where the calls of one interceptor come from."""

    def __init__(self, below: bool, owner: Callable[[], int | None], walk: Callable[[], Walked]) -> None:
        """`below` says that the calls run below autograd and autocast, as at dispatch level.

        `owner` returns the thread that called backward, in one of autograd's own threads; otherwise None. `walk` is
        `stack.walk` or a function with the same results.
        """
        self._stack = _Stack(walk)
        self.lasting = self._stack.lasting
        # The forward calls that backward calls can find. At function level there are no backward calls.
        self.links = Links(owner, self._stack.here) if below else None
        self._below = below

    def autocast(self, call: OpCall) -> torch.dtype | None:
        """Return the dtype in which autocast runs the call, or None."""
        return autocast_below(call) if self._below else autocast_above(call.operand("lhs"))

    def call_site(self, call: OpCall, read: str) -> CallSite:
        """Return the module and the line of a running call. A backward call has those of its forward call.

        `read` is what the hook reads, as in `HookDeclaration.reads`.
        """
        if call.phase != "backward":
            return self._stack.here(call.phase)
        found = self._forward_of(call, read)
        if found is None:
            return NOWHERE
        _, place, _ = found
        return self._stack.graphs.find_backward(place) if isinstance(place, compiled_graphs.GraphCallSite) else place

    def forward(self, call: OpCall, read: str) -> tuple[int | None, str | None, bool]:
        """Return the index of the forward call whose gradient a running call computes, of which operand, and how.

        That is the operand's role, and whether the call computes the transposed gradient. `read` is as for `call_site`.
        """
        found = self._forward_of(call, read)
        if found is None or found[2]:
            return None, None, False
        operands = [address(value) for value in call.args if isinstance(value, torch.Tensor)]
        lhs = call.operand("lhs")
        return found[0].index, *grad_of(operands, 0 if lhs is None else address(lhs), found[0])

    def forward_of(self, operands: tuple[int, ...], lhs: int) -> tuple[CallSite, int | None, str | None] | None:
        """Return the place, the forward call and the operand of the running backward call.

        `operands` are the addresses of the call's arguments, 0 for those that
        are not tensors, and `lhs` that of the left one.
        """
        found = None if self.links is None else self.links.find()
        if found is None:
            return NOWHERE, None, None
        place = found[1]
        if isinstance(place, compiled_graphs.GraphCallSite):
            place = self._stack.graphs.find_backward(place)
        if found[2]:
            return place, None, None
        return place, found[0].index, grad_of(operands, lhs, found[0])[0]

    def _forward_of(self, call: OpCall, read: str) -> tuple[Link, CallSite, bool] | None:
        if self.links is None or call.phase != "backward":
            return None
        if not self.links.wanted:
            self.links.wanted = True
            warnings.warn(
                f'a hook read "{read}" of a backward call and got None, since no hook of the block declares that; '
                f'add "{read}" to `reads` of the hook. Forward calls are tracked from now on',
                OpInterceptWarning,
                stacklevel=caller_level(),
            )
        return self.links.find()
