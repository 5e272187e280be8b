"""Gives torch a GPU that computes nothing: Python imports this file as it starts if its folder is on PYTHONPATH.

Whoever initialises the GPU imports from torch meanwhile, as torch does for a real one. At the end of the process, the
file that FAKE_GPU names has who has asked torch for a GPU, and so would have initialised its driver.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any

asked: list[str] = []


class _AfterTorchCuda(importlib.abc.MetaPathFinder):
    """Changes `torch.cuda` while torch is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        plain = loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            _change(module)

        loader.exec_module = exec_module
        return spec


def _change(cuda: Any) -> None:
    def asks(name: str, answer: Any, *, initialises: bool) -> None:
        def ask(*_: Any, **__: Any) -> Any:
            asked.append(name)
            if initialises:
                import torch.utils.collect_env  # noqa: F401 - the thread waits here for whoever imports torch

                cuda._initialized = True
            return answer

        setattr(cuda, name, ask)

    cuda.is_initialized = lambda: cuda._initialized
    asks("is_available", True, initialises=False)  # it initialises the driver, after which no child may be forked
    asks("device_count", 2, initialises=False)
    for name, answer in (("_lazy_init", None), ("current_device", 0), ("get_device_name", "Fake GPU")):
        asks(name, answer, initialises=True)


sys.meta_path.insert(0, _AfterTorchCuda())


@atexit.register
def _write() -> None:
    with open(os.environ["FAKE_GPU"], "w") as file:
        file.write("\n".join(asked))
