"""`Texts` and `read_texts`: JSON lines that calls refer to by number or by place, each with its checksum.

Invariant: a line is what was written, or it is found to be damaged. Must not import torch.
"""

from __future__ import annotations

import itertools
import json
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from opintercept.runs.store.untrusted import parsed

MOST = 1 << 16  # texts whose numbers are remembered; a further one makes all of them new
MAX_LINE = 1 << 22  # bytes; no line that is written comes near
_CHECK = b',"crc":"'

compact = json.JSONEncoder(separators=(",", ":")).encode


def sealed(members: dict[str, Any]) -> bytes:
    """The line of a JSON object, which must have members."""
    text = compact(members).encode()
    return b'%s%s%08x"}\n' % (text[:-1], _CHECK, zlib.crc32(text))


def opened(line: bytes) -> bytes | None:
    """The JSON object of a line; None if it is not as `sealed` wrote it."""
    text, check, rest = line.rpartition(_CHECK)
    text += b"}"
    return text if check and rest == b'%08x"}\n' % zlib.crc32(text) else None


def members_of(line: bytes) -> Any:
    """The object of a line as plain data; None if it is damaged or no JSON."""
    text = opened(line)
    return None if text is None else parsed(text)


def lines_of(data: bytes) -> Iterator[bytes]:
    """The whole lines of a file."""
    start = 0
    while end := data.find(b"\n", start) + 1:
        yield data[start:end]
        start = end


_NUMBER = b'{"number":'


def number_in(line: bytes) -> int | None:
    """The number of a text that calls share; None if the line is damaged, or has none."""
    if opened(line) is None or not line.startswith(_NUMBER):
        return None
    digits = line[len(_NUMBER) : len(_NUMBER) + 11].partition(b",")[0]
    return int(digits) if digits.isdigit() and len(digits) < 11 else None


class Texts:
    """Numbers texts, for several threads. Each line says its number, so that their order in a file does not matter."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, tuple[int, Any]] = {}
        self._next = itertools.count()
        self._new: list[bytes] = []
        self._lock = threading.RLock()  # a signal handler may ask meanwhile

    def number(self, key: Hashable, members: Callable[[], dict[str, Any]], alive: Any = None) -> int:
        """The number of a text, by a key that equal texts share.

        `alive` is kept alive, so that no other object gets an address that is in the key.
        """
        known = self._numbers.get(key)
        if known is None:
            made = members()
            with self._lock:
                known = self._numbers.get(key)
                if known is None:
                    if len(self._numbers) >= MOST:
                        self._numbers.clear()
                    number = next(self._next)
                    self._new.append(sealed({"number": number} | made))
                    known = self._numbers[key] = (number, alive)
        return known[0]

    def take(self) -> bytes:
        """The lines that are new since the last time."""
        with self._lock:
            new, self._new = self._new, []
        return b"".join(new)
