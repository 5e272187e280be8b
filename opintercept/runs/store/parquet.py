"""`StoreColumns` and `StoreWriter`: read and write the columns of a process as Parquet files, with DuckDB.

Invariant: anyone may have written the files. DuckDB gets their exact names, may open nothing else, has a limit of
memory and loads no extension; what it reads is checked. Must not import torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.record import Phase
from opintercept.runs.store.builder import Builder, MemoryColumns
from opintercept.runs.store.columns import (
    CHUNK,
    FLAGS,
    VALUES,
    Array,
    Arrays,
    CallSignature,
    Columns,
    StoredCallSite,
    Texts,
    dtype_of,
)
from opintercept.runs.store.progress import report
from opintercept.runs.store.untrusted import MAX_TEXT, count, parsed

if TYPE_CHECKING:
    import duckdb

SCHEMA = 2
ABOUT = "store.json"
FILE = 2 * CHUNK  # calls of a file
IN_MEMORY, IN_MEMORY_TEXTS = 1 << 17, 1 << 23  # calls and characters that need no file
ROWS = 1 << 12  # calls of which columns are made together
BLOCK = 1 << 22  # characters of signatures, call sites and texts that are written together
MEMORY = "300MB"  # that DuckDB may take
MAX_ABOUT = 1 << 20  # bytes of `store.json`
_FORM = f"(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 9, PARQUET_VERSION v1, ROW_GROUP_SIZE {CHUNK})"
MOST_ROWS = 1 << 18  # of a file of signatures, call sites or texts, ten times as many as any has that was written
MOST_BYTES = 1 << 26  # that the texts of such a file may take
_LOADED = 8  # files of signatures, call sites and texts that are remembered
_META = ("shape", "dtype", "device")


def is_installed() -> bool:
    """Whether DuckDB is."""
    from importlib.util import find_spec

    return find_spec("duckdb") is not None


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """A connection that can open the files of this folder only.

    Raises:
        ImportError: DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as missing:
        raise needs("a compacted run", "duckdb", "'opintercept[cli]'") from missing
    settings: dict[str, Any] = {
        "memory_limit": MEMORY,
        "threads": min(4, os.cpu_count() or 1),
        "allowed_directories": [f"{folder.absolute()}/"],
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "temp_directory": "",
        "pandas_analyze_sample": 0,
        "parquet_metadata_cache": True,
    }
    connection = duckdb.connect(":memory:")
    for name, value in settings.items():
        connection.execute(f"SET {name} = {_literal(value)}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower()


def _file(path: Path) -> str:
    """A path as SQL. DuckDB takes a name for a pattern only if there is no file of that very name."""
    return _literal(str(path.absolute()))


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:08d}.parquet"


class StoreWriter:
    """Writes the columns of one process into a folder. Nothing is complete before `close`.

    Each method raises an OSError if it cannot write.

    Args:
        folder: An existing folder.
        rank: The rank of the process.
        builder: Has made the columns of the first calls, which `add_columns` takes; a new one by default.
    """

    def __init__(self, folder: Path, rank: int, builder: Builder | None = None) -> None:
        self._folder, self._rank = folder, rank
        self._connection = connect(folder)
        self._builder = Builder(rank) if builder is None else builder
        self._pieces: list[Arrays] = []
        self._blocks: dict[str, list[int]] = {"looks": [], "sites": [], "texts": []}  # the first number in each file
        self._waiting = self._calls = self._signatures = self._call_sites = 0

    def add_line(self, line: bytes) -> int | None:
        """Add the call of a line, as `Builder.add_line` does."""
        added = self._builder.add_line(line)
        self.write_full()
        return added

    def write_full(self) -> None:
        """Write what the builder has if it fills a file."""
        if len(self._builder) >= ROWS or self._builder.size >= BLOCK:
            self.add_columns(self._builder.take())

    def add_columns(
        self, columns: Arrays, signatures: Sequence[str] = (), call_sites: Sequence[StoredCallSite] = ()
    ) -> None:
        """Add calls as columns, with the signatures and call sites that are new in them."""
        self._builder.signatures += signatures
        self._builder.call_sites += call_sites
        self._pieces.append(columns)
        self._waiting += len(columns["index"])
        if self._builder.size >= BLOCK:
            self._write_shared()
        while self._waiting >= FILE:
            self._write_calls(FILE)

    def close(self, **about: Any) -> None:
        """Write what is left, and at last the file without which no reader takes the folder for a store."""
        self.add_columns(self._builder.take())
        self._write_shared()
        if self._waiting:
            self._write_calls(self._waiting)
        self._connection.close()
        plain = {"schema": SCHEMA, "rank": self._rank, "calls": self._calls, "looks": self._signatures}
        text = json.dumps(plain | {"sites": self._call_sites, "blocks": self._blocks} | about)
        with open(self._folder / ABOUT, "w", encoding="ascii") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())

    def _write_calls(self, size: int) -> None:
        joined = {name: np.concatenate([piece[name] for piece in self._pieces]) for name in self._pieces[0]}
        self._pieces = [{name: column[size:] for name, column in joined.items()}]
        self._waiting -= size
        columns = {name: column[:size] for name, column in joined.items()}
        with np.errstate(over="ignore"):  # in a hostile run
            nanoseconds = np.rint(columns["elapsed"] * 1e9)
        whole = (nanoseconds / 1e9 == columns["elapsed"]) & (np.abs(nanoseconds) < 2**53)
        columns["ns"] = np.where(whole, nanoseconds, -1).astype(np.int64)
        columns["elapsed"] = np.where(whole, np.nan, columns["elapsed"])
        names = ["index", "step", "site", "look", "nullif(forward, -1) AS forward", "nullif(started, -1) AS started_ns"]
        names += ["nullif(thread, -1) AS thread", "nullif(ns, -1) AS elapsed_ns"]
        names += ["elapsed", *(f"nullif({name}, 0) AS {name}" if name.endswith("_hash") else name for name in VALUES)]
        first = self._calls
        query = ", ".join([f"{first} + row_number() OVER () - 1 AS call", f"{self._rank} AS rank", *names, *FLAGS])
        self._write("calls", first // FILE, f"SELECT {query} FROM columns", columns)
        self._calls += size

    def _write_shared(self) -> None:
        builder = self._builder
        texts, builder.signatures = builder.signatures, []
        rows = [(self._signatures + number, *_described(text), text) for number, text in enumerate(texts)]
        self._write_rows("looks", _SIGNATURE, rows)
        self._signatures += len(texts)
        call_sites, builder.call_sites = builder.call_sites, []
        self._write_rows(
            "sites",
            _CALL_SITE,
            [(self._call_sites + number, *call_site) for number, call_site in enumerate(call_sites)],
        )
        self._call_sites += len(call_sites)
        self._write_rows("texts", Texts._fields, builder.texts)
        builder.texts, builder.size = [], 0

    def _write_rows(self, kind: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        if not rows:
            return
        columns: Arrays = {}
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            columns[name] = np.empty(len(rows), object)
            columns[name][:] = [None if value is None else str(value) for value in values]
        casts = [f"{name}::{'BIGINT' if name in _WHOLE else 'VARCHAR'} AS {name}" for name in names]
        query = f"SELECT {self._rank} AS rank, {', '.join(casts)} FROM columns"
        self._write(kind, len(self._blocks[kind]), query, columns)
        self._blocks[kind].append(int(rows[0][0]))

    def _write(self, kind: str, number: int, query: str, columns: Arrays) -> None:
        import duckdb

        path = self._folder / _name(kind, number)
        self._connection.register("columns", columns)
        try:
            self._connection.execute(f"COPY ({query}) TO {_file(path)} {_FORM}")
        except duckdb.Error as failed:  # as Python's own writing does
            number = int(found[1]) if (found := re.search(r'"errno":"(\d+)"', str(failed))) else 0
            reason = os.strerror(number) if number else str(failed).partition("\n")[0][:200]
            raise OSError(number, reason, str(path)) from failed
        self._connection.unregister("columns")
        with open(path, "rb") as file:
            os.fsync(file.fileno())


_BLOCKS = {"looks": ("look", "text"), "sites": ("site", *StoredCallSite._fields), "texts": Texts._fields}
_CALL_SITE = ("site", *StoredCallSite._fields)
_SIGNATURE = [*("look", "op", "func", "autocast", "flops", "bytes", "opaque", "batch", "m", "n", "k")]
_SIGNATURE += [f"{role}_{name}" for role in ("lhs", "rhs", "bias", "output") for name in _META]
_SIGNATURE += ["arguments", "text"]
_WHOLE = frozenset(("call", "site", "look", "flops", "bytes", "batch", "m", "n", "k"))


def _described(text: str) -> list[Any]:
    """What is in the columns of a signature, for other programs; `text` alone has everything."""
    record = CallSignature(text).record
    row: list[Any] = [record.op, record.func, record.autocast, record.flops, record.bytes, record.opaque]
    row += [None] * 4 if record.gemm is None else record.gemm[:4]
    output = record.output[0] if isinstance(record.output, tuple) and record.output else record.output
    for meta in (record.lhs, record.rhs, record.bias, output):
        if meta is None or isinstance(meta, tuple):
            row += [None] * 3
        else:
            row += [list(meta.shape), meta.dtype, meta.device]
    arguments = parsed(text)["arguments"]
    return [*row, None if arguments is None else json.dumps(arguments)]


class StoreColumns(Columns):
    """The columns of a store.

    Args:
        folder: The folder that `StoreWriter` has written.
        rank: The rank of the process, whatever the store says.

    Attributes:
        skipped: How many lines of the journal were not calls.

    Raises:
        OpInterceptError: It cannot be read.
        ImportError: DuckDB is not installed.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        about = _about(folder)
        numbers = []
        for name in ("calls", "looks", "sites", "skipped"):
            try:
                numbers.append(count(about.get(name)))
            except ValueError:
                raise OpInterceptError(f"{folder / ABOUT} must have a count {name!r}") from None
        size, signatures, call_sites, self.skipped = numbers
        blocks = about.get("blocks")
        self._firsts = {kind: _firsts(blocks, kind, folder) for kind in _BLOCKS}
        self._loaded: OrderedDict[tuple[str, int], dict[int, tuple[Any, ...]]] = OrderedDict()
        self._checked: set[tuple[str, int]] = set()  # files whose number of rows is right
        self._connection = connect(folder)
        super().__init__(rank, size, signatures, call_sites)

    def signature_text(self, number: int) -> str:
        (text,) = self._row("looks", number)
        return str(text)

    def call_site(self, number: int) -> StoredCallSite:
        call_site = StoredCallSite(*(text and text[:MAX_TEXT] for text in self._row("sites", number)))
        if call_site.phase not in get_args(Phase) or call_site.grad_of not in (None, "lhs", "rhs"):
            raise self._damaged("a call site has an unknown phase")
        return call_site

    def texts(self, numbers: Array) -> Iterator[Texts]:
        return (Texts(number, *self._row("texts", number)) for number in numbers.tolist())

    def _row(self, kind: str, number: int) -> tuple[Any, ...]:
        """A signature, a call site or the texts of a call, out of the file that has it."""
        block = bisect_right(self._firsts[kind], number) - 1
        rows = self._loaded.get((kind, block))
        if rows is None:
            key, *names = _BLOCKS[kind]
            self._check_rows(kind, max(block, 0))
            self._check_texts(kind, max(block, 0), names)
            columns = ", ".join(f"CAST({name} AS VARCHAR)" for name in names)
            query = f"SELECT CAST({key} AS BIGINT), {columns} FROM {self._source(kind, max(block, 0))}"
            rows = self._loaded[kind, block] = {row[0]: row[1:] for row in self._query(query).fetchall()}
            if len(self._loaded) > _LOADED:
                self._loaded.popitem(last=False)
        if number not in rows:
            raise self._damaged(f"it has not all {kind}")
        return rows[number]

    def _check_texts(self, kind: str, number: int, names: Sequence[str]) -> None:
        """Refuse texts that take much more memory than any that were written: equal ones take no room on disk."""
        lengths = " + ".join(f"coalesce(strlen(CAST({name} AS VARCHAR)), 0)" for name in names)
        ((found,),) = self._query(f"SELECT coalesce(sum({lengths}), 0) FROM {self._source(kind, number)}").fetchall()
        if found > MOST_BYTES:
            raise self._too_large(kind, number, f"{MOST_BYTES} bytes of text", found)

    def _check_rows(self, kind: str, number: int) -> None:
        if (kind, number) not in self._checked:
            most = FILE if kind == "calls" else MOST_ROWS
            source = self._source(kind, number, "parquet_file_metadata")
            ((found,),) = self._query(f"SELECT num_rows FROM {source}").fetchall()
            if found > most:
                raise self._too_large(kind, number, f"{most} rows", found)
            self._checked.add((kind, number))

    def _too_large(self, kind: str, number: int, most: str, found: int) -> OpInterceptError:
        return self._damaged(
            f"{_name(kind, number)} must have at most {most}, as all that are written have, got {found}; delete the "
            "store, and read the run's lines if it has kept them"
        )

    def read(self, names: Sequence[str], first: int, end: int) -> Arrays:
        report(str(self._folder), end, len(self))
        joined: Arrays = {}
        for number in range(first // FILE, -(-end // FILE)) if names and first < end else ():
            low, high = max(first, number * FILE), min(end, (number + 1) * FILE)
            self._check_rows("calls", number)
            query = f"SELECT {', '.join(map(_column, names))} FROM {self._source('calls', number)}"
            read = self._query(f"{query} WHERE call >= {low} AND call < {high}").fetchnumpy()
            for name in names:
                piece = np.asarray(read[name], dtype_of(name))
                if len(piece) != high - low:
                    raise self._damaged("it has not all calls")
                if (low, high) == (first, end):
                    joined[name] = piece
                else:  # filled piece by piece, since a column of a long run takes much memory
                    joined.setdefault(name, np.empty(end - first, piece.dtype))[low - first : high - first] = piece
        if not joined:
            return {name: np.empty(0, dtype_of(name)) for name in names}
        for name, most in (("site", self.call_sites), ("look", self.signatures)):
            if name in joined and not ((joined[name] >= 0) & (joined[name] < most)).all():
                raise self._damaged(f"a call has an unknown {name}")
        return joined

    def spans(self, steps: range) -> Iterator[tuple[int, int]]:
        # A file that lies about the steps of its row groups hides calls that it might as well not have.
        columns = "row_group_num_rows, left(stats_min_value, 20), left(stats_max_value, 20)"
        for start in range(0, len(self), FILE):
            end = min(start + FILE, len(self))
            source = self._source("calls", start // FILE, "parquet_metadata")
            query = f"SELECT {columns} FROM {source} WHERE path_in_schema = 'step' ORDER BY row_group_id LIMIT {FILE}"
            for rows, low, high in self._query(query).fetchall():
                if not 0 < rows <= end - start:
                    raise self._damaged("it has not all calls")
                if _may_have(low, high, steps):
                    yield start, start + rows
                start += rows
            if start != end:
                raise self._damaged("it has not all calls")

    def _source(self, kind: str, number: int, function: str = "read_parquet") -> str:
        path = self._folder / _name(kind, number)
        try:
            regular = stat.S_ISREG(os.lstat(path).st_mode)
        except OSError:
            regular = False
        if not regular:
            raise self._damaged(f"{path.name} must be a plain file")
        return f"{function}({_file(path)})"

    def _query(self, query: str) -> duckdb.DuckDBPyConnection:
        import duckdb

        try:
            return self._connection.execute(query)
        except (duckdb.Error, UnicodeDecodeError) as failed:
            raise self._damaged(str(failed).partition("\n")[0][:200]) from failed

    def _damaged(self, why: str) -> OpInterceptError:
        return OpInterceptError(f"the store in {str(self._folder)!r} is damaged: {why}")


def _column(name: str) -> str:
    """A column as SQL, with the types that `Columns` has."""
    if name in FLAGS:
        return f"coalesce({name}::BOOLEAN, false) AS {name}"
    if name == "elapsed":
        return "coalesce(elapsed_ns / 1e9::DOUBLE, elapsed::DOUBLE, 'nan'::DOUBLE) AS elapsed"
    if name == "started":
        return "coalesce(started_ns::BIGINT, -1::BIGINT) AS started"
    kinds = {np.uint64: ("UBIGINT", "0"), np.float64: ("DOUBLE", "'nan'"), np.int32: ("INTEGER", "-1")}
    kind, unknown = kinds.get(dtype_of(name), ("BIGINT", "-1" if name in ("forward", "thread") else "0"))
    return f"coalesce({name}::{kind}, {unknown}::{kind}) AS {name}"


def _may_have(low: str | None, high: str | None, steps: range) -> bool:
    """Whether calls may be of these steps, given the smallest and the largest of theirs as Parquet has them."""
    try:
        return low is None or high is None or (int(low) < steps.stop and int(high) >= steps.start)
    except ValueError:
        return True


def _firsts(blocks: Any, kind: str, folder: Path) -> list[int]:
    """The first number in each file of signatures, call sites or texts."""
    try:
        firsts = [count(number) for number in blocks[kind]]
    except (KeyError, TypeError, ValueError):
        firsts = [1, 0]
    if firsts != sorted(firsts):
        raise OpInterceptError(f"{folder / ABOUT} must have the 'blocks' of {kind}")
    return firsts


def columns_of(rank: int, read: Callable[[Callable[[bytes], int | None]], Iterable[object]]) -> Columns:
    """Lines as columns: in memory if they are few or DuckDB is not installed, and otherwise in a temporary folder.

    Args:
        rank: The rank of the process.
        read: Gives lines to a function one by one, and yields for each that is a call.
    """
    builder = Builder(rank)
    pieces: list[Arrays] = []
    left = iter(read(builder.add_line))
    for _ in left:
        if len(builder) >= ROWS or builder.size >= IN_MEMORY_TEXTS:
            pieces.append(builder.take())
            large = len(pieces) * ROWS >= IN_MEMORY or builder.size >= IN_MEMORY_TEXTS
            if large and is_installed():
                break
    else:
        return MemoryColumns(rank, [*pieces, builder.take()], builder)
    folder = Path(tempfile.mkdtemp(prefix="opintercept-"))
    try:
        writer = StoreWriter(folder, rank, builder)
        for piece in pieces:
            writer.add_columns(piece)
        del pieces
        for _ in left:
            writer.write_full()
        writer.close(skipped=0)
        columns = StoreColumns(folder, rank)
    except BaseException as failed:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(failed, OSError):
            raise OpInterceptError(f"{failed}; set TMPDIR to a folder with more room") from failed
        raise
    weakref.finalize(columns, shutil.rmtree, folder, ignore_errors=True)
    return columns


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as failed:
        raise OpInterceptError(f"cannot open {str(path)!r} as a plain file: {failed}") from failed
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MAX_ABOUT) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    about = parsed(text.decode("ascii", "replace"))
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise OpInterceptError(f"{path} must be a store of schema {SCHEMA}; read it with the version that wrote it")
    return about
