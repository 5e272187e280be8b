"""What a GPU says of the kernels that check products: `python tests/programs/device_checksum.py`, in a minute.

They are held to what torch's operators find there: verdicts of random products, right and wrong ones, and their dtypes
and layouts. Then a decoding step of a small Llama is timed without hooks, with a no-op hook and under `Checksum`, and
the launches of a product by size. What fails says so, and the rest goes on. With `--host`, a stand-in runs the kernels.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parent)]

import checksum_figures
import torch
from torch import Tensor, nn

from opintercept import OpCall, hooks, intercept
from opintercept._values import on_device

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def torchs_operators() -> Iterator[None]:
    """Let torch's operators check products."""
    before = on_device.DEVICE
    on_device.DEVICE = "none"
    try:
        yield
    finally:
        on_device.DEVICE = before


class Hit:
    """Changes one element in every second output."""

    def post(self, call: OpCall) -> None:
        if call.index % 2:
            flat = call.output.reshape(-1) if not call.output.is_contiguous() else call.output.view(-1)
            place = (call.index * 7919) % flat.numel()
            flat[place] += flat.abs().amax() * (0.5 if call.index % 4 == 1 else 4) + 1
            if flat.data_ptr() != call.output.data_ptr():
                call.output.copy_(flat.view_as(call.output))


def products(device: torch.device, dtype: torch.dtype, largest: int, count: int) -> Iterator[Callable[[], Any]]:
    """Products of each kind of operands, in several forms and layouts."""
    for number, make in enumerate(checksum_figures.KINDS.values()):
        for m, n, k in checksum_figures.sizes(largest, count):
            a, b = make(m, k).to(device, dtype), make(k, n).to(device, dtype)
            bias = make(1, n).to(device, dtype)[0]
            turned, columns = b.mT.contiguous().mT, a.mT.contiguous().mT
            yield lambda a=a, b=b: torch.mm(a, b)  # type: ignore[misc]
            yield lambda a=a, b=turned: torch.mm(a, b)  # type: ignore[misc]
            yield lambda a=columns, b=b, c=bias: torch.addmm(c, a, b, alpha=0.5, beta=2)  # type: ignore[misc]
            if number % 2:
                yield lambda a=a, b=b: torch.bmm(a.expand(3, *a.shape), torch.stack([b, -b, 2 * b]))  # type: ignore[misc]


def found_by(make: Callable[[], Iterator[Callable[[], Any]]], hit: bool, engine: Any) -> tuple[dict[int, Any], Any]:
    torch.manual_seed(0)
    checksum = hooks.Checksum(action="record")
    with torch.no_grad(), intercept([Hit(), checksum] if hit else checksum, engine=engine):
        for run in make():
            run()
        checksum.check()
    return {each.record.index: each for each in checksum.findings}, checksum


def verdicts(device: torch.device, small: bool) -> None:
    """The findings of both ways, with each precision of float32."""
    for dtype in DTYPES:
        for precision in ("highest", "high") if dtype is torch.float32 else ("highest",):
            torch.set_float32_matmul_precision(precision)
            size = (24, 1) if small else (1024, 3)

            def make(dtype: torch.dtype = dtype, size: tuple[int, int] = size) -> Iterator[Callable[[], Any]]:
                return products(device, dtype, *size)

            for hit in (False, True):
                began = time.perf_counter()
                new, checksum = found_by(make, hit, "compiled")
                took = time.perf_counter() - began
                with torchs_operators():
                    old, _ = found_by(make, hit, "kernel")
                both = new.keys() & old.keys()
                moved = [n for n in both if new[n].position != old[n].position]
                figures = [n for n in both if abs(new[n].exact - old[n].exact) > 1e-9 * abs(old[n].exact) + 1e-30]
                bounds = [n for n in both if abs(new[n].bound - old[n].bound) > 1e-6 * old[n].bound]
                print(
                    f"{dtype} {precision}, {'hit' if hit else 'right'}: {checksum.checked} products, {len(new)} found, "
                    f"{len(old)} by torch's operators; only new {sorted(new.keys() - old.keys())[:5]}, only old "
                    f"{sorted(old.keys() - new.keys())[:5]}, other rows {moved[:5]}, other exact values {figures[:5]}, "
                    f"other bounds {bounds[:5]}; skipped {checksum.skipped}; {took:.1f} s",
                    flush=True,
                )
    torch.set_float32_matmul_precision("highest")


def float8(device: torch.device, small: bool) -> None:
    """Scaled products, right and wrong."""
    a, b = torch.randn(64, 256, device=device), torch.randn(128, 256, device=device)
    lhs, rhs = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).mT
    one = torch.tensor(0.5, device=device)
    for hit in (False, True):
        checksum = hooks.Checksum(action="record")
        with intercept([Hit(), checksum] if hit else checksum):
            for _ in range(4):
                torch._scaled_mm(lhs, rhs, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
            rows, columns = torch.rand(64, 1, device=device), torch.rand(1, 128, device=device)
            for _ in range(4):
                torch._scaled_mm(lhs, rhs, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16)
            checksum.check()
        found = f"{checksum.checked} checked, {len(checksum.findings)} found, {checksum.skipped}"
        print(f"float8, {'hit' if hit else 'right'}: {found}")


class Block(nn.Module):
    """A layer of a Llama without attention's own products, which a fused operator computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 8, bias=False), nn.Linear(width, width // 8, bias=False)
        self.up, self.gate = (
            nn.Linear(width, 11 * width // 4, bias=False),
            nn.Linear(width, 11 * width // 4, bias=False),
        )
        self.down, self.norm = nn.Linear(11 * width // 4, width, bias=False), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        heads = self.q(y).unflatten(-1, (-1, 64)).transpose(1, 2)
        keys, values = (each(y).unflatten(-1, (-1, 64)).transpose(1, 2) for each in (self.k, self.v))
        keys, values = (each.repeat_interleave(8, 1) for each in (keys, values))
        x = x + self.o(nn.functional.scaled_dot_product_attention(heads, keys, values).transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def seconds_of(body: Callable[[], Any], device: torch.device, times: int) -> float:
    found = []
    for _ in range(1 if device.type == "toy" else 3):
        wait(device)
        began = time.perf_counter()
        for _ in range(times):
            body()
        wait(device)
        found.append((time.perf_counter() - began) / times)
    return min(found)


def decode(device: torch.device, small: bool) -> None:
    """Steps of one token, of a prompt, and of training."""
    width, layers = (512, 1) if small else (2048, 22)
    with torch.device(device):
        model = nn.Sequential(
            *(Block(width) for _ in range(layers)), nn.Linear(width, 100 if small else 32000, bias=False)
        )
    model = model.bfloat16()
    ways: dict[str, Any] = {
        "plain": lambda: None,
        "no-op": lambda: lambda call: None,
        "Checksum": lambda: hooks.Checksum(action="record"),
        "Checksum, torch's operators": lambda: hooks.Checksum(action="record"),
    }
    for name, tokens in (("one token", 1), ("prompt", 8 if small else 512)):
        x = torch.randn(1, tokens, width, device=device).bfloat16()
        plain = 0.0
        for way, make in ways.items():
            hook = make()
            other = torchs_operators() if "operators" in way else nullcontext()
            engine: Any = "kernel" if "operators" in way else "compiled"  # in C++, kernels would launch ours
            with torch.no_grad(), other, intercept(hook, engine=engine) if hook is not None else nullcontext():
                for _ in range(2):
                    model(x)
                seconds = seconds_of(lambda x=x: model(x), device, 1 if small else 10)  # type: ignore[misc]
            plain = plain or seconds
            alarms = f", {len(hook.findings)} found in {hook.checked}" if isinstance(hook, hooks.Checksum) else ""
            print(f"{name}, {way}: {seconds * 1e3:.2f} ms, {seconds / plain:.2f} times{alarms}", flush=True)
    x = torch.randn(8, 2 if small else 512, width, device=device).bfloat16()
    for way in ("plain", "Checksum"):
        hook = hooks.Checksum(action="record") if way != "plain" else None
        with intercept(hook, engine="compiled") if hook is not None else nullcontext():

            def step() -> None:
                model(x).float().square().mean().backward()

            step()
            seconds = seconds_of(step, device, 1 if small else 2)
        alarms = f", {len(hook.findings)} found in {hook.checked}, {hook.skipped}" if hook is not None else ""
        print(f"forward and backward of 8 x {x.shape[1]} tokens, {way}: {seconds * 1e3:.2f} ms{alarms}", flush=True)


def launches(device: torch.device, small: bool) -> None:
    """What the kernels take, by the profiler, for products of several shapes."""
    if device.type != "cuda":
        return
    for dtype in (torch.float32, torch.bfloat16):
        for m, n, k in ((1, 2048, 2048), (1, 32000, 2048), (512, 2048, 2048), (4096, 4096, 4096)):
            a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype).mT
            with torch.no_grad(), intercept(hooks.Checksum(action="record"), engine="compiled"):
                for _ in range(3):
                    a @ b.clone(memory_format=torch.preserve_format)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    for _ in range(5):
                        a @ b.clone(memory_format=torch.preserve_format)
                    wait(device)
            times = {each.key: each.self_device_time_total / each.count for each in profile.key_averages()}
            own = {key.split("check_")[1]: f"{us:.0f}" for key, us in times.items() if "opintercept_check" in key}
            others = {key[:24]: f"{us:.0f}" for key, us in times.items() if "opintercept" not in key and us > 0}
            print(f"{dtype} {m} x {k} x {n}: us {own}; beside {others}", flush=True)


if __name__ == "__main__":
    on_host = "--host" in sys.argv
    if on_host:
        import toy_device

        toy_device.use_driver()
    place = torch.device("toy" if on_host else "cuda")
    if not on_host:
        torch.zeros(1, device=place)
    began = time.perf_counter()
    print(
        "ready:",
        on_device.is_ready(place, checks=True),
        on_device.reasons,
        f"{time.perf_counter() - began:.1f} s",
        flush=True,
    )
    for part in (decode, float8, launches, verdicts):
        try:
            part(place, on_host)
        except Exception:
            print(f"{part.__name__} failed:\n{traceback.format_exc()}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s; {on_device.told()}")
