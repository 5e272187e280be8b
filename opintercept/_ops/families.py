"""The families of `ops=` beside products: `"norm"`, `"softmax"`, `"view"` and their like, as packets of operators.

Invariant: a family holds packets, so that out= and in-place forms and other overloads belong to it too. A packet may
belong to several. Torch's own tags and schemas say what is elementwise, a reduction, a view, a copy or random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch

from opintercept._ops.scratch import COMMUNICATION, UNREAD, torchs_name

_NAMED = {
    "norm": (
        "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm fused_rms_norm"
        " native_batch_norm_legit native_batch_norm_legit_functional native_batch_norm_legit_no_training"
        " batch_norm_with_update batch_norm_with_update_functional batch_norm_no_update batch_norm layer_norm"
        " group_norm rms_norm instance_norm local_response_norm fused_add_rms_norm"
    ),
    "activation": (
        "relu relu6 gelu silu mish elu celu selu leaky_relu prelu prelu_kernel rrelu rrelu_with_noise hardswish"
        " hardsigmoid hardtanh hardshrink softshrink softplus softsign tanhshrink threshold glu sigmoid tanh"
        " log_sigmoid logsigmoid log_sigmoid_forward silu_and_mul gelu_and_mul gelu_tanh_and_mul"
    ),
    "softmax": "softmax log_softmax softmin safe_softmax masked_softmax sparse_softmax sparse_log_softmax",
    "copy": "copy clone copy_from copy_from_and_resize lift_fresh_copy foreach_copy foreach_clone contiguous to",
    "reduction": (
        "sum mean amax amin aminmax max min prod var std var_mean std_mean linalg_vector_norm norm nansum nanmean"
        " argmax argmin logsumexp all any median nanmedian count_nonzero"
    ),
    "embedding": "embedding embedding_dense embedding_sparse embedding_renorm embedding_bag embedding_bag_forward_only"
    " embedding_bag_dense embedding_bag_per_sample_weights",
}
_TAGS = {
    "elementwise": (torch.Tag.pointwise,),
    "reduction": tuple(filter(None, (getattr(torch.Tag, "reduction", None),))),  # torch 2.11 lacks it
    "copy": (torch.Tag.view_copy,),
    "random": (torch.Tag.nondeterministic_seeded,),
}
_PREFIXES = {"optimizer": ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")}

FAMILIES = (
    *("norm", "activation", "softmax", "elementwise", "reduction", "view", "copy", "embedding", "random", "optimizer"),
)
"""The names of these families, as `ops=` takes them."""


def belongs(name: str, overload: Callable[[], Any], family: str) -> bool:
    """Whether an overload belongs to a family.

    Args:
        name: Its name, `"aten::native_layer_norm"`.
        overload: Returns the overload itself, or None if torch has none. It is called only where its name does not
            decide.
        family: One of `FAMILIES`.
    """
    packet = name.partition(".")[0].partition("::")[2]
    if packet.startswith(_PREFIXES.get(family, ())) or _base(packet) in _words(family):
        return True
    tags = _TAGS.get(family, ())
    found = overload() if tags or family == "view" else None
    return found is not None and (is_view(found) if family == "view" else not set(tags).isdisjoint(found.tags))


@lru_cache(maxsize=4096)
def makes_values(func: Any) -> bool:
    """Whether what an overload or a function returns are values of its own, which are there when it returns.

    Those of views are not its own, and uninitialised memory has none.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    return not (torchs_name(schema.name) in UNREAD or schema.name.startswith(COMMUNICATION) or is_view(func))


def is_view(overload: Any) -> bool:
    """Whether an operator returns memory that it was given, and writes to none."""
    arguments, returns = overload._schema.arguments, overload._schema.returns
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    return bool(returns) and not writes and all(each.alias_info is not None for each in returns)


def functions_of(family: str, places: Iterable[Any]) -> frozenset[Any]:
    """The functions of torch that belong to a family by their names.

    Args:
        family: One of `FAMILIES`.
        places: The modules and classes in which to look.
    """
    found = (getattr(place, name, None) for place in places for word in _words(family) for name in (word, f"{word}_"))
    return frozenset(function for function in found if callable(function) and torch.overrides.resolve_name(function))


@cache
def _words(family: str) -> frozenset[str]:
    return frozenset(_NAMED.get(family, "").split())


def _base(packet: str) -> str:
    """The operator that a packet belongs to: `native_layer_norm` of `native_layer_norm_backward`."""
    for suffix in ("_backward_data", "_backward"):
        packet = packet.removesuffix(suffix)
    return packet.strip("_")
