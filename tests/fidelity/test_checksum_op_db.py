"""`Checksum` raises no alarm in PyTorch's operator database, at either level, and changes no result."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sampled
import torch
from test_op_db import ALL_CASES, MULTIPLIES
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from opintercept import hooks, intercept

pytestmark = pytest.mark.slow

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
OPERATORS = {case.op.full_name: case.op for case in ALL_CASES}
SAMPLES, FEWER = 16, 2  # the most of an operator of MULTIPLIES with `--sampled`, and of all others


def programs(op: Any, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """The samples of an operator, each with its backward pass, in place and with `out=` too."""
    gradients = dtype in op.supported_backward_dtypes("cpu")
    # Not with op.sample_inputs, which formats the Python stack: 5 ms for each sample.
    samples = list(op.sample_inputs_func(op, "cpu", dtype, gradients))
    most = sampled.fewer(len(samples), SAMPLES if op.full_name in MULTIPLIES else FEWER)
    for sample in samples[:: -(-len(samples) // max(1, most)) or 1]:

        def run(function: Any = op, sample: Any = sample, **options: Any) -> Any:
            output = function(sample.input, *sample.args, **sample.kwargs, **options)
            results = [x for x in tree_leaves(sample.output_process_fn_grad(output)) if isinstance(x, Tensor)]
            results = [x for x in results if x.requires_grad]
            if results:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
            return output

        yield run
        if op.inplace_variant is not None and op.full_name in MULTIPLIES:

            def write_in_place(sample: Any = sample) -> Any:
                return op.inplace_variant(sample.input.clone(), *sample.args, **sample.kwargs)

            yield write_in_place
        if op.supports_out and op.full_name in MULTIPLIES:

            def write(sample: Any = sample) -> None:
                with torch.no_grad():
                    output = op(sample.input, *sample.args, **sample.kwargs)
                    op(
                        sample.input,
                        *sample.args,
                        **sample.kwargs,
                        out=tree_map_only(Tensor, torch.zeros_like, output),
                    )

            yield write


@pytest.mark.parametrize("level", ["dispatch", "function"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_operator_of_the_database_raises_an_alarm(dtype: torch.dtype, level: Any) -> None:
    if sampled.on and (level == "function") != (dtype in (torch.float64, torch.float16)):
        pytest.skip("sampled")
    checksum = hooks.Checksum(action="record")
    failed: Counter[str] = Counter()
    for name, op in OPERATORS.items():
        # Backward passes multiply too, below those operators that do not; one dtype shows that.
        whole = level == "dispatch" and dtype is torch.float32
        if not op.supports_dtype(dtype, "cpu") or not (whole or name in MULTIPLIES):
            continue
        torch.default_generator.manual_seed(17)  # torch.manual_seed formats the Python stack
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = list(programs(op, dtype))  # a block installs kernels, so there is one for each operator
            with intercept(checksum, level=level):
                for program in made:
                    try:
                        program()
                    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
                        failed[name] += 1
    print(f"{checksum.checked} products, {checksum.rows} rows, skipped {checksum.skipped}")
    assert [str(finding) for finding in checksum.findings] == []
    assert checksum.checked > 200
    assert sum(failed.values()) < 1000
