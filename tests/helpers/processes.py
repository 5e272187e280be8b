"""Runs Python programs in children of a process that has torch already, which saves each of them two seconds.

The program sees a `__main__`, arguments, environment, folder and standard streams of its own, has one thread, and ends
as Python does.
Nothing of opintercept is loaded in it. A test of how the interpreter or an import starts runs a new Python instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# What the server imports; torch imports torch._dynamo itself, in more than a second, for the first optimizer of a
# program. Each library must start no thread: a child has none but the one that forked it.
LOADED = ("torch", "torch.nn.functional", "torch.distributed", "torch._dynamo", "numpy")
_QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Program:
    """A program that runs, with the files that its streams go to."""

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        input: str = "",
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        self.stdout = self.stderr = ""  # known at its end
        self._streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        request = {"argv": self.args, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        self._server = socket.socket(socket.AF_UNIX)
        with tempfile.TemporaryFile("w+") as given:
            given.write(input)
            given.seek(0)
            self.pid = _begin(self._server, _server(), request, [f.fileno() for f in (given, *self._streams)])

    def wait(self, timeout: float = 300) -> int:
        """Wait for its end, and return its exit status as `subprocess` has it. It is killed if that takes longer."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                self.returncode = self._end()
            except TimeoutError:
                self.kill()
                self._server.settimeout(None)
                self.returncode = self._end()
                raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr) from None
        return self.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, unless its end is known."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def says(self, text: str, timeout: float = 60) -> None:
        """Wait until it has written a text."""
        end = time.monotonic() + timeout
        while not any(text.encode() in os.pread(stream.fileno(), 1 << 20, 0) for stream in self._streams):
            assert time.monotonic() < end, f"{self.args} does not say {text!r}"
            time.sleep(0.01)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _end(self) -> int:
        status = os.waitstatus_to_exitcode(_number(self._server))
        self._server.close()
        self.stdout, self.stderr = map(_read, self._streams)
        return status


def run_beside(
    *commands: Sequence[object], timeout: float = 300, env: Sequence[Mapping[str, str]] = ()
) -> list[Program]:
    """Run programs beside each other, such as the ranks of a job, until all have ended; none runs after this.

    `env` has what each of them finds in its environment besides what this process has.
    """
    more = [*env, *[{}] * (len(commands) - len(env))]
    programs = [Program(each, env=os.environ | own) for each, own in zip(commands, more, strict=True)]
    try:
        for program in programs:
            program.wait(timeout)
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return programs


def run_python(
    *arguments: object,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run what `python *arguments` would: `-c` and a program, `-m` and a module, or a file, after `-W` and a filter.

    Raises:
        subprocess.CalledProcessError: With `check`, the status is not 0.
        subprocess.TimeoutExpired: It ran for longer than `timeout` seconds, and was killed.
    """
    program = Program(arguments, cwd=cwd, env=env, input=input)
    program.wait(timeout)
    assert program.returncode is not None
    done = subprocess.CompletedProcess(program.args, program.returncode, program.stdout, program.stderr)
    if check and done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done


def run_ranks(program: str, *arguments: object, ranks: int = 2, timeout: float = 300) -> None:
    """Run a file on the ranks of a process group, in the environment that torchrun gives, until all have ended well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests"}
    job |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    own = [job | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(ranks)]
    for done in run_beside(*[[program, *arguments]] * ranks, timeout=timeout, env=own):
        assert done.returncode == 0, done.stderr[-5000:]


def for_torchrun(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The environment in which torchrun starts its ranks where torch has been imported. It needs a file in a folder."""
    python = Path(folder, "python")
    command = shlex.join([sys.executable, __file__, _server()])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    return {"PYTHON_EXEC": str(python)}


def _begin(server: socket.socket, path: str, request: dict[str, Any], streams: list[int]) -> int:
    """Let the server begin a program, and return its number."""
    server.connect(path)
    text = json.dumps(request).encode()
    socket.send_fds(server, [b"%16d" % len(text)], streams)
    server.sendall(text)
    return _number(server)


def _number(server: socket.socket) -> int:
    text = b""
    while not text.endswith(b"\n"):
        text += server.recv(1)
    return int(text)


def _stand_for(path: str, arguments: list[str]) -> None:
    """Run a program in a child of the server, in the place of this process."""
    with socket.socket(socket.AF_UNIX) as server:
        request = {"argv": arguments, "cwd": str(Path.cwd()), "env": dict(os.environ)}
        pid = _begin(server, path, request, [0, 1, 2])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = os.waitstatus_to_exitcode(_number(server))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


@functools.cache
def _server() -> str:
    """Start the server of this process, and return the path of its socket."""
    # Not a TemporaryDirectory, which a forked child removes when Python 3.15 clears what it has to do at its exit.
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "socket")
    alive, ours = os.pipe()  # its end is ours: the server ends with us, however we do
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", path, str(alive)],
        env=os.environ | _QUIET,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[alive],
    )
    os.close(alive)

    def stop() -> None:
        os.close(ours)
        server.wait()
        shutil.rmtree(folder)

    atexit.register(stop)
    end = time.monotonic() + 600
    while not os.path.exists(path):
        assert server.poll() is None, "the server of processes has ended"
        assert time.monotonic() < end
        time.sleep(0.01)
    return path


def _serve(path: str, alive: int) -> dict[str, Any]:
    """Fork a child for each request. Returns in the child, with the request."""
    import gc
    import importlib
    import select

    environment = set(os.environ)
    for name in LOADED:
        importlib.import_module(name)
    _leave_libraries_as_they_are()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    children: dict[int, socket.socket] = {}
    waited_for: list[Any] = [listener, woken, alive]
    while True:
        ready = select.select(waited_for, [], [])[0]
        if alive in ready:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if woken in ready:
            woken.recv(4096)
            while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with children.pop(ended[0]) as client:
                    _tell(client, ended[1])
        if listener not in ready:
            continue
        client = listener.accept()[0]
        head, streams, _, _ = socket.recv_fds(client, 16, 3)
        request: dict[str, Any] = _receive(client, int(head))
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (listener, woken, wakes, client, *children.values()):
                each.close()
            os.close(alive)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            _take(request["env"], environment)
            return request
        children[pid] = client
        for stream in streams:
            os.close(stream)
        _tell(client, pid)


def _leave_libraries_as_they_are() -> None:
    """Let a child not destroy what libraries that are loaded by now hold outside of Python: 0.2 s for those of torch.

    What is registered last comes first: the libraries that the child loads are destroyed before.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # that of Linux
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)


def _receive(client: socket.socket, size: int) -> Any:
    text = b""
    while len(text) < size:
        text += client.recv(size - len(text))
    return json.loads(text)


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits any longer
        client.sendall(b"%d\n" % number)


def _take(wanted: dict[str, str], at_start: set[str]) -> None:
    """Take an environment, and keep what torch has set in it while it was imported."""
    for name in set(os.environ) - set(wanted):
        if name in at_start:
            del os.environ[name]
    os.environ.update(wanted)


def _run(arguments: list[str], cwd: str) -> None:
    """Run a program as `__main__`, in place of this file."""
    import linecache
    import runpy
    import types
    import warnings

    os.chdir(cwd)
    while arguments[0] in ("-W", "-u"):
        if arguments.pop(0) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    first, *rest = arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    # The folder of this file, which comes first, is no place for a program's imports.
    if first == "-m":
        sys.path[:1] = [cwd, *extra]
        sys.argv[:] = rest
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.path[:1] = ["", *extra]
        sys.argv[:] = ["-c", *rest[1:]]
        if sys.version_info >= (3, 13):  # tracebacks show its lines
            linecache.cache["<string>"] = len(rest[0]), None, rest[0].splitlines(keepends=True), "<string>"
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = os.path.abspath(first)
        sys.path[:1] = [os.path.dirname(main.__file__), *extra]
        sys.argv[:] = arguments
        with open(first, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, main.__dict__)


def _without_ours(hook: Any) -> Any:
    """Let an excepthook not see the frames of this file."""
    here = __file__  # Python 3.15 takes it away from a program that has ended

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == here:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return excepthook


def _main() -> None:
    if sys.argv[1] != "--serve":
        _stand_for(sys.argv[1], sys.argv[2:])
    request = _serve(sys.argv[2], int(sys.argv[3]))
    try:
        _run(request["argv"], request["cwd"])
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = _without_ours(sys.excepthook)
        raise  # Python prints it, and ends as it does after any error


if __name__ == "__main__":
    _main()
