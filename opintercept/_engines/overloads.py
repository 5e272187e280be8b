"""Which overloads an engine at dispatch level can watch.

Invariant: an overload that no call could reach is left out of the family, and refused if it was named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from opintercept._ops import convolutions, families, select
from opintercept._ops.op import Op
from opintercept._ops.table import OWN, ROWS, exact, overloads, row_of

# Private; engines that need them name them in `needs`.
find_schema = getattr(torch._C, "_dispatch_find_schema_or_throw", None)
has_kernel = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
registered: Any = getattr(torch._C, "_dispatch_get_registrations_for_dispatch_key", None)

Overloads = Mapping[str, torch._ops.OpOverload]


def is_composite(overload: torch._ops.OpOverload) -> bool:
    """Whether torch takes the overload apart above autograd, before dispatch level could see it.

    It does not on devices for which an overload has a kernel, too, such as `silu_backward` on CPUs.
    """
    name, has = overload.name(), cast("Any", has_kernel)
    return bool(has(name, "CompositeImplicitAutograd")) and not any(has(name, key) for key in _DENSE)


def is_made_of_others(name: str) -> bool:
    """Whether an overload calls other operators, be it above autograd or where a backend has no kernel for it."""
    has: Any = has_kernel
    if has(name, "CompositeImplicitAutograd"):
        return True
    return any(has(name, key) for key in _BACKENDS[:2]) and not any(has(name, key) for key in _BACKENDS[2:])


def is_runnable(overload: torch._ops.OpOverload) -> bool:
    """Whether this build of torch has a kernel for the overload. Leaving the others out makes entering faster."""
    return any(has_kernel(overload.name(), key) for key in _BACKENDS)  # type: ignore[misc]


def arrives_whole(overload: torch._ops.OpOverload) -> bool:
    """Whether the overload reaches dispatch level, and has a kernel there in this build of torch."""
    return row_of(overload.name()).kind == "bare" or (is_runnable(overload) and not is_composite(overload))


# The dispatch keys at which operators compute; those of the first two call other operators.
# fmt: off
_BACKENDS = (
    "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CPU", "CUDA", "MPS", "XPU", "HPU", "XLA",
    "MTIA", "PrivateUse1", "PrivateUse2", "PrivateUse3", "QuantizedCPU", "QuantizedCUDA", "QuantizedPrivateUse1",
    "SparseCPU", "SparseCUDA", "SparsePrivateUse1", "SparseCsrCPU", "SparseCsrCUDA", "SparseCsrPrivateUse1",
    "NestedTensorCPU", "NestedTensorCUDA", "MkldnnCPU", "Vulkan", "Metal", "IPU", "VE", "Lazy",
)
# fmt: on
_DENSE = ("CPU", "CUDA")


# The packets of other libraries that blocks watch, by name, each with the namespace that has it while it is loaded.
_packets: dict[str, tuple[dict[str, Any], str, torch._ops.OpOverloadPacket]] = {}


def note(found: dict[str, torch._ops.OpOverload]) -> dict[str, torch._ops.OpOverload]:
    """Note which overloads are watched, so that `forget_unloaded` finds those whose library goes. Returns them."""
    for overload in found.values():
        packet, (space, _, short) = overload._overloadpacket, overload._schema.name.partition("::")
        if overload._schema.name not in OWN:
            _packets[overload._schema.name] = vars(getattr(torch.ops, space)), short, packet
    return found


def forget_unloaded() -> bool:
    """Forget overloads whose library was unloaded, and maybe loaded again. Returns whether there are any.

    Calling one of them would read memory that torch has freed.
    """
    gone = [name for name, (space, short, packet) in _packets.copy().items() if space.get(short) is not packet]
    for name in gone:
        _packets.pop(name, None)
    return bool(gone)


def is_there(overload: torch._ops.OpOverload) -> bool:
    """Whether torch.ops has the very overload, which it loses when its library is unloaded."""
    space, _, short = overload._schema.name.partition("::")
    return vars(getattr(torch.ops, space)).get(short) is overload._overloadpacket


def successor(overload: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that torch.ops has by the same name: itself, unless its library was unloaded; None for none."""
    return overload if is_there(overload) else next(iter(overloads(exact(overload._name))), None)


def of_families(
    names: tuple[str, ...], everything: Callable[[], Overloads], among: frozenset[str] | None = None
) -> Overloads:
    """Every overload of the families that the dispatcher knows, by name.

    Args:
        names: The families.
        everything: Returns the overloads among which those that are no products look for theirs.
        among: Leaves out all but these, by name.
    """
    others = [family for family in names if family in families.FAMILIES]
    every = everything() if others else {}

    def is_chosen(name: str) -> bool:
        return any(families.belongs(name, lambda: every[name], family) for family in others)

    products = select.of_families(names, "dispatch", among)
    return _known([*products, *(every[name] for name in every if is_chosen(name))])


class Named(Mapping[str, torch._ops.OpOverload]):
    """Overloads by name, each made when it is asked for: torch takes a quarter of a second to make all.

    Args:
        names: Their names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> torch._ops.OpOverload:
        if name not in self._names:
            raise KeyError(name)
        return next(iter(overloads(exact(name))))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __or__(self, other: Iterable[str]) -> Named:
        return Named((*self, *other))

    __ror__ = __or__


def without(watched: Any, names: Collection[str]) -> Any:
    """What a block watches, without overloads that are gone: where names stand for themselves, they may stay."""
    if isinstance(watched, dict) and not watched.keys().isdisjoint(names):
        return {name: overload for name, overload in watched.items() if name not in names}
    if isinstance(watched, Named) and any(name in watched for name in names):
        return Named(name for name in watched if name not in names)
    return watched


# It refuses other shapes where `self` and `out` are one C++ reference, as `addr_` passes them. Kernels part the two.
_BY_REFERENCE = frozenset(("aten::addr.out",))
# Autograd does it all by itself.
_UNREACHED = frozenset(("aten::detach_",))
# What runs beside the program and computes nothing. `lift_fresh` returns its argument, of which torch then makes an
# object of a subclass, and refuses one that has become an object of Python before.
_NOT_COMPUTING = ("profiler::", "prim::", "_test::", "debugprims::", "debug_mode_ops::", "aten::lift_fresh")


def everything(but: Collection[str], among: frozenset[str] | None = None) -> Overloads:
    """The overloads with a kernel of their own that arrive at a backend whole, by name.

    Args:
        but: Those that cannot be watched.
        among: Leaves out all but these, by name. They must be loaded.
    """
    if among is None:
        names = {name for key in _BACKENDS for name in registered(key)}
        apart = {*registered("CompositeImplicitAutograd")}
        names -= apart.difference(*map(registered, _DENSE))
        bare = [key for key, row in ROWS.copy().items() if row.kind == "bare"]
        names.update(overload.name() for key in bare for overload in overloads(key))
    else:
        names = {each.name() for name in among for each in overloads(exact(name)) if arrives_whole(each)}
    names.difference_update(_BY_REFERENCE, _UNREACHED, but)
    rows = ROWS.copy()
    return Named(sorted(n for n in names if not n.startswith(_NOT_COMPUTING) and _row(rows, n).kind in WATCHED))


def _row(rows: Mapping[str, Op], name: str) -> Op:
    return rows.get(exact(name)) or rows.get(name.partition(".")[0]) or _OTHER


_OTHER = Op("")
WATCHED = ("leaf", "outer", "bare")
"""The kinds of operators that kernels show whole."""


def skipped() -> Overloads:
    """Composite convolution overloads, by name."""
    return _known(overload for packet in convolutions.OUTERMOST for overload in overloads(packet))


def named(
    entries: Iterable[Any], refuse: Callable[[torch._ops.OpOverload], str | None] = lambda overload: None
) -> Overloads:
    """The overloads that entries of `ops` name, without those that are taken apart, by name.

    Args:
        entries: Names, packets and overloads.
        refuse: Says why the engine cannot watch an overload; None if it can.

    Raises:
        TypeError: An entry that cannot name an operator.
        ValueError: An overload that cannot be watched, or no overload at all.
    """
    found = _known(select.select(entries, "dispatch"))
    chosen = {}
    for name in sorted(found):
        overload = found[name]
        if name in _BY_REFERENCE and len(found) > 1:
            continue
        if is_composite(overload):
            siblings = [other for other in found.values() if other._schema.name == overload._schema.name]
            if row_of(name).kind == "composite" or all(map(is_composite, siblings)):
                raise ValueError(
                    f"{name} is taken apart before dispatch level can see it; watch {select.parts(row_of(name))} "
                    "instead, or use level='function'"
                )
        elif (reason := refuse(overload)) is not None:
            raise ValueError(f"{name} {reason}")
        else:
            chosen[name] = overload
    if not chosen:
        raise ValueError("ops must name operators of the dispatcher, got none that it has; see torch.ops")
    return chosen


def _known(found: Iterable[torch._ops.OpOverload]) -> dict[str, torch._ops.OpOverload]:
    return note({overload._name: overload for overload in found if _is_registered(overload) and _is_loaded(overload)})


def _is_loaded(overload: torch._ops.OpOverload) -> bool:
    return overload._schema.name in OWN or successor(overload) is overload


def _is_registered(overload: torch._ops.OpOverload) -> bool:
    """Whether the dispatcher knows the overload; TorchScript has some of its own."""
    try:
        find_schema(overload._schema.name, overload._schema.overload_name)  # type: ignore[misc]
    except RuntimeError:
        return False
    return True
