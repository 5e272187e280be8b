"""`CallSite`, the module and the source line that a call comes from.

Must not import torch.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Sequence
from types import CodeType
from typing import NamedTuple

Line = tuple[str, int, str]
"""A file, a line number and a function."""


class KernelPart(NamedTuple):
    """One operator that a generated kernel computes.

    Attributes:
        op: The operator, after torch.compile has decomposed it, `"aten::exp"` for a part of a softmax.
        module: The module that runs it; None if it is not known.
        source: The program's line, or None.
        node: Its name in the compiled graph, `"exp_1"`.
    """

    op: str
    module: str | None
    source: str | None
    node: str


class CallSite:
    """Where in the program a call comes from.

    Attributes:
        aliases: The names of the innermost `nn.Module`, several if it is registered in several places; `("",)` outside
            of all modules, `()` if unknown.
        code: The program's code object that made the call, or None if unknown.
        instruction: The offset of the instruction in `code`, in bytes; -1 without `code`.
        line: The file, line number and function, if they are known and `code` is not.
    """

    __slots__ = ("aliases", "code", "instruction", "line")

    def __init__(
        self,
        aliases: tuple[str, ...],
        code: CodeType | None,
        instruction: int,
        line: tuple[str, int, str] | None = None,
    ) -> None:
        self.aliases = aliases
        self.code = code
        self.instruction = instruction
        self.line = line

    @property
    def module(self) -> str | None:
        """The first of the names, or None."""
        return self.aliases[0] if self.aliases else None

    @property
    def parts(self) -> tuple[KernelPart, ...]:
        """What a generated kernel computes, as far as that is known; nothing for other calls."""
        return ()

    @property
    def source(self) -> str | None:
        """The source line, `"model.py:42 in forward"`, or None. It is only looked up here, since that takes long."""
        if self.code is None:
            return None if self.line is None else _written(*self.line)
        key = (id(self.code), self.instruction)
        known = _sources.get(key)
        if known is None:
            if len(_sources) >= 4096:  # a program that keeps making code, such as a notebook
                _sources.clear()
            known = _sources[key] = (self.code, _source(self.code, self.instruction))
        return known[1]

    def common(self, other: CallSite) -> CallSite:
        """Return what two places have in common, for a call that comes from one of them."""
        aliases = self.aliases if self.aliases == other.aliases else ()
        mine, its = ((place.code, place.instruction, place.line) for place in (self, other))
        return CallSite(aliases, *(mine if mine == its else (None, -1, None)))


_sources: dict[tuple[int, int], tuple[CodeType, str | None]] = {}
atexit.register(_sources.clear)  # see `_origin.stack`


def _source(code: CodeType, instruction: int) -> str | None:
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return _written(code.co_filename, line, code.co_name)
    return None


def _written(file: str, line: int | None, function: str) -> str:
    # After a graph break, Dynamo runs the rest of a function under a name of its own.
    resumed = re.search(_RESUMED, function)
    return f"{_file(file)}:{line} in {function if resumed is None else resumed[1]}"


def written_lines(lines: Sequence[Line]) -> str | None:
    """The lines as text, `"model.py:42, 43 in forward"`; None if there are none."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for file, line, function in lines:
        head, tail = _written(file, line, function).split(f":{line} in ", 1)
        of_function = numbers.setdefault((head, tail), [])
        if str(line) not in of_function:
            of_function.append(str(line))
    return "; ".join(f"{file}:{', '.join(found)} in {function}" for (file, function), found in numbers.items()) or None


def _file(name: str) -> str:
    """Return the name of a file for a source line. A notebook's cell has no file, and sometimes a number."""
    number: object = None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        # IPython names a cell after a hash of its text and keeps the number in this private attribute.
        number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(name)
    if number is None and (found := re.search(_NUMBERED_CELL, name)):
        number = found[1]
    if number is not None:
        return f"<cell {number}>"
    if (name.startswith("<") and name.endswith(">")) or re.search(_CELL, name):
        return "<cell>"
    return os.path.basename(name).rpartition(">.")[2]  # torch.package has <torch_package_0>.net.py


_RESUMED = r"^(?:torch_dynamo_resume_in_)+(.+?)(?:_at_\d+)+$"
_CELL = r"(?:^|[/\\])(?:ipykernel_\d+[/\\][^/\\]*|ipython-input-[^/\\]*)$"
_NUMBERED_CELL = r"(?:^<|[/\\])ipython-input-(\d+)-[^/\\]*$"
NOWHERE = CallSite((), None, -1)
