"""The operators that `ops=` selects, and hints for names that select none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from opintercept._core.text import short_name
from opintercept._ops import families
from opintercept._ops.generated import GeneratedKernel
from opintercept._ops.op import Op
from opintercept._ops.patched_functions import is_patched
from opintercept._ops.table import HIGHER_ORDER, PLACES, ROWS, exact, functions, overloads, row_of, rows_for

PRODUCTS = ("matmul", "convolution")
FAMILIES = (*PRODUCTS, *families.FAMILIES)
ALL = "all"


class Selection(NamedTuple):
    """What `ops=` asks for.

    Attributes:
        families: The families that it names, `"all"` among them.
        entries: Its other entries: names, packets, overloads, functions.
        without: The families that it leaves out, `"-view"`.
    """

    families: tuple[str, ...]
    entries: list[Any]
    without: tuple[str, ...]

    @property
    def everything(self) -> bool:
        """Whether every operator is watched, but for families that are left out."""
        return ALL in self.families


def split(ops: Any) -> Selection:
    """Split `ops` into families and other entries.

    Raises:
        ValueError: There is no entry, or only families to leave out, or one of them is no family.
    """
    one = isinstance(ops, (str, torch._ops.OpOverloadPacket)) or not isinstance(ops, Iterable)
    entries = [ops] if one else list(ops)
    named = [entry for entry in entries if isinstance(entry, str)]
    without = tuple(entry[1:] for entry in named if entry.startswith("-"))
    entries = [entry for entry in entries if not (isinstance(entry, str) and entry.startswith("-"))]
    if not entries:
        raise ValueError(f"ops must name at least one operator, got {ops!r}; leave it out to watch the whole family")
    for family in without:
        if family not in FAMILIES:
            raise ValueError(f"ops can leave out families, got '-{family}'; {_hint(family, FAMILIES)}")
    chosen = tuple(family for family in (ALL, *FAMILIES) if family in named)
    others = [e for e in entries if not isinstance(e, str) or e not in chosen]
    return Selection(chosen, others, without)


def patched_of(chosen: Selection) -> frozenset[str]:
    """Return the names of the functions that `ops=` selects, of those that `register_op` has declared.

    Raises:
        ValueError: A name is not declared.
    """
    declared = frozenset(ROWS.patched)
    named = frozenset(filter(is_patched, chosen.entries))
    for name in sorted(named - declared):
        raise ValueError(f"ops must name functions that register_op has declared, got {name!r}; declare it first")
    whole = "matmul" in chosen.families or (chosen.everything and "matmul" not in chosen.without)
    return declared if whole else named


def of_families(
    names: tuple[str, ...], level: Literal["function", "dispatch"], among: frozenset[str] | None = None
) -> frozenset[Any]:
    """Return the overloads of families of products and, at function level, the functions of all families.

    Args:
        names: The families.
        level: The level.
        among: Overloads by name; then only those of them are returned, and no functions.
    """
    if among is not None:
        declared = [name for name in among if any(family_of(row) in names for row in rows_for(name))]
        return frozenset(overload for name in declared for overload in overloads(exact(name)))
    # A copy: another thread may declare operators meanwhile.
    keys = [key for key, row in ROWS.copy().items() if family_of(row) in names]
    found = frozenset(overload for key in keys for overload in overloads(key))
    if level == "dispatch":
        return found
    others = (families.functions_of(name, [owner for _, owner, _ in PLACES]) for name in names if name not in PRODUCTS)
    return found.union((f for f, row in functions().items() if family_of(row) in names), *others)


def holds_watched(kernel: GeneratedKernel, chosen: Selection, keys: Any) -> bool:
    """Whether `ops=` selects one of the operators that a generated kernel stands for.

    Args:
        kernel: The kernel. If its operators are not known, `"all"` alone selects it.
        chosen: What `ops=` asks for.
        keys: What the engine watches: overloads, or names of overloads; None for everything.
    """
    if chosen.everything:
        return not kernel.ops or any(not _in_families(op, chosen.without) for op in kernel.ops)
    return any(_in_families(op, chosen.families) or _is_among(op, keys) for op in kernel.ops if _computes(op, kernel))


def _in_families(op: str, names: tuple[str, ...]) -> bool:
    found = overloads(op)
    for name in names:
        if name in PRODUCTS:
            if any(family_of(row) == name for row in rows_for(op)):
                return True
        elif found and families.belongs(op, lambda: found[0], name):
            return True
    return False


def _is_among(op: str, keys: Any) -> bool:
    return keys is None or any(overload in keys or overload._name in keys for overload in overloads(op))


def _computes(op: str, kernel: GeneratedKernel) -> bool:
    """Whether the kernel computes an operator of its name: it may only add the bias to what another has computed."""
    return kernel.multiplies or not rows_for(op)


def family_of(row: Op) -> str:
    """Return the family of `ops=` to which a row belongs; `"other"` if it is no product."""
    return row.family if row.family in ("convolution", "other") else "matmul"


def select(entries: Iterable[Any], level: Literal["function", "dispatch"]) -> frozenset[Any]:
    """Return the overloads at dispatch level, or the functions at function level, that entries of `ops=` name.

    Raises:
        TypeError: An entry has a type that the level does not take.
        ValueError: A name is unknown.
    """
    one = _overloads_of if level == "dispatch" else _functions_of
    return frozenset(key for entry in entries for key in one(entry))


def _overloads_of(entry: Any) -> list[Any]:
    if isinstance(entry, torch._ops.OpOverload):
        return [entry]
    if isinstance(entry, torch._ops.OpOverloadPacket):
        return [getattr(entry, name) for name in entry.overloads()]
    if not isinstance(entry, str):
        raise TypeError(
            f"ops at dispatch level must be names, OpOverloadPackets or OpOverloads, got {entry!r}; "
            "pass torch.ops.aten.mm or 'mm', or use level='function'"
        )
    packet, _, overload = (entry if "::" in entry else f"aten::{entry}").partition(".")
    found = [o for o in overloads(packet) if not overload or o._overloadname == overload]
    if not found:
        raise _unknown(entry, [name.removeprefix("aten::") for name in ROWS])
    return found


def _functions_of(entry: Any) -> list[Any]:
    if isinstance(entry, str):
        short = entry.removeprefix("aten::")
        found = [
            function
            for function, row in functions().items()
            if row.name == entry or row.name.rpartition(".")[2].strip("_") == short.strip("_")
        ]
        if not found:
            places = [getattr(owner, short, None) for _, owner, _ in PLACES]
            found = [place for place in places if callable(place) and torch.overrides.resolve_name(place)]
        if not found:
            raise _unknown(entry, [row.name.rpartition(".")[2] for row in functions().values()])
        return found
    if entry in functions() or (callable(entry) and torch.overrides.resolve_name(entry)):
        return [entry]
    raise TypeError(f"ops at function level must be names or functions of torch, got {entry!r}")


def _unknown(name: str, known: Iterable[str]) -> ValueError:
    return ValueError(f"ops must be names of operators, got unknown op {name!r}; {_hint(name, (*known, *FAMILIES))}")


def _hint(name: str, known: Iterable[str]) -> str:
    plain, names = name.removeprefix("aten::"), sorted(set(known))
    families = [family for family in FAMILIES if family in names and family.startswith(plain)]
    close = families or difflib.get_close_matches(plain, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}" if close else "see torch.ops for all names"


_PARTS = {
    "attention": "'_scaled_dot_product_flash_attention' and its like, or 'bmm' for the math path",
    "fused": "'mm' and 'addmm', or 'mkldnn_rnn_layer' and '_cudnn_rnn' for a fused LSTM",
    "sparse": "'_sparse_addmm' and 'addmm'",
    "low precision": "its namespace's operators",
    "convolution": "'convolution' and 'convolution_backward'",
    "other": "what ops='all' shows of it",
}


def parts(row: Op) -> str:
    """Return what to watch at dispatch level instead of a composite operator, for a message."""
    return _PARTS.get(row.family, "'mm', 'addmm', 'bmm', 'mv' and 'dot'")


def why_never(name: str, level: Literal["function", "dispatch"], keys: Any, whole: tuple[str, ...]) -> str | None:
    """Return why no watched call can have this name and what to write instead, or None if one can.

    Args:
        name: An operator's name, with or without its namespace, as in `hooks.when`.
        level: The level of the calls.
        keys: What the engine watches: names of overloads, or functions; None for everything.
        whole: The families that are whole in `keys`. Their operators that only other builds of torch have count
            as watched, so that one test serves all devices.
    """
    if is_patched(name):
        return None if name in ROWS else "nobody has declared it; declare it with register_op"
    names = {row_of(key).name for key in keys} if isinstance(keys, Iterable) else None
    known = {short_name(full) for full in (ROWS if names is None else names)}
    if names is not None:
        if whole and level == "dispatch":
            names.update(row.name for row in ROWS.values() if row.kind == "leaf" and family_of(row) in whole)
            # Leaves out "linear", which means torch's own and not `quantized::linear`.
            apart = {short_name(row.name) for row in ROWS.values() if row.kind == "composite"}
            known = {short_name(full) for full in names} - {short for short in apart if f"aten::{short}" not in names}
        if name in names or name in known:
            return None
    packet, not_watched = _packet(name), None if names is None else "it is not watched; name it in ops="
    if level == "function":
        if _is_function(name) or _exists(name):
            return not_watched
        return f"there is no such operator; {_hint(name, (short_name(row.name) for row in functions().values()))}"
    if any(name == row.name for row in functions().values()):
        return "it is a function; use level='function'"
    if overloads(packet.partition(".")[0]) and "." in packet:
        return f"calls are named without the overload, {name.partition('.')[0]!r}"
    row = row_of(name if name in HIGHER_ORDER else packet)
    if names is not None and row.kind == "composite":
        all_of_them = ", leave op out for the whole family" if packet == "aten::matmul" else ""
        return f"dispatch level sees only its parts; name {parts(row)} instead{all_of_them}, or use level='function'"
    if names is not None and row.kind == "seen":
        return "the kernel engine sees the products that it runs; use engine='mode' to see it whole"
    if not _exists(name):
        return f"there is no such operator; {_hint(name, known)}"
    return not_watched


def _is_function(name: str) -> bool:
    place: Any = torch
    for part in name.split(".")[1:] if name.startswith("torch.") else ():
        place = getattr(place, part, None)
    try:
        return bool(_functions_of(name if place is torch else place))
    except (TypeError, ValueError):
        return False


def _packet(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


def _exists(name: str) -> bool:
    if name in HIGHER_ORDER or overloads(_packet(name)):
        return True
    # Without a namespace, the name may belong to an operator that the program has defined.
    spaces = [space for space, value in vars(torch.ops).items() if isinstance(value, torch._ops._OpNamespace)]
    return "::" not in name and any(overloads(f"{space}::{name}") for space in spaces)
