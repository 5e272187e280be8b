"""The operators of other libraries: one pack of rows for each library, loaded when a program has imported it.

Invariant: a pack imports no library, and the program's own `register_op` wins over it, whichever comes first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import import_module

from opintercept._core.errors import OpInterceptWarning, caller_level

PACKS = {
    "_C": "vllm",
    "_C_cache_ops": "vllm",
    "_moe_C": "vllm",
    "_vllm_fa2_C": "vllm",
    "_vllm_fa3_C": "vllm",
    "ao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "fbgemm": "fbgemm",
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn",
    "mslk": "fbgemm",
    "sgl_kernel": "sgl_kernel",
    "torchao": "torchao",
    "vllm": "vllm",
    "xformers": "xformers",
    "xformers_flash": "xformers",
    "xformers_flash3": "xformers",
}
"""The pack that has the rows of a dispatcher's namespace, a module of this package."""

MODULES = {
    "deep_gemm": "deep_gemm",
    "flashinfer": "flashinfer",
    "nvmath": "nvmath",
    "transformer_engine": "transformer_engine",
}
"""The pack that has the functions of a library which are no operators of the dispatcher, by its top-level module."""

# Without a lock of our own, which a forked child could find taken: Python imports a module once, whoever asks.
_finished: set[str] = set()
_told: dict[str, Exception] = {}


def load(namespaces: Iterable[str], modules: Iterable[str] = ()) -> None:
    """Load the packs of these namespaces and top-level modules, each once in a process. Others are ignored.

    A pack that cannot be imported is left out, with one warning.
    """
    wanted = {PACKS[name] for name in PACKS.keys() & set(namespaces)}
    wanted |= {MODULES[name] for name in MODULES.keys() & set(modules)}
    for pack in sorted(wanted - _finished):
        try:
            import_module(f"{__name__}.{pack}")
        except Exception as error:
            if _told.setdefault(pack, error) is error:
                warnings.warn(
                    f"opintercept does not know the operators of {pack}, because its pack cannot be imported "
                    f"({type(error).__name__}: {error}); declare those that you need with register_op",
                    OpInterceptWarning,
                    stacklevel=caller_level(),
                )
        _finished.add(pack)
