"""Breaks copies of the package on purpose, one way at a time, and shows that a test notices each.

    python tests/programs/mutations.py [WORD ...]

Words choose the mutations that have one of them in their description.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("opintercept", "tests", "conftest.py", "pyproject.toml")
TIMEOUT = 180  # seconds for a run of pytest

PROFILER = "tests/fidelity/test_programs.py::test_kernel_engine_sees_what_the_profiler_sees_and_changes_nothing"


@dataclass(frozen=True)
class Mutation:
    """One way to break the package.

    Attributes:
        breaks: What goes wrong, in words.
        file: The path inside `opintercept/`.
        old: Text that occurs once in the file.
        new: Text that replaces it.
        noticed_by: Tests of which at least one must fail.
    """

    breaks: str
    file: str
    old: str
    new: str
    noticed_by: tuple[str, ...]

    def apply(self, package: Path) -> None:
        """Change the copy of the package in `package`, where the file must have `old` exactly once."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file} must have the text of a mutation once, got {text.count(self.old)} times: {self.old!r}; "
                "update the mutation"
            )
        path.write_text(text.replace(self.old, self.new))


_RUN = "output = invoke(head, *args, **kwargs) if kwargs else invoke(head, *args)"

MUTATIONS = (
    Mutation(
        "keeps the last output alive, so that autograd copies gradients that it would have stolen",
        "_core/pipeline.py",
        _RUN,
        f"{_RUN}\n            run.kept = output",
        ("tests/engines/test_engines.py::test_a_gradient_is_still_stolen_and_not_copied",),
    ),
    Mutation(
        "drops the conjugate bit of the arguments",
        "_core/pipeline.py",
        _RUN,
        'args = tuple(a.conj() if getattr(a, "is_conj", bool)() else a for a in args)\n            ' + _RUN,
        (f"{PROFILER}[conjugated-grad-kernel]",),
    ),
    Mutation(
        "shows hooks operands with their conjugate bit, with which arithmetic is wrong in a dispatch mode",
        "_core/tensors.py",
        "return tensor.resolve_conj().resolve_neg()",
        "return tensor",
        ("tests/core/test_call.py::test_conjugate_operands_are_resolved",),
    ),
    Mutation(
        "draws from the global generator",
        "_core/pipeline.py",
        _RUN,
        f'__import__("torch").rand(1)\n            {_RUN}',
        (f"{PROFILER}[mm-grad-kernel]",),
    ),
    Mutation(
        "rounds the output",
        "_core/pipeline.py",
        _RUN,
        f"{_RUN}\n            output = output.bfloat16().to(output.dtype)",
        (f"{PROFILER}[mm-grad-kernel]",),
    ),
    Mutation(
        "returns a transposed copy of the output, which has other strides",
        "_core/pipeline.py",
        _RUN,
        f"{_RUN}\n            output = output.mT.contiguous().mT if output.dim() == 2 else output",
        (f"{PROFILER}[mm-grad-kernel]",),
    ),
    Mutation(
        "counts the inner steps of a watched operator",
        "_engines/scope.py",
        "inner = hidden  # saves",
        "inner = self.with_blocks(self.blocks, self.carried)  # saves",
        (f"{PROFILER}[addbmm-grad-kernel]",),
    ),
    Mutation(
        "counts a call twice where two blocks of one interceptor are nested",
        "_engines/scope.py",
        "return list(dict.fromkeys(b.watcher for b in blocks if b.watcher not in paused))",
        "return [b.watcher for b in blocks if b.watcher not in paused]",
        ("tests/blocks/test_intercept.py::test_recursion_counts_a_call_once",),
    ),
    Mutation(
        "shows the operators of hooks to the interceptors",
        "_engines/scope.py",
        "if self.hidden:\n            return []",
        "if False:\n            return []",
        ("tests/blocks/test_intercept.py::test_operators_of_a_hook_are_seen_by_no_interceptor",),
    ),
    Mutation(
        "skips writing a result back to `out=` after a hook replaced the inputs",
        "_core/pipeline.py",
        "        call.elapsed = perf_counter() - started\n"
        "        if args is not given_args or kwargs is not given_kwargs:",
        "        call.elapsed = perf_counter() - started\n        if False:",
        ("tests/engines/test_engines.py::test_replaced_inputs_are_multiplied_and_the_caller_reads_the_result",),
    ),
    Mutation(
        "does not write a replaced output to the tensor that the caller reads",
        "_core/pipeline.py",
        "copy_into(call.output, replacement)",
        "call.output = replacement",
        ("tests/engines/test_engines.py::test_a_replacement_reaches_the_tensor_that_the_caller_reads",),
    ),
    Mutation(
        "misses the backward pass",
        "_engines/kernels.py",
        "        if watch is None:\n",
        "        if watch is None or graph_task() != -1:\n",
        (f"{PROFILER}[mm-grad-kernel]",),
    ),
    Mutation(
        "calls a gradient a forward call",
        "_engines/kernels.py",
        'phase: Phase = "forward" if graph_task() == -1 else backward_phase()',
        'phase: Phase = "forward"',
        ("tests/engines/test_engines.py::test_backward_calls_are_told_from_forward_ones",),
    ),
    Mutation(
        "links a gradient to the call before its own",
        "_origin/links.py",
        "        number = node._sequence_nr()\n",
        "        number = node._sequence_nr() - 1\n",
        ("tests/origin/test_links.py::test_a_shared_weight_links_each_gradient_to_its_own_call",),
    ),
    Mutation(
        "takes another thread's graph for one of this thread",
        "_origin/links.py",
        "        if known is None or len(self._threads) > 1:\n",
        "        if known is None:\n",
        ("tests/origin/test_links.py::test_a_graph_of_another_thread_is_not_taken_for_one_of_this_thread",),
    ),
    Mutation(
        "loses the threads that were there before the block",
        "_engines/kernels.py",
        "        if scope.everywhere is not state.everywhere or scope.carried is not carried():\n",
        "        if False:\n",
        ("tests/fidelity/test_threads.py::test_threads_all_sees_a_thread_that_had_a_block_of_its_own_before",),
    ),
    Mutation(
        "runs the parent's hooks in a forked child",
        "_engines/scope.py",
        "block.pid == self.everywhere.pid",
        "block.pid",
        ("tests/blocks/test_intercept.py::test_a_forked_child_does_not_run_the_hooks_of_its_parent",),
    ),
    Mutation(
        "counts the FLOPs of a convolution without its padding",
        "_ops/convolutions.py",
        "size + 2 * pad - ",
        "size - ",
        ("tests/ops/test_convolutions.py::test_flops_of_a_network_are_those_of_torchs_counter",),
    ),
    Mutation(
        "shows convolutions to those who watch matmuls",
        "_ops/select.py",
        'return row.family if row.family in ("convolution", "other") else "matmul"',
        'return "other" if row.family == "other" else "matmul"',
        ("tests/ops/test_convolutions.py::test_the_default_family_has_no_convolutions",),
    ),
    Mutation(
        "leaves its kernels behind",
        "_engines/kernels.py",
        "            if not self.users and self.installed:\n                self._remove_if_quiet()\n",
        "",
        ("tests/engines/test_engines.py::test_kernel_engine_restores_every_operator_of_the_family",),
    ),
    Mutation(
        "removes its kernels while other threads may be in them",
        "_engines/quiet.py",
        '                    if not harmless and frame.f_globals.get("__name__") not in _FUNCTIONS_IN:\n'
        "                        return None\n",
        "",
        ("tests/blocks/test_intercept.py::test_kernels_stay_while_another_thread_works_and_go_at_a_later_exit",),
    ),
    Mutation(
        "leaves a dispatch mode on torch's stack",
        "_engines/modes.py",
        "            mode.__exit__(None, None, None)\n            return\n",
        "            return\n",
        ("tests/blocks/test_intercept.py::test_a_block_sees_what_runs_inside_and_nothing_else",),
    ),
    Mutation(
        "sees nothing in the thread after an exception",
        "_engines/kernels.py",
        "            return run(watch.pipelines, watch.row, overload, phase, _step_inside, head, args, kwargs)\n"
        "        finally:\n            stash(KEY, scope)\n",
        "            output = run(watch.pipelines, watch.row, overload, phase, _step_inside, head, args, kwargs)\n"
        "            stash(KEY, scope)\n            return output\n        finally:\n            pass\n",
        ("tests/blocks/test_intercept.py::test_an_exception_of_the_operator_keeps_its_type_and_text",),
    ),
    Mutation(
        "swallows the exception of an operator",
        "_core/pipeline.py",
        "            _report(pipelines, [call], exception)\n            raise\n",
        "            _report(pipelines, [call], exception)\n            return None\n",
        ("tests/blocks/test_intercept.py::test_an_exception_of_the_operator_keeps_its_type_and_text",),
    ),
    Mutation(
        "shows tensors without values, on which hooks fail",
        "_engines/kernels.py",
        "            if not real:\n",
        "            if False:\n",
        ("tests/engines/test_engines.py::test_tensors_without_values_pass_unseen",),
    ),
    Mutation(
        "passes numbers on as tensors, which promote the result's type",
        "_engines/kernels.py",
        '    if name.partition(".")[0] in OWN:\n        return boxed',
        "    return boxed",
        ("tests/engines/test_engines.py::test_kernel_engine_passes_numbers_on_as_numbers",),
    ),
    Mutation(
        "runs above autograd, with the tensors that autograd tracks",
        "_engines/kernels.py",
        'library.m.impl, name, "BackendSelect", kernel, True)',
        'library.m.impl, name, "AutogradCPU", kernel, True)',
        (f"{PROFILER}[mm-grad-kernel]",),
    ),
    Mutation(
        "lets Dynamo compile hooks",
        "_engines/dynamo.py",
        "    skip = _eval_frame._FrameAction.SKIP\n",
        "    return function\n    skip = _eval_frame._FrameAction.SKIP\n",
        ("tests/engines/test_engines.py::test_dynamo_leaves_hooks_alone",),
    ),
    Mutation(
        "turns compiled code off while the mode engine is on",
        "_engines/dispatch_mode.py",
        "        return True\n",
        "        return False\n",
        ("tests/engines/test_engines.py::test_compile_makes_the_same_graph_once",),
    ),
    Mutation(
        "leaves garbage that only the collector finds",
        "_core/pipeline.py",
        "    finally:\n        call.owner = None\n        # An exception",
        "    finally:\n        call.args = (call,)\n        # An exception",
        ("tests/blocks/test_intercept.py::test_a_block_leaves_no_garbage",),
    ),
)


def copy_repository(folder: Path) -> None:
    """Copy what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run `tests` of the copy in `folder`, and return the exit status and last line of pytest."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {TIMEOUT} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def try_out(mutation: Mutation | None) -> tuple[bool, str]:
    """Return whether the tests fail under `mutation`, or pass without one, as they must; and a line that says so."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        if mutation is None:
            tests = sorted({test for mutation in MUTATIONS for test in mutation.noticed_by})
            status, last = run_tests(folder, tests)
            right, what = status == 0, "passes as it is"
        else:
            mutation.apply(folder / "opintercept")
            status, last = run_tests(folder, mutation.noticed_by)
            # 1 means that a test failed, a negative status a crash; 2 to 5 mean that pytest could not run the tests.
            right, what = status == 1 or status < 0, mutation.breaks
    return right, f"{'ok  ' if right else 'BAD '} {time.monotonic() - started:3.0f} s  {what}: {last}"


def main(words: Sequence[str]) -> int:
    """Try all mutations, or those that have one of `words` in their description."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.breaks for word in words)]
    all_right = True
    with ThreadPoolExecutor(max_workers=2) as pool:
        for right, line in pool.map(try_out, [None, *chosen]):
            print(line, flush=True)
            all_right = all_right and right
    print(f"{len(chosen)} mutations, {'each' if all_right else 'not each'} of them noticed")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
