"""`Unfused`: the operators that a recorded kernel of torch.compile stands for, as calls in its place.

What the kernel keeps in registers lies in memory of its own, with the values that its operators make of its operands.
Invariant: anyone may have written the run. A kernel stays one call unless `again` lists all of its operators, and they
fit what was recorded of it.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from opintercept._core.tensors import TensorMeta, dtype_name
from opintercept._ops.fragment import FragmentNode, HeldNode, Ref, plain_argument
from opintercept._ops.table import row_of
from opintercept._values.fragments import as_held
from opintercept.runs.program import again, kernels
from opintercept.runs.store.codec import StoredCall, role_of
from opintercept.runs.store.run import MAX_TENSOR, Run

_SCRATCH = 1 << 39  # the first number of memory that no call was recorded to use
_MOST = 1 << 12  # tensors that a kernel may make
_WRONG = (again.NotRunError, *again.FAILURES, KeyError, AttributeError)
_CLONE, _RESHAPE = torch.ops.aten.clone.default, torch.ops.aten.reshape.default
_SHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, _RESHAPE)


class _Placed(NamedTuple):
    """A tensor without its values: where it lies, and what these are called."""

    meta: torch.Tensor
    memory: int
    name: str
    weight: bool = False

    def plain(self) -> dict[str, Any]:
        """As a run has it."""
        shape, stride = [*self.meta.shape], [*self.meta.stride()]
        place = [self.memory, self.meta.storage_offset(), stride, self.weight]
        return {"tensor": self.name, "shape": shape, "stride": stride, "memory": place}


class _Operation(NamedTuple):
    """An operator, its name in the graph, what it is given, with `_Placed` for tensors, and what it makes."""

    func: Any
    node: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[_Placed | None]


class Unfused:
    """The kernels of a process whose operators are known.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kernels: list[_Kernel] = []
        self._of: dict[str, int] = {}  # the number of the kernel that has a name
        self._values = functools.lru_cache(8)(lambda number: self._kernels[number].values())
        self._tag = zlib.crc32(str(run.path).encode())

    def calls(self, call: StoredCall) -> list[StoredCall]:
        """The calls of operators in the place of a generated kernel; any other call, and one that is not known, itself.

        A kernel of which some outputs are not known stays before them, with these.
        """
        if not kernels.is_kernel(call) or call.error is not None:
            return [call]
        name = f"unfused/{self._tag:x}.{len(self._kernels)}"
        try:
            with torch.no_grad():
                kernel = _Kernel(self._run, call, name)
                found = kernel.calls()
        except _WRONG:
            return [call]
        self._of |= dict.fromkeys(kernel.named, len(self._kernels))
        self._kernels.append(kernel)
        return found

    def value(self, name: str) -> torch.Tensor | None:
        """The values of what was not recorded; None for the name of what was.

        Raises:
            NotRunError: Operators of its kernel fail on what was recorded.
        """
        number = self._of.get(name)
        try:
            return None if number is None else self._values(number)[name]
        except again.FAILURES as failed:
            raise again.NotRunError(f"the operators of a kernel fail on its operands: {failed}") from failed

    def kept(self, name: str) -> tuple[int, str] | None:
        """As `Run.kept`, of what was not recorded; None for the name of what was."""
        if (number := self._of.get(name)) is None:
            return None
        meta = self._kernels[number].named[name]
        kind = dtype_name(meta.dtype).removesuffix("fn").replace("uint", "u").replace("int", "i").replace("float", "f")
        return meta.numel(), kind.upper()


class _Kernel:
    """The operators of one kernel."""

    def __init__(self, run: Run, call: StoredCall, name: str) -> None:
        self._run, self._call, self._name = run, call, name
        self._fragment, self._written = kernels.fragment_of(call)
        assert call.given is not None  # it has a fragment
        self._given: Mapping[str, Any] = call.given
        self._places = {
            name: tuple(None if each is None else str(each) for each in place)
            for name, place in call.given["stands_for"].get("places", {}).items()
        }
        self.named: dict[str, torch.Tensor] = {}  # what was not recorded, without values
        self._known: dict[str, Any] = {}  # a `_Placed` for each tensor of the graph
        self._steps: list[_Operation | None] = []  # None for the kernel itself
        for place, held in self._fragment.given.items():
            plain = self._given["args"][place]
            dtype = self._stored(plain).dtype
            self._known[held.name] = self._placed(plain, plain["tensor"], dtype, held)
        made = {place: self._output(place, held) for place, held in self._fragment.made.items()}
        metas = [each.meta for each in self._known.values()]
        self._most = again.room(metas, [each.meta.numel() for each in made.values()])
        # Where the outputs of operators lie. What the kernel writes in place is copied there at the end.
        self._outputs: dict[tuple[str, int], _Placed] = {}
        copied = []
        for place, held in self._fragment.made.items():
            node = self._fragment.nodes[held.name]
            item = node.func is operator.getitem
            key = (node.args[0].name, int(node.args[1])) if item else (node.name, 0)
            if place in self._fragment.given or key in self._outputs or (not item and kernels.is_view(node.func)):
                copied.append((held.name, made[place]))
            else:
                self._outputs[key] = made[place]
        if any(place not in made for place in self._written):
            self._steps.append(None)
        for node in self._fragment.nodes.values():
            if node.name not in self._known:
                self._known[node.name] = self._made_by(node)
        self._steps += [_Operation(_CLONE, name, [self._known[name]], {}, [output]) for name, output in copied]

    def _stored(self, plain: Mapping[str, Any]) -> torch.Tensor:
        return self._run.load(self._call.rank, plain["tensor"])

    def _placed(self, plain: Mapping[str, Any], name: str, dtype: torch.dtype, held: HeldNode) -> _Placed:
        memory, offset, stride, *weight = plain["memory"]
        shape = plain["shape"]
        if not all(type(n) is int and 0 <= n < _SCRATCH for n in (memory, offset, *shape, *stride)) or dtype.is_complex:
            raise again.NotRunError("a tensor of a kernel must be one of real numbers in known memory")
        end = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        flat = torch.empty(max(end, 0), dtype=dtype, device="meta")
        found = as_held(flat.as_strided(shape, stride, offset), held)
        if found is None:
            raise again.NotRunError("a tensor of a kernel must lie in memory as in the graph")
        if [n for n in shape if n != 1] != [n for n in held.shape if n != 1]:
            name = self._new_name(found)  # its values have another order
        return _Placed(found, memory, name, bool(weight and weight[0]))

    def _output(self, place: int, held: HeldNode) -> _Placed:
        number = self._written.index(place)
        meta = self._call.record.outputs[number]
        name = self._call.tensors.get(role_of(number))
        if meta is None or name is None:
            raise again.NotRunError("an output of a kernel must have been recorded")
        found = self._placed(self._given["outputs"][number], name, getattr(torch, meta.dtype), held)
        if found.name != name:
            raise again.NotRunError("an output of a kernel must have the shape that it has in the graph")
        return found

    def _new_name(self, meta: torch.Tensor) -> str:
        if meta.is_complex() or len(self.named) == _MOST - 1:
            raise again.NotRunError(f"a kernel must make real numbers, in fewer than {_MOST} tensors")
        name = f"{self._name}.{len(self.named)}"
        self.named[name] = meta
        return name

    def _new(self, meta: torch.Tensor, memory: int | None = None) -> _Placed:
        name = self._new_name(meta)
        if memory is None:
            memory = _SCRATCH + self._call.record.index * _MOST + len(self.named)
        return _Placed(meta, memory, name)

    def _made_by(self, node: FragmentNode) -> Any:
        """What a node makes, with a step for it."""
        if node.func is None:
            raise again.NotRunError(f"{node.name} must be an operand of the kernel")
        args = [self._value(each) for each in node.args]
        kwargs = {key: self._value(each) for key, each in node.kwargs.items()}
        if node.func is operator.getitem:
            return args[0][args[1]]
        func = _RESHAPE if node.func in _SHAPES else node.func  # memory may lie otherwise than in the graph
        made = self._metas(func, args, kwargs)
        source = args[0] if args and isinstance(args[0], _Placed) else None
        if source is not None and kernels.is_view(func) and _is_within(func, source.meta, args):
            outputs: list[_Placed | None] = [self._new(each, source.memory) for each in made]
        else:
            outputs = [
                self._outputs.get((node.name, number))
                or (self._new(torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")))
                if isinstance(each, torch.Tensor)
                else None
                for number, each in enumerate(made)
            ]
        for each, output in zip(made, outputs, strict=True):
            if output is not None and (output.meta.shape != each.shape or output.meta.dtype != each.dtype):
                raise again.NotRunError(f"{node.op} must make what the kernel was recorded to make")
        self._steps.append(_Operation(func, node.name, args, kwargs, outputs))
        return outputs if len(outputs) > 1 or node.op in _SEVERAL else outputs[0]

    def _value(self, value: Any) -> Any:
        """An argument with what is known of nodes in their place."""
        if isinstance(value, Ref):
            return self._known[value.name]
        return [self._value(each) for each in value] if isinstance(value, (list, tuple)) else value

    def _metas(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The outputs of an operator, without values."""
        metas, named = [*map(_meta, args)], {key: _meta(each) for key, each in kwargs.items()}
        if not kernels.is_view(func):
            again.check_size(again.operator_of(func._schema.name, str(func)), metas, named, self._most)
        if any(each.name == "device" for each in func._schema.arguments):
            named["device"] = torch.device("meta")
        made = func(*metas, **named)
        return [*made] if isinstance(made, (list, tuple)) else [made]

    def calls(self) -> list[StoredCall]:
        """The calls, in order."""
        return [self._whole() if step is None else self._call_of(step) for step in self._steps]

    def _whole(self) -> StoredCall:
        """The kernel itself, with the outputs that are not known otherwise."""
        known = [place in self._fragment.made for place in self._written]
        outputs = [None if own else each for each, own in zip(self._given["outputs"], known, strict=True)]
        return replace(self._call, given={**self._given, "outputs": outputs})

    def _call_of(self, step: _Operation) -> StoredCall:
        record, row = self._call.record, row_of(step.func)
        args, kwargs = (*map(_meta, step.args),), {key: _meta(each) for key, each in step.kwargs.items()}
        outputs = [None if each is None else _described(each.meta) for each in step.outputs]
        operands = (row.operand(role, args, kwargs) for role in ("lhs", "rhs", "bias"))
        lhs, rhs, bias = (None if each is None else _described(each) for each in operands)
        module, source = self._places.get(step.node, (record.module, record.source))
        record = replace(
            record,
            op=step.func._schema.name,
            func=str(step.func),
            module=module,
            source=source,
            lhs=lhs,
            rhs=rhs,
            bias=bias,
            output=outputs[0] if len(outputs) == 1 else tuple(outputs),
            gemm=row.gemm(args, kwargs),
            flops=None,
            bytes=None,
            opaque=False,
            ops=None,
        )
        given = {
            "args": [*map(_plain, step.args)],
            "kwargs": {key: _plain(each) for key, each in step.kwargs.items()},
            "outputs": [None if each is None else each.plain() for each in step.outputs],
        }
        tensors = {role_of(at): each.name for at, each in enumerate(step.outputs) if each is not None}
        return replace(self._call, record=record, values={}, tensors=tensors, arguments={}, given=given)

    def values(self) -> dict[str, torch.Tensor]:
        """What was not recorded, by its name."""
        found: dict[str, torch.Tensor] = {}
        for place, held in self._fragment.given.items():
            plain = self._given["args"][place]
            own = as_held(_strided(self._stored(plain), plain["shape"], plain["memory"][2]), held)
            assert own is not None  # as without values
            found[self._known[held.name].name] = own

        def value(item: Any) -> Any:
            if isinstance(item, _Placed):
                return found[item.name]
            return [value(each) for each in item] if isinstance(item, list) else item

        with torch.no_grad():
            for step in filter(None, self._steps):
                args, kwargs = [*map(value, step.args)], {key: value(each) for key, each in step.kwargs.items()}
                if kernels.is_view(step.func):
                    made = step.func(*args, **kwargs)
                else:
                    made = again.run(again.operator_of(step.func._schema.name, str(step.func)), args, kwargs)
                several = [*made] if isinstance(made, (list, tuple)) else [made]
                found |= {each.name: own for each, own in zip(step.outputs, several, strict=True) if each is not None}
        return {name: each for name, each in found.items() if name in self.named}


_SEVERAL = ("aten::split", "aten::split_with_sizes", "aten::unbind")


def _is_within(func: Any, source: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether a view makes no memory, as a new shape may."""
    if func is not _RESHAPE:
        return True
    try:
        source.view(args[1])
    except RuntimeError:
        return False
    return True


def _strided(stored: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    """A stored tensor with the strides that it had, also those of an expanded one."""
    first = stored.reshape(shape)[tuple(slice(1 if step == 0 else None) for step in stride)]
    return again.strided(first, [*first.shape], stride, MAX_TENSOR).expand(shape)


def _meta(value: Any) -> Any:
    if isinstance(value, _Placed):
        return value.meta
    return [_meta(each) for each in value] if isinstance(value, list) else value


def _described(meta: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(meta.shape), dtype_name(meta.dtype), "cpu", tuple(meta.stride()), False)


def _plain(value: Any) -> Any:
    """As a run has arguments."""
    if isinstance(value, _Placed):
        return value.plain()
    return {"list": [*map(_plain, value)]} if isinstance(value, list) else plain_argument(value)
