"""Which engine serves an interceptor.

Invariant: a combination that does not exist is refused here, before any state has changed.
"""

from __future__ import annotations

from typing import Literal

from opintercept._core.checks import check_choice
from opintercept._core.hook import Level
from opintercept._engines import compiled, dispatch_mode, function_mode, kernels
from opintercept._engines.base import Engine

EngineChoice = Literal["auto", "kernel", "mode", "compiled"]

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (kernels.KernelEngine("kernel"), dispatch_mode.ENGINE, compiled.ENGINE)
}
"""The engines at dispatch level, by the name that `intercept(engine=...)` takes."""


def choose(level: Level, engine: str, threads: str) -> Engine:
    """The engine for the arguments of `intercept`.

    Raises:
        ValueError: An unknown engine, or a combination that does not exist.
    """
    check_choice("engine", engine, ("auto", *ENGINES))
    if level == "function":
        if engine != "auto":
            raise ValueError(f'function level has one engine, leave engine="auto" out, got engine={engine!r}')
        chosen: Engine = function_mode.ENGINE
    elif engine == "auto":
        chosen = ENGINES["compiled" if compiled.is_there() else "kernel"]
    else:
        chosen = ENGINES[engine]
    if threads == "all" and not chosen.every_thread:
        raise ValueError(
            f'threads="all" needs the kernel engine, since torch\'s modes belong to one thread, got {level} level with '
            f'the {chosen.name} engine; use level="dispatch" without engine=, or enter the interceptor in each thread'
        )
    return chosen
