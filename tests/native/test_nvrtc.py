"""The kernel compiles for GPUs that are not there, and its code is kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sampled

from opintercept._native import build, nvrtc

CUDA = "13.0"
# With `--sampled` each architecture and each kind of code is there.
CODES = [
    pytest.param(architecture, checks, id=f"{architecture}-{'checks' if checks else 'reads'}")
    for architecture in ("sm_80", "sm_90", "sm_100")
    for checks in (False, True)
    if not sampled.on or checks != (architecture == "sm_90")
]


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        nvrtc._library(CUDA.partition(".")[0])
    except RuntimeError as error:
        pytest.skip(f"{error}; `pip install nvidia-cuda-nvrtc` brings it")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return build.cache_folder()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("architecture", "checks"), CODES)
def test_the_kernel_compiles_for_a_gpu_and_is_kept(
    architecture: str, checks: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code_for() -> bytes:
        return nvrtc.code_for(architecture, CUDA, checks)

    code = code_for()
    assert code[:4] == b"\x7fELF"
    assert (b"opintercept_read" in code) is not checks
    every = [f"opintercept_check_{stage}_{kind}".encode() for stage in range(4) for kind in ("float", "double")]
    assert {name in code for name in every} == {checks}
    [kept] = cache.iterdir()
    monkeypatch.setattr(nvrtc, "_compiled", lambda *_: b"compiled again")
    assert code_for() == code
    kept.write_bytes(kept.read_bytes()[:-1])  # a part of it
    assert code_for() == b"compiled again"
    assert code_for() == b"compiled again"
    monkeypatch.setattr(nvrtc, "OPTIONS", [])
    assert code_for() == b"compiled again"
    assert len([*cache.iterdir()]) == 2


@pytest.mark.usefixtures("compiler")
def test_what_the_compiler_says_is_told(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    source = tmp_path / "kernel.h"
    source.write_text("int x = ;\n")
    monkeypatch.setattr(nvrtc, "SOURCE", source)
    with pytest.raises(RuntimeError, match=r"kernel\.h\(1\): error: expected an expression.*NVRTC_ERROR_COMPILATION"):
        nvrtc.code_for("sm_90", CUDA)
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_INVALID_OPTION"):
        nvrtc.code_for("sm_1", CUDA)
    assert not cache.exists()


def test_without_nvrtc_its_name_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(RuntimeError, match=r"libnvrtc\.so"):
        nvrtc.code_for("sm_90", "7.5")


@pytest.mark.usefixtures("compiler")
def test_a_machine_without_a_writable_folder_compiles_each_time(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "_compiled", lambda *_: b"code")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "a file" / "x"))
    (tmp_path / "a file").write_text("")
    assert nvrtc.code_for("sm_90", CUDA) == b"code"
