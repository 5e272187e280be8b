"""Names of modules and operators, as programs have them. Must not import torch."""

from __future__ import annotations

import re
from functools import lru_cache

from opintercept._core.text import short_name

# torch wraps modules in modules of these names, which are not part of the program's own names.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Names of models after the first: `Critic.linear1`, `Critic#2.linear1`, and `Critic` itself.
_MODEL = re.compile(r"[A-Z]\w*(?:#[0-9]+)?")
_OF_MODEL = re.compile(rf"({_MODEL.pattern})\.")


@lru_cache(4096)
def module_name(name: str | None) -> str | None:
    """The module's name without wrappers: `_orig_mod.encoder.0` is `encoder.0`."""
    if name is None or "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@lru_cache(4096)
def operator_name(op: str) -> str:
    """The operator's own name: `mm` for `aten::mm`, `addmm` for `torch.Tensor.addmm_`."""
    name = short_name(op)
    return name if name.endswith("__") else name.rstrip("_") or name


def first_models(a: set[str], b: set[str]) -> tuple[str, str] | None:
    """The classes of the models that run first in A and in B; None if it is the same model.

    Modules of the model that runs first have plain names, and the names in other models begin with the model's class.
    A class that occurs only in the names of A is therefore that of B's first model, and the other way round. The rest
    of the names must confirm it.
    """
    only_a, only_b = _classes(a) - _classes(b), _classes(b) - _classes(a)
    if len(only_a) != 1 or len(only_b) != 1:
        return None
    (of_b,), (of_a,) = only_a, only_b
    for name, names, others in ((of_a, a, b), (of_b, b, a)):
        plain = {each for each in names if is_plain(each)}
        named = {each.removeprefix(f"{name}.") for each in others if each.startswith(f"{name}.")}
        if 2 * len(plain & named) < max(len(plain), len(named)):
            return None
    return of_a, of_b


def _classes(names: set[str]) -> set[str]:
    return {match[1] for name in names if (match := _OF_MODEL.match(name))}


def is_plain(name: str) -> bool:
    return bool(name) and not _OF_MODEL.match(name) and not _MODEL.fullmatch(name)
