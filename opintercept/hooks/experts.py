"""`Experts`: how many tokens each expert of a mixture gets."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from opintercept._core.call import OpCall
from opintercept._core.tables import Cells, Table
from opintercept._core.text import counted
from opintercept._kit.copyable import Copyable
from opintercept._values.read import in_graph_capture, in_memory

_NUMBERED = re.compile(r"(.*\bexperts)\.(\d+)(.*)")  # a list of modules


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """The experts of one mixture.

    Attributes:
        module: Qualified name of the module that holds them.
        tokens: How many tokens each expert got in all forward calls.
        imbalance: The largest of these, divided by their mean: 1 if all experts get as many tokens, and the number of
            experts if one gets all.
    """

    module: str
    tokens: list[int]
    imbalance: float


class Experts(Copyable, Table):
    """Counts the tokens that each expert of a mixture of experts gets in the forward pass.

    It reads which expert a product belongs to from the ends of the groups in `_grouped_mm` (`offs`), from the numbers
    of the experts in fused kernels of other libraries (`topk_ids`), from the place of a weight in a tensor of all
    experts' weights, or from the name of a module, `mlp.experts.3`. A program that gathers the weights of all tokens
    and multiplies them in one batch says nothing of this, and is not counted. The counts stay on the device until they
    are read. `str(experts)` is a table.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> class Mixture(torch.nn.Module):
        ...     def forward(self, x, weights):
        ...         ends = torch.tensor([4, 5, 5, 8], dtype=torch.int32)
        ...         return torch._grouped_mm(x, weights, offs=ends)
        >>> experts = hooks.Experts()
        >>> with intercept(experts):
        ...     _ = Mixture()(torch.ones(8, 16), torch.ones(4, 16, 16))
        >>> [(row.module, row.tokens, row.imbalance) for row in experts.rows()]
        [('Mixture', [4, 1, 0, 3], 2.0)]
    """

    reads = ("module",)
    _row = ExpertsRow

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], torch.Tensor] = {}  # by module and product
        self._lock = threading.RLock()

    def post(self, call: OpCall) -> None:
        """Count the tokens of a forward call."""
        found = _tokens(call, call.module or "") if call.phase == "forward" else None
        if found is None:
            return
        module, product, tokens = found
        with self._lock:
            known = self._sums.get((module, product), tokens.new_zeros(0))
            most = max(len(known), len(tokens))
            self._sums[module, product] = pad(known, (0, most - len(known))) + pad(tokens, (0, most - len(tokens)))

    def rows(self) -> list[ExpertsRow]:
        """The mixtures in the order of their first calls; waits for the device."""
        firsts: dict[str, torch.Tensor] = {}
        with self._lock:
            for (module, _), tokens in self._sums.items():
                firsts.setdefault(module, tokens)  # an expert's further products have the same tokens
        counts = {module: tokens.tolist() for module, tokens in firsts.items()}
        return [
            ExpertsRow(module, tokens, max(tokens, default=0) * len(tokens) / (sum(tokens) or 1))
            for module, tokens in counts.items()
        ]

    def _held(self) -> str:
        return counted(len({module for module, _ in self._sums}), "mixture")

    def _cells(self) -> Cells:
        cells = [
            [row.module, _short(row.tokens), str(sum(row.tokens)), str(row.tokens.count(0)), f"{row.imbalance:.2f}"]
            for row in self.rows()
        ]
        return Cells(["module", "tokens of each expert", "all", "idle experts", "largest / mean"], cells, left=2)


def _short(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens[:16])) + " ..." * (len(tokens) > 16)


def _tokens(call: OpCall, module: str) -> tuple[str, str, torch.Tensor] | None:
    """The module that holds the experts, which of their products this is, and how many tokens each expert gets."""
    lhs, rhs, tensors = call.lhs, call.rhs, call.tensors
    ends, ids = tensors.get("offs"), tensors.get("topk_ids")
    if rhs is None or lhs is None or any(in_graph_capture(each) for each in (ends, ids) if each is not None):
        return None
    if ends is not None:
        known = in_memory(ends) and lhs.dim() == 2 and rhs.dim() == 3
        return (module, str(rhs.shape), ends.long().diff(prepend=ends.new_zeros(1))) if known else None
    if ids is not None:
        number = next((each.shape[0] for each in tensors.values() if each.dim() == 3), 0)
        return (module, "", ids.flatten().long().bincount(minlength=number)) if in_memory(ids) else None
    tokens = lhs.shape[:-1].numel()
    if (named := _NUMBERED.fullmatch(module)) is not None:
        return named[1], named[3], _one(int(named[2]), tokens)
    base = rhs._base if "expert" in module else None
    if base is None or base.dim() != 3 or rhs.dim() != 2 or sorted(rhs.shape) != sorted(base.shape[1:]):
        return None
    number, rest = divmod(int(rhs.storage_offset() - base.storage_offset()), base.stride(0))
    return None if rest else (module, str(base.shape), pad(_one(number, tokens), (0, base.shape[0] - number - 1)))


def _one(expert: int, tokens: int) -> torch.Tensor:
    return torch.tensor([0] * expert + [tokens])
