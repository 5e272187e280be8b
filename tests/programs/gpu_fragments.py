"""Makes what Inductor generates for an H200, without one, and holds the fragment of each kernel against the graph.

`python gpu_fragments.py` compares what is read of the text with what is taken from Inductor's graph, kernel by kernel,
and fails if they differ; `--write FILE` stores the texts with what the graph says. Needs torch with Triton.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "helpers"))

import torch
from same_fragment import outputs_of
from torch import Tensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F

from opintercept._engines.inductor import provenance, written
from opintercept._origin.wrappers import WrapperSource


class Properties:
    """Of an H200."""

    name, gcnArchName = "NVIDIA H200", ""
    major, minor, warp_size, multi_processor_count = 9, 0, 32, 132
    total_memory, L2_cache_size = 140 << 30, 60 << 20
    max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
    regs_per_multiprocessor, shared_memory_per_multiprocessor = 65536, 233472
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448


def pretend() -> ExitStack:
    """Let torch think that there is an H200, as far as its compiler asks."""
    import torch._inductor.scheduler
    import torch._inductor.select_algorithm as select
    import torch._subclasses.fake_tensor as fake
    import torch.utils._triton as triton
    from torch._dynamo.device_interface import CudaInterface

    def only_template(self: Any, name: str, choices: Any, *args: Any, **options: Any) -> Any:
        templates: list[Any] = [each for each in choices if isinstance(each, select.TritonTemplateCaller)]
        return choose(self, name, templates[:1] or choices[:1], *args, **options)

    choose = select.AlgorithmSelectorCache.__call__
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda device=None: Properties),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "get_device_name", lambda device=None: Properties.name),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "synchronize", lambda *args: None),
        (torch.cuda, "get_rng_state", lambda *args: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda *args: None),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: Properties)),
        (CudaInterface, "get_device_properties", staticmethod(lambda device=None: Properties)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (triton, "triton_hash_with_backend", lambda: "none"),
        (fake, "init_gpu_context", lambda device: None),
        (select.AlgorithmSelectorCache, "__call__", only_template),
    ]
    stack = ExitStack()
    for owner, name, answer in answers:
        stack.enter_context(mock.patch.object(owner, name, answer))
    return stack


class Program(NamedTuple):
    """A function with the shapes and dtypes of its arguments."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = MappingProxyType({})
    dynamic: bool = False


def generated(program: Program) -> Iterator[tuple[str, Any, str]]:
    """The texts of the wrappers of a program, forward and backward, with their graphs."""
    from functorch.compile import (  # type: ignore[import-untyped]
        aot_function,
        make_boxed_func,
        min_cut_rematerialization_partition,
    )
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    found: list[tuple[str, Any, str]] = []
    shape_env = ShapeEnv() if program.dynamic else None
    fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)

    def lower(kind: str) -> Callable[..., Any]:
        def compile(traced: Any, inputs: Any) -> Any:
            with pretend(), V.set_fake_mode(fakes), V.set_debug_handler(DebugContext()):
                graph, inputs = moved(traced, inputs, fakes)
                _recursive_post_grad_passes(graph, is_inference=kind == "inference")
                lowered = GraphLowering(
                    graph,
                    shape_env=shape_env,
                    example_inputs=list(inputs),
                    is_inference=kind == "inference",
                    is_backward=kind == "backward",
                )
                with V.set_graph_handler(lowered):
                    lowered.run(*inputs)
                    code: Any = lowered.codegen()[0]
            found.append((kind, lowered, getattr(code, "value", code)))
            return make_boxed_func(traced.forward)

        return compile

    def partition(joint: Any, inputs: Any, **options: Any) -> Any:
        _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    for trains in (False, True):
        with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1, **program.options), fakes:
            given = [torch.empty(shape, dtype=program.dtype) for shape in program.shapes]
            for each in given:
                each.requires_grad_(trains)
            run = aot_function(
                program.function,
                fw_compiler=lower("forward"),
                bw_compiler=lower("backward"),
                inference_compiler=lower("inference"),
                partition_fn=partition,
                decompositions=select_decomp_table(),
                dynamic=program.dynamic,
            )
            out = run(*given)
            if trains:
                sum(each.float().sum() for each in (out if isinstance(out, (tuple, list)) else (out,))).backward()
    yield from found


def moved(traced: Any, inputs: Any, fakes: Any) -> tuple[Any, list[Any]]:
    """A graph that was traced on the CPU as one for a GPU. Autograd would ask a GPU's driver for streams."""
    graph = copy.deepcopy(traced)

    def on_gpu(value: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(value, torch.device) else value

    with fakes:
        given = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
            if isinstance(each, Tensor)
            else each
            for each in inputs
        ]
    for node in graph.graph.nodes:
        node.args, node.kwargs = (torch.utils._pytree.tree_map(on_gpu, each) for each in (node.args, node.kwargs))
    graph.recompile()
    FakeTensorProp(graph, fakes).propagate_dont_convert_inputs(*given)
    return graph, given


def heads(x: Tensor, count: int) -> Tensor:
    found: Tensor = x.unflatten(-1, (count, -1))
    return found.transpose(-2, -3)


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query, key, value = (heads(x @ each, 4) for each in (q, k, v))
    scores = query @ key.mT / 4
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def rotary(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    angles = torch.outer(places, 10000 ** (-torch.arange(0, 16, 2, device=x.device) / 16)).repeat(1, 2)
    query, key = heads(x @ w, 4), heads(x @ v, 4)
    turned = [
        each * angles.cos().to(x.dtype) + torch.cat((-each[..., 8:], each[..., :8]), -1) * angles.sin().to(x.dtype)
        for each in (query, key)
    ]
    return turned[0] @ turned[1].mT


def rms(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    scaled: Tensor = w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return scaled


def gated(x: Tensor, w: Tensor, v: Tensor, o: Tensor, n: Tensor) -> Tensor:
    y = rms(x, n)
    return x + (F.silu(y @ w) * (y @ v)) @ o


def layers(x: Tensor, w: Tensor, v: Tensor, o: Tensor, n: Tensor) -> Tensor:
    for _ in range(3):
        x = gated(x, w, v, o, n)
    return x


def loss(x: Tensor, w: Tensor) -> Tensor:
    target = torch.arange(x.shape[0], device=x.device) % w.shape[1]
    return F.cross_entropy(x @ w, target)


def steps(x: Tensor, w: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    for each in x.unbind(1):
        gate, fresh = (each @ w).chunk(2, -1)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * fresh.tanh()
    return state


def normalised(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x @ w, (w.shape[1],), g, b)) + x


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.add_(1)
    y[:, 3] = 0.5
    return y.log()


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m = m.lerp(g, 0.1)
    v = v * 0.99 + g * g * 0.01
    return p - 0.001 * m / (v.sqrt() + 1e-8), m, v


def pooled(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv2d(x, w, padding=1)
    y = F.batch_norm(y, None, None, training=True)
    return F.interpolate(F.avg_pool2d(y.relu(), 2), scale_factor=2.0) + y


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    ids = (x.argmax(-1) + torch.arange(x.shape[0], device=x.device)) % table.shape[0]
    return (F.embedding(ids, table) * 2).sin()


def scanned(x: Tensor) -> Tensor:
    return x.cumsum(-1) * x.logcumsumexp(0) + x.amax(0)


def joined(x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat((x.exp(), y.sin()), 1)
    return both.roll(3, 1) @ both.mT


def spread(x: Tensor) -> tuple[Tensor, ...]:
    return x.var(0), x.std(-1), x.mean(), x.prod(1), (x > 0.5).sum(), x.norm()


_S, _W = (16, 64), (64, 64)
_T = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
_HALF = torch.bfloat16
PROGRAMS: dict[str, Program] = {
    "softmax": Program(lambda x, w, b: torch.log(F.linear(x, w, b)).relu().softmax(-1), ((64, 32), (16, 32), (16,))),
    "log_softmax": Program(lambda x, w: (x @ w).log_softmax(-1), (_S, _W), _HALF),
    "layer_norm": Program(normalised, (_S, _W, (64,), (64,))),
    "layer_norm_low": Program(normalised, (_S, _W, (64,), (64,)), _HALF),
    "rms_norm": Program(rms, ((8, 64), (64,)), _HALF),
    "attention": Program(attention, ((2, 16, 64), _W, _W, _W)),
    "attention_low": Program(attention, ((2, 16, 64), _W, _W, _W), _HALF),
    "rotary": Program(rotary, ((2, 16, 64), _W, _W)),
    "gated": Program(gated, (_S, _W, _W, _W, (64,))),
    "gated_low": Program(gated, (_S, _W, _W, _W, (64,)), _HALF),
    "layers": Program(layers, (_S, _W, _W, _W, (64,))),
    "loss": Program(loss, (_S, (64, 50))),
    "steps": Program(steps, ((4, 5, 16), (16, 32))),
    "in_place": Program(in_place, ((64, 64), _W)),
    "adam": Program(adam, ((1000,),) * 4),
    "pooled": Program(pooled, ((2, 3, 16, 16), (3, 3, 3, 3))),
    "looked_up": Program(looked_up, ((12, 20), (50, 32))),
    "scanned": Program(scanned, ((32, 64),)),
    "joined": Program(joined, ((32, 16), (32, 48))),
    "spread": Program(spread, ((300, 700),)),
    "split": Program(lambda x: F.layer_norm(x, (100_000,)).sum(0), ((4, 100_000),)),
    "dropout": Program(lambda x, w: F.dropout(x @ w, 0.5) * 2, (_S, _W)),
    "where": Program(lambda x, y: torch.where(x > y, x / (y + 2), (x - y).abs().sqrt()), ((8, 1, 32), (8, 16, 1))),
    "pow": Program(lambda x, y: x.pow(2) * y.pow(-0.5) + x.clamp(-1, 1).pow(y), ((8, 32), (8, 32))),
    "group_norm": Program(lambda x: F.silu(F.group_norm(x, 4)), ((2, 16, 8, 8),)),
    "sorted": Program(lambda x: x.sort(-1).values.diff() * x[..., 1:], ((8, 64),)),
    "mm": Program(lambda x, w: (x @ w).relu() + 1, ((256, 128), (128, 256)), _HALF, _T),
    "addmm": Program(lambda x, w, b: F.gelu(torch.addmm(b, x, w)), ((256, 128), (128, 256), (256,)), _HALF, _T),
    "bmm": Program(lambda x, y: torch.bmm(x, y).tanh(), ((4, 64, 64), (4, 64, 64)), _HALF, _T),
    "gated_template": Program(gated, (_S, _W, _W, _W, (64,)), _HALF, _T),
    "combo": Program(lambda x, y: (x.sin(), y.cos(), x.sum(0)), ((64, 32), (40,)), options={"combo_kernels": True}),
    "foreach": Program(lambda x, y: tuple(torch._foreach_add(torch._foreach_mul([x, y], 2.0), 1.0)), (_S, (40,))),
    "dynamic": Program(lambda x, w: (x @ w).softmax(-1) * 2, (_S, _W), dynamic=True),
}


_KERNEL = re.compile(r"(?<=''')\n.*?(?=^''')", re.MULTILINE | re.DOTALL)


def shortened(text: str) -> str:
    """The text of a wrapper without what nothing is read of: of kernels, metadata, loads and stores are left."""

    def kernel(match: re.Match[str]) -> str:
        code = match[0]
        lines = re.findall(r"^ +(?:tmp\d+ = tl\.load|tl\.(?:store|atomic_\w+))\(\w+", code, re.MULTILINE)
        head = re.findall(r"^@triton\.jit\n(def .*?\):)$", code, re.MULTILINE | re.DOTALL)[-1:]
        types = re.findall(r"'signature': \{.*?\}", code)[:1]
        mutated = re.findall(r"'mutated_arg_names': \[.*?\]", code)[:1]
        if not head or not types:
            return code
        meta = f"@triton_heuristics.any(triton_meta={{{types[0]}}}, inductor_meta={{{', '.join(mutated)}}})"
        return "\n".join(["", meta, "@triton.jit", *head, *(f"    {line.strip()})" for line in lines), ""])

    body = text[text.index("# kernel path") : text.index("runner = Runner")]
    lines = _KERNEL.sub(kernel, body).splitlines()
    left_out = r"# kernel path|# Source node|#   [\w, ]+ =>|\s*del \w+$|\s*assert_alignment|\s*$|\s+(?:raw_)?stream0"
    return "\n".join(line for line in lines if not re.match(left_out, line)) + "\n"


def compared(text: str, graph: list[Any]) -> tuple[Counter[str], list[str]]:
    """How many outputs the graph tells and the text tells the same way, and where the two differ."""
    counts, wrong = Counter(kernels=len(graph)), []
    source = WrapperSource(text, "key")
    found = written.told(source)
    for (line, kernel), plain in zip(source.launches.items(), graph, strict=True):
        fragment = found.get(line)
        by_text = outputs_of((fragment and fragment.as_plain()) or _EMPTY)
        by_graph = outputs_of(plain or _EMPTY)
        counts.update(outputs=len(by_graph), told=len(by_text), kernels_told=bool(by_text))
        wrong += [f"{kernel}, {place}" for place, each in by_text.items() if by_graph.get(place) != each]
    return counts, wrong


_EMPTY: dict[str, Any] = {"given": {}, "made": {}, "nodes": []}


def main() -> int:
    """Compare, and return how many outputs are told otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of programs; all without one")
    parser.add_argument("--write", metavar="FILE", help="store the texts, and what the graph tells, in this file")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    stored, bad = [], 0
    for name in options.names or PROGRAMS:
        for kind, graph, text in generated(PROGRAMS[name]):
            source = WrapperSource(text, "key")
            provenance.tell(graph, source)
            plain = [each.fragment and each.fragment.as_plain() for each in source.launches.values()]
            short = shortened(text)
            for each in (text, short):
                counts, wrong = compared(each, plain)
                bad += len(wrong)
                for line in wrong:
                    print(f"  WRONG: {name} {kind}: {line}")
            total += counts
            stored.append(f"# ---- {name}_{kind}\n{short}# graph: {json.dumps(plain, separators=(',', ':'))}\n")
            print(f"{name} {kind}: {dict(counts)}", flush=True)
    if options.write:
        Path(options.write).write_text("".join(stored))
    print(f"{dict(total)}, {bad} wrong")
    return bad


if __name__ == "__main__":
    sys.exit(main() != 0)
