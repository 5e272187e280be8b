"""That `opintercept run` records every process of a program: each call that it counts itself, in its own folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import sampled
from processes import Program, run_python

from opintercept import runs
from opintercept.cli.run.family import VARIABLE, can_follow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork"),
]
# Each process that works multiplies `n` times, and notes so many under its number.
WORK = """
    import multiprocessing, os, subprocess, sys, time

    def work(n, *more):
        import torch
        for _ in range(n):
            torch.ones(2, 3) @ torch.ones(3, 4)
        with open(f"counted/{os.getpid()}", "a") as file:
            file.write(f"{n}\\n")
        for function, *given in more:
            function(*given)
        return n
"""


def test_the_environment_has_the_file_by_which_children_are_followed() -> None:
    assert can_follow(), "install the package, as with `pip install -e .`: opintercept.pth is missing"


def start(folder: Path, program: str, *options: str, module: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `opintercept run --out run` on a program, or on a module with arguments, in a new Python."""
    (folder / "counted").mkdir(exist_ok=True)
    (folder / "program.py").write_text(textwrap.dedent(WORK) + textwrap.dedent(program))
    command = [sys.executable, "-m", "opintercept", "run", "--out", "run", *options, *(module or ["program.py"])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(folder: Path, program: str, *options: str, module: Sequence[str] = (), status: int = 0) -> str:
    """Run a program to its end, and return what it and `opintercept` print on stderr."""
    process = start(folder, program, *options, module=module)
    err = process.communicate(timeout=300)[1]
    assert process.returncode == status, err
    return err


def quick(folder: Path, program: str, *options: str, module: Sequence[str] = ()) -> Program:
    """Start the same where torch has been imported, which saves seconds."""
    (folder / "counted").mkdir(exist_ok=True)
    (folder / "program.py").write_text(textwrap.dedent(WORK) + textwrap.dedent(program))
    watched = module or ["program.py"]
    return Program(["-m", "opintercept", "run", "--out", "run", *options, *watched], cwd=folder)


def run_quick(folder: Path, program: str, *options: str, module: Sequence[str] = (), status: int = 0) -> str:
    """As `run`, where torch has been imported."""
    with quick(folder, program, *options, module=module) as done:
        assert done.wait() == status, done.stderr
    return done.stderr


def recorded(folder: Path) -> dict[int, int]:
    """How many calls each process has in its folder, by its number; that of the first one is 0."""
    opened = runs.open_run(folder / "run")
    counts = {}
    for rank, info in opened.infos.items():
        assert info.member is not None
        own = "parent" in info.member
        counts[int(info.member["pid"]) if own else 0] = len(list(opened.calls(rank)))
        assert opened.folder(rank).parent == folder / "run" if own else folder
    return counts


def counted(folder: Path) -> dict[int, int]:
    """How many calls each process has counted."""
    return {int(file.name): sum(map(int, file.read_text().split())) for file in (folder / "counted").iterdir()}


def finished(folder: Path) -> bool:
    return all(info.finished for info in runs.open_run(folder / "run").infos.values())


WAYS = ("fork", "spawn", "forkserver", "subprocess", "os.fork")
NESTED = """
    def start(how, depth):
        if how == "subprocess":
            subprocess.run([sys.executable, __file__, how, str(depth)], check=True)
        elif how == "os.fork":
            if not (child := os.fork()):
                nest(how, depth)
                sys.exit()
            assert not os.waitpid(child, 0)[1]
        else:
            process = multiprocessing.get_context(how).Process(target=nest, args=(how, depth))
            process.start()
            process.join()
            assert not process.exitcode

    def nest(how, depth):
        work(3, *([(start, how, depth - 1)] if depth else []))

    if __name__ == "__main__":
        if len(sys.argv) > 1:
            nest(sys.argv[1], int(sys.argv[2]))
        else:
            if TORCH:
                import torch
            start(HOW, 1)
"""


# With `--sampled` a way that starts a new Python is there once: what its parent has imported is not there.
IN_PARENT = [
    pytest.param(how, torch, id=f"{how}-{'torch in the parent' if torch else 'none'}")
    for how in WAYS
    for torch in (True, False)
    if not sampled.on or torch or how.endswith("fork")
]


@pytest.mark.parametrize(("how", "torch"), IN_PARENT)
def test_children_and_theirs_are_recorded_however_they_start(how: str, torch: bool, tmp_path: Path) -> None:
    program = NESTED.replace("HOW", repr(how)).replace("TORCH", str(torch))
    err = (run_quick if torch else run)(tmp_path, program)
    assert sorted(counted(tmp_path).values()) == [3, 3]
    assert recorded(tmp_path) == counted(tmp_path)
    assert finished(tmp_path)
    assert "recorded 6 calls of 2 processes, " in err.splitlines()[-1]


@pytest.mark.parametrize("engine", ["kernel", "mode", "auto"])
def test_a_child_forked_inside_blocks_goes_on_in_its_own_folder(engine: str, tmp_path: Path) -> None:
    program = """
        import torch
        from opintercept import hooks, intercept

        recorder = hooks.Recorder()
        with intercept(recorder, engine="mode" if sys.argv[1:] else "auto"):
            work(2)
            if not (child := os.fork()):
                work(3)
                sys.exit()
            os.waitpid(child, 0)
            work(4)
        print(len(recorder.records), file=sys.stderr)
    """
    for own in ([], ["mode"]):
        folder = tmp_path / str(len(own))
        folder.mkdir()
        err = run_quick(folder, program, "--engine", engine, module=["program.py", *own])
        first, *others = sorted(counted(folder).values(), reverse=True)
        assert (first, others) == (6, [3])
        assert recorded(folder).pop(0) == 6
        assert sorted(recorded(folder).values()) == [3, 6]
        assert err.startswith("6\n")


def test_a_child_without_torch_or_calls_leaves_nothing(tmp_path: Path) -> None:
    program = """
        probe = "import sys; print(sorted(m for m in sys.modules if m[:11] == 'opintercept'), 'torch' in sys.modules)"
        print(subprocess.run([sys.executable, "-c", probe], text=True, stdout=-1, check=True).stdout, file=sys.stderr)
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(3) + 1"], check=True)
        work(1)
        if not os.fork():
            sys.exit()
        os.wait()
        if not (child := os.fork()):
            os.execv(sys.executable, [sys.executable, "-c", "print('in its place')"])
        os.wait()
    """
    err = run_quick(tmp_path, program)
    loaded = ["opintercept", "opintercept._child", "opintercept._core", "opintercept._core.after_import"]
    assert err.startswith(f"{sorted([*loaded, 'opintercept._core.version'])} False\n")
    assert recorded(tmp_path) == {0: 1}
    assert not [entry.name for entry in (tmp_path / "run").iterdir() if entry.is_dir()]


def test_a_program_with_children_runs_as_a_plain_one(tmp_path: Path) -> None:
    program = f"""
        if sys.argv[1:]:
            print("child", sys.stdin.read(), sys.argv, sys.path[1:], flush=True)
            print("wrong", file=sys.stderr)
            sys.exit(7)
        command = [sys.executable, __file__, "x"]
        done = subprocess.run(command, input="given", capture_output=True, text=True)
        print(done)
        print(sorted(set(os.environ) - {{{VARIABLE!r}}}))
        sys.exit(done.returncode)
    """
    watched = start(tmp_path, program, "-q")
    got = (*watched.communicate(timeout=60), watched.returncode)
    plain = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert got == (plain.stdout, plain.stderr, 7)


def test_a_python_starts_as_fast_where_it_is_followed() -> None:
    """At most 5 ms later, of the processor's time; the best of many starts, since other programs run on the machine."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    best = {"plain": 1e9, "followed": 1e9}
    for _ in range(20):
        for name, more in {"plain": {}, "followed": {VARIABLE: "{}"}}.items():
            pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], plain | more)
            used = os.wait4(pid, 0)[2]
            best[name] = min(best[name], used.ru_utime + used.ru_stime)
    assert best["followed"] - best["plain"] < 0.005


def test_pools_executors_and_data_loaders(tmp_path: Path) -> None:
    program = """
        from concurrent.futures import ProcessPoolExecutor

        def load(index):
            work(1)
            return index

        class Data:
            __len__ = lambda self: 4
            __getitem__ = lambda self, index: load(index)

        if __name__ == "__main__":
            import torch
            with ProcessPoolExecutor(2) as pool:
                assert sum(pool.map(work, [1, 2, 3, 4])) == 10
                assert sum(pool.map(work, [1, 2])) == 3
            pool = multiprocessing.Pool(2)
            assert sum(pool.map(work, [1, 2, 3, 4])) == 10
            pool.close()
            pool.join()
            before = {*os.listdir("counted")}
            list(torch.utils.data.DataLoader(Data(), num_workers=2))
            for name in {*os.listdir("counted")} - before:
                os.remove(f"counted/{name}")
    """
    run_quick(tmp_path, program)
    assert recorded(tmp_path) == counted(tmp_path)
    assert sum(counted(tmp_path).values()) == 23
    assert finished(tmp_path)


def test_ranks_of_torchrun_have_their_folders(tmp_path: Path) -> None:
    program = """
        import torch.distributed
        torch.distributed.init_process_group("gloo")
        work(2 + torch.distributed.get_rank())
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    run_quick(tmp_path, program, module=torchrun)
    assert recorded(tmp_path) == counted(tmp_path)
    opened = runs.open_run(tmp_path / "run")
    assert {rank: opened.folder(rank).name for rank in opened.ranks} == {0: "rank0", 1: "rank1"}
    assert [len(list(opened.calls(rank))) for rank in opened.ranks] == [2, 3]
    assert opened.titles == {}


def test_folders_say_which_attempt_of_torchrun_a_rank_is_of(tmp_path: Path) -> None:
    program = """
        rank, fails = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        work(2 + rank)
        while rank == 0 and fails and not os.path.exists("run/rank1/summary.json"):
            time.sleep(0.05)
        sys.exit(rank == 0 and fails)
    """
    given = ["--standalone", "--max-restarts", "1", "--nproc-per-node", "2", "program.py"]
    run_quick(tmp_path, program, "--ops", "matmul", module=["-m", "torch.distributed.run", *given])
    names = {"rank0": 2, "rank1": 3, "rank0-attempt1": 2, "rank1-attempt1": 3}
    for name, calls in names.items():
        assert len(list(runs.open_run(tmp_path / "run" / name).calls())) == calls


def test_workers_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\nfrom program import work\n\n"
        "@pytest.mark.parametrize('n', range(1, 7))\ndef test_it(n):\n    work(n)\n"
    )
    workers = str(sampled.fewer(2, 1))
    run_quick(tmp_path, "", module=["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, "test_it.py"])
    assert recorded(tmp_path) == counted(tmp_path)
    assert sum(counted(tmp_path).values()) == 21


def test_launchers_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launched = """
        from accelerate import Accelerator, debug_launcher

        def train(*more):
            work(2 + Accelerator(cpu=True).process_index, *more)

        if __name__ == "__main__":
            train() if sys.argv[1:] else debug_launcher(train, num_processes=2)
    """
    run_quick(tmp_path, launched)
    assert recorded(tmp_path) == counted(tmp_path)
    assert sorted(counted(tmp_path).values()) == [2, 3]
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    run_quick(tmp_path, launched, "--overwrite", module=[*launch, "program.py", "x"])
    (one,) = recorded(tmp_path).items()
    assert one in counted(tmp_path).items()


def test_ranks_of_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    program = """
        import lightning, torch

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 4)

            def training_step(self, batch, number):
                return self.layer(batch).sum()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        if __name__ == "__main__":
            data = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2)
            quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, barebones=False)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, enable_model_summary=False, **quiet
            )
            trainer.fit(Module(), data)
    """
    run_quick(tmp_path, program)
    opened = runs.open_run(tmp_path / "run")
    # Two batches each, with a product forward and one backward for the weight.
    assert [len(list(opened.calls(rank))) for rank in opened.ranks] == [4, 4]
    assert finished(tmp_path)


def test_no_children_leaves_them_out(tmp_path: Path) -> None:
    program = """
        work(2)
        if not os.fork():
            work(3)
            sys.exit()
        os.wait()
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(1, 1) @ torch.ones(1, 1)"], check=True)
    """
    err = run_quick(tmp_path, program, "--no-children")
    assert len(list(runs.open_run(tmp_path / "run").calls())) == 2
    assert "; child processes are not watched, since --no-children was given" in err
    assert not [entry.name for entry in (tmp_path / "run").iterdir() if entry.is_dir()]


def test_children_are_told_of_without_a_folder(tmp_path: Path) -> None:
    program = """
        import torch
        torch.ones(2, 2) @ torch.ones(2, 2)
        for n in range(3):
            if not os.fork():
                torch.full((2, 2), float("nan")) @ torch.ones(2, 2) if n else work(5)
                sys.exit() if n < 2 else os._exit(0)
            os.wait()
    """
    (tmp_path / "counted").mkdir()
    (tmp_path / "program.py").write_text(textwrap.dedent(WORK) + textwrap.dedent(program))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = ["-m", "opintercept", "run", "--engine", "kernel", "program.py"]
    done = run_python(*command, cwd=tmp_path, env=environment, check=True)
    told = [line for line in done.stderr.splitlines() if line.startswith(("opintercept: ", "NaN", "1 process "))]
    first, wrong, finding, right, lost = told
    assert first.startswith("opintercept: 1 call, ")
    assert wrong.startswith("opintercept: program-")
    assert ": 1 call, 16 FLOP, 1 not finite, " in wrong
    assert finding.startswith("NaN comes into aten::mm")
    assert ": 5 calls, 240 FLOP, 0 not finite, " in right
    assert lost.startswith("1 process did not end by itself, or still runs: program-")
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("opintercept-")] == []


def test_a_folder_is_refused_or_emptied_before_any_process_begins(tmp_path: Path) -> None:
    program = "if not os.fork():\n    work(1)\n    sys.exit()\nos.wait()"
    run_quick(tmp_path, program)
    assert list(recorded(tmp_path).values()) == [1]
    before = recorded(tmp_path)
    assert "already holds a run; name another folder, or add --overwrite" in run_quick(tmp_path, program, status=2)
    assert recorded(tmp_path) == before
    run_quick(tmp_path, program, "--overwrite")
    assert list(recorded(tmp_path).values()) == [1]
    assert recorded(tmp_path) != before


def test_every_option_reaches_the_children(tmp_path: Path) -> None:
    program = """
        if not os.fork():
            import torch
            for n in range(4):
                torch.nn.functional.relu(torch.ones(2, 3) @ torch.ones(3, n + 1))
            sys.exit()
        os.wait()
    """
    err = run_quick(tmp_path, program, "--ops", "relu", "--tensors", "full", "--hooks", "stats", "--limit", "3")
    opened = runs.open_run(tmp_path / "run")
    assert [call.record.op for call in opened.calls()] == ["aten::relu"] * 4
    assert opened.info.tensors == "full"
    assert "not finite" not in err


def test_many_children_at_once(tmp_path: Path) -> None:
    count = sampled.fewer(100, 24)
    program = f"""
        import torch
        for n in range({count}):
            if not os.fork():
                work(n % 3 + 1)
                sys.exit()
        for n in range({count}):
            os.wait()
    """
    with quick(tmp_path, program) as done:
        assert done.wait() == 0
    assert recorded(tmp_path) == counted(tmp_path)
    assert len(counted(tmp_path)) == count
    assert f"of {count} processes, " in done.stderr.splitlines()[-1]
    assert f"... and {count - 20} more processes; --limit {count} shows them" in done.stderr


LOST = """
    import signal, torch
    def child(n, end):
        pid = os.fork()
        if not pid:
            work(n)
            time.sleep(0.5)  # it is written meanwhile
            end()
        return pid
    pids = [
        child(1, lambda: os._exit(0)),
        child(2, lambda: os.kill(os.getpid(), signal.SIGKILL)),
        child(3, lambda: os.execv(sys.executable, [sys.executable, "-S", "-c", "pass"])),
        child(4, sys.exit),
    ]
    for pid in pids:
        os.waitpid(pid, 0)
    print(*pids)
"""


def test_processes_that_did_not_end_by_themselves_are_named_and_keep_their_calls(tmp_path: Path) -> None:
    with quick(tmp_path, LOST) as done:
        assert done.wait() == 0
    assert recorded(tmp_path) == counted(tmp_path)
    pids = [*map(int, done.stdout.split())]
    (line,) = [line for line in done.stderr.splitlines() if "did not end" in line]
    assert line.startswith("3 processes did not end by themselves, or still run: ")
    assert {int(name.rpartition("-")[2]) for name in line.partition(": ")[2].split(", ")} == {*pids[:3]}
    infos = runs.open_run(tmp_path / "run").infos.values()
    assert sorted(int(i.member["pid"]) for i in infos if i.member and not i.finished) == sorted(pids[:3])


def test_children_that_outlive_the_first_process_are_recorded_to_their_end(tmp_path: Path) -> None:
    program = """
        import torch
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            work(1)
            while os.path.exists("running"):
                time.sleep(0.01)
            work(2)
            sys.exit()
        while not os.listdir("counted"):
            time.sleep(0.01)
    """
    (tmp_path / "running").touch()
    with quick(tmp_path, program) as done:
        assert done.wait() == 0
    assert "1 process did not end by itself, or still runs: program-" in done.stderr
    (tmp_path / "running").unlink()
    until = time.monotonic() + 60
    while not finished(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert recorded(tmp_path) == counted(tmp_path)
    assert [*counted(tmp_path).values()] == [3]


def test_an_interrupt_of_all_processes_keeps_all_calls(tmp_path: Path) -> None:
    program = """
        import signal, torch
        os.setpgrp()
        def wait(n):
            work(n)
            signal.pause()
        started = [multiprocessing.get_context("fork").Process(target=wait, args=(n,)) for n in (1, 2)]
        for process in started:
            process.start()
        if not os.fork():
            wait(3)
        work(4)
        while len(os.listdir("counted")) < 4:
            time.sleep(0.01)
        time.sleep(0.2)
        print("ready", flush=True)
        signal.pause()
    """
    process = quick(tmp_path, program)
    with process:
        process.says("ready\n")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == -signal.SIGINT
    assert process.stderr.count("KeyboardInterrupt\n") == 4
    until = time.monotonic() + 60
    while not finished(tmp_path):  # the fork is not waited for
        assert time.monotonic() < until
        time.sleep(0.01)
    got = recorded(tmp_path)
    assert sorted(got.values()) == [1, 2, 3, 4]
    assert got.pop(0) == 4


def test_a_child_that_cannot_write_goes_on_and_says_so(tmp_path: Path) -> None:
    program = """
        import resource, torch
        for most in (200, 6000):  # bytes of a file, of which `run.json` has more, or the records
            if not os.fork():
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # as on a full disk
                for _ in range(100):
                    torch.ones(2, 3) @ torch.ones(3, 4)
                print("goes on", flush=True)
                sys.exit()
            print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    """
    with quick(tmp_path, program) as done:
        assert done.wait() == 0
    assert done.stdout == "goes on\n0\n" * 2
    assert "are not recorded: " in done.stderr
    assert done.stderr.count("OpInterceptWarning: ") == 2


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_threads_that_outlive_the_function_of_a_process_are_recorded(how: str, tmp_path: Path) -> None:
    program = f"""
        import threading

        def late():
            time.sleep(0.3)
            work(2)

        def begin():
            work(1)
            threading.Thread(target=late).start()

        if __name__ == "__main__":
            import torch
            process = multiprocessing.get_context({how!r}).Process(target=begin)
            process.start()
            process.join()
    """
    with quick(tmp_path, program) as done:
        assert done.wait() == 0
    assert recorded(tmp_path) == counted(tmp_path)
    assert [*counted(tmp_path).values()] == [3]
    assert finished(tmp_path)


def test_a_fork_of_a_process_that_has_children_ends_by_itself(tmp_path: Path) -> None:
    program = """
        def top():
            below = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.3,))
            below.start()
            if not os.fork():
                work(2)
                sys.exit(3)  # `multiprocessing` fails to join the process of another one
            os.wait()
            below.join()

        import torch
        process = multiprocessing.get_context("fork").Process(target=top)
        process.start()
        process.join()
    """
    with quick(tmp_path, program) as done:
        assert done.wait() == 0
    assert recorded(tmp_path) == counted(tmp_path)
    assert [*counted(tmp_path).values()] == [2]
    assert finished(tmp_path)


def test_a_child_of_another_version_says_that_it_is_not_watched(tmp_path: Path) -> None:
    program = """
        import json
        family = json.loads(os.environ["OPINTERCEPT_RUN"])
        for changed in (json.dumps(family | {"version": "0.0"}), "{}", "no JSON"):
            os.environ["OPINTERCEPT_RUN"] = changed
            subprocess.run([sys.executable, "-c", "import torch; torch.ones(1, 1) @ torch.ones(1, 1)"], check=True)
    """
    err = run(tmp_path, program)
    assert err.count("and is not watched") == 1
    assert " instead of 0.0, and is not watched\n" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_flight_recorder_keeps_the_last_calls_of_children_that_fail(tmp_path: Path) -> None:
    program = """
        import torch
        def fail():
            work(5)
            raise ZeroDivisionError("on purpose")

        for function in (fail, lambda: work(4)):
            process = multiprocessing.get_context("fork").Process(target=function)
            process.start()
            process.join()
            print(process.pid, process.exitcode)
    """
    with quick(tmp_path, program, "--flight", "3") as done:
        assert done.wait() == 0
    (failed, status), (_, well) = (line.split() for line in done.stdout.splitlines())
    assert (status, well) == ("1", "0")
    opened = runs.open_run(tmp_path / "run")
    assert opened.titles == {0: "ForkProcess-1"}
    assert opened.info.member is not None
    assert opened.info.member["pid"] == failed
    assert [call.record.index for call in opened.calls()] == [2, 3, 4]
    assert sum(entry.is_dir() for entry in (tmp_path / "run").iterdir()) == 1
    # Our frames are not in the traceback that multiprocessing prints.
    assert "watch.py" not in done.stderr
    assert 'raise ZeroDivisionError("on purpose")' in done.stderr


def test_nothing_is_left_of_a_flight_recorder_where_all_end_well(tmp_path: Path) -> None:
    program = """
        import torch
        work(1)
        if not os.fork():
            work(2)
            sys.exit()
        os.wait()
    """
    with quick(tmp_path, program, "--flight", "3") as done:
        assert done.wait() == 0
    assert not (tmp_path / "run").exists()
    assert ": 2 calls, " in done.stderr
