"""Which operators kernels in C++ note on a device: `python noted_operators.py` prints as JSON those that they do not.

Each operator that a block watches is called on the stand-in, with arguments made from its schema. A kernel of this
program takes the place of the device's, and returns what the schema promises. So this tells what types of arguments and
results decide, also of operators that need a GPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import toy_device  # noqa: F401 adds the device

from opintercept import OpCall, hooks, intercept
from opintercept._engines.overloads import is_composite
from opintercept._ops.table import OWN, ROWS, exact, overloads

DEVICE = torch.device("toy")
TIMES = 3  # the first of calls that look alike is for Python
FORMS = ("full", "sparing")
"""With all arguments, tensors of small whole numbers beside the operands; or with defined results only where needed."""


class Unmade(Exception):
    """There is no value of a type here."""


class Values:
    """Arguments and results of one call, by the types of a schema."""

    def __init__(self, form: str) -> None:
        self.full = form == "full"
        self.matrix = torch.ones(4, 4, device=DEVICE)
        self.number = torch.ones((), dtype=torch.int64, device=DEVICE)
        self.plain: dict[str, Any] = {"int": 1, "SymInt": 1, "float": 0.5, "bool": False, "Scalar": 1, "number": 1}
        self.plain |= {"complex": 1j, "str": "sum", "Device": DEVICE, "ScalarType": torch.float32}
        self.plain |= {"Layout": torch.strided, "MemoryFormat": torch.contiguous_format, "Generator": torch.Generator()}
        self.plain |= {"Storage": self.matrix.untyped_storage(), "Stream": torch.accelerator.current_stream()}
        self.plain["QScheme"] = torch.per_tensor_affine

    def argument(self, argument: Any, *, is_operand: bool) -> Any:
        kind = argument.real_type
        if isinstance(kind, torch._C.OptionalType):
            if not self.full:
                return None
            kind = kind.getElementType()
        return self._of(kind, is_operand=is_operand, length=argument.N)

    def _of(self, kind: Any, *, is_operand: bool, length: int | None = None) -> Any:
        if isinstance(kind, torch._C.TensorType):
            return self.matrix if is_operand or not self.full else self.number
        if isinstance(kind, torch._C.OptionalType):
            return None
        if isinstance(kind, torch._C.ListType):
            items = kind.getElementType()
            return [self._of(items, is_operand=is_operand) for _ in range(length or 2)]
        name = kind.annotation_str if str(kind) not in self.plain else str(kind)
        if name not in self.plain:
            raise Unmade(str(kind))
        return self.plain[name]

    def result(self, returned: Any, given: dict[str, Any], written: list[Any]) -> Any:
        if returned.alias_info is not None and returned.alias_info.is_write:
            return written.pop(0)
        if isinstance(returned.type, torch._C.TensorType):
            return self.number if self.full else None
        return self._of(returned.type, is_operand=not self.full)


def kernel(schema: Any, values: Values) -> Any:
    """A kernel that computes nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {each.name: value for each, value in zip(schema.arguments, args, strict=False)} | kwargs
        written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        found = tuple(values.result(each, given, written) for each in schema.returns)
        return found[0] if len(found) == 1 else found or None

    return run


@contextlib.contextmanager
def in_place_of_the_device(overload: torch._ops.OpOverload, values: Values) -> Iterator[None]:
    """Let a kernel that computes nothing run an operator."""
    schema = overload._schema
    space, _, _ = schema.name.partition("::")
    library = torch.library.Library(space, "IMPL")
    try:
        library.impl(overload, kernel(schema, values), "PrivateUse1")
        yield
    finally:
        library._destroy()


def noted(overload: torch._ops.OpOverload, form: str) -> str:
    """Whether kernels note calls of an operator: `"noted"`, `"shown"` to Python, or why there are no such calls."""
    values, schema = Values(form), overload._schema
    try:
        args, kwargs = [], {}
        for place, argument in enumerate(schema.arguments):
            if not values.full and argument.has_default_value():
                continue
            value = values.argument(argument, is_operand=place < 4 or argument.is_out)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        with in_place_of_the_device(overload, values):
            before = shown.total()
            with torch.no_grad(), intercept(hooks.Recorder(), ops=overload, engine="compiled") as block:
                for turn in range(TIMES + 1):
                    if turn == TIMES - 1:
                        before = shown.total()
                    overload(*args, **kwargs)
                    if turn == 0 and not block.watcher.pipeline.calls:
                        return "never watched"
            return "noted" if shown.total() == before else "shown"
    except Unmade as missing:
        return f"no {missing}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


shown: Counter[str] = Counter()


def count_shown() -> None:
    """Count the calls that become Python objects."""
    made = OpCall.__init__

    def counted(call: OpCall, owner: Any, spec: Any, *rest: Any) -> None:
        shown[spec.name] += 1
        made(call, owner, spec, *rest)

    OpCall.__init__ = counted  # type: ignore[assignment, method-assign]


def in_table() -> list[torch._ops.OpOverload]:
    """What `ops="matmul"` and `ops="convolution"` may watch on some device."""
    return [each for name, row in ROWS.items() if row.kind == "leaf" for each in overloads(name)]


def others() -> list[torch._ops.OpOverload]:
    """What `ops="all"` adds of torch's own."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")} - {"aten::_print"}
    return [each for name in sorted(names) if name.partition(".")[0] not in OWN for each in overloads(exact(name))]


def main(which: str) -> dict[str, dict[str, str]]:
    """By form and name, what happens to the calls of operators."""
    count_shown()
    known = [each for each in (in_table() if which == "table" else others()) if not is_composite(each)]
    if "--fewer" in sys.argv:
        known = [each for each in known if zlib.crc32(each.name().encode()) % 4 == 0]
    return {form: {each.name(): noted(each, form) for each in known} for form in FORMS}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1])))
