"""Tells whether a C++ compiler is there, marks what needs one, and builds a module for several tests."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import Any

import pytest

BUILDS = shutil.which((shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]) is not None

needs_compiler = pytest.mark.skipif(not BUILDS, reason="needs a C++ compiler")
# Slow, since the first test that asks for compiled kernels builds them.
_MARKS = [needs_compiler, pytest.mark.slow]
COMPILED = pytest.param({"engine": "compiled"}, id="compiled", marks=_MARKS)
# What `intercept` takes for each engine: those of dispatch level, and all.
_FUNCTION = pytest.param({"level": "function"}, id="function")
BELOW_FUNCTIONS = [pytest.param({}, id="kernel"), COMPILED, pytest.param({"engine": "mode"}, id="mode")]
ALL_ENGINES = [*BELOW_FUNCTIONS, _FUNCTION]
# The same without compiled kernels.
BELOW = [BELOW_FUNCTIONS[0], BELOW_FUNCTIONS[2]]
LEVELS = [*BELOW, _FUNCTION]
ENGINES = ["kernel", "mode", pytest.param("compiled", marks=_MARKS)]

needs_ninja = pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")
_PYBIND = """
#include <ATen/ops/mm.h>  // and not all of ATen, which takes seconds
#include <ATen/ops/mul.h>
#include <torch/csrc/utils/pybind.h>
namespace py = pybind11;
at::Tensor mul(at::Tensor x, at::Tensor w, double scale) { return at::mul(at::mm(x, w.t()), scale); }
at::Tensor twice(at::Tensor x) {
  at::Tensor out = at::mul(x, x);
  float* values = out.data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); i++) values[i] *= 2;
  return out;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("mul", &mul, py::arg("x"), py::arg("w"), py::arg("scale") = 1.0);
  m.def("twice", &twice);
}
"""


def with_pybind() -> Any:
    """The module `with_pybind`, which has functions in C++. It is built once, since that takes ten seconds."""
    from torch.utils.cpp_extension import load_inline

    # The implicit headers take a minute to compile.
    return load_inline("with_pybind", _PYBIND, extra_cflags=["-O0"], no_implicit_headers=True)
