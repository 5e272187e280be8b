"""Whether this machine can build the compiled kernels, and the engine that needs them as a parameter of tests."""

from __future__ import annotations

import shutil

import pytest

try:
    from torch.utils.cpp_extension import get_cxx_compiler
except ImportError:  # without setuptools
    BUILDS = False
else:
    BUILDS = shutil.which(get_cxx_compiler()) is not None

needs_compiler = pytest.mark.skipif(not BUILDS, reason="needs a C++ compiler and setuptools")
COMPILED = pytest.param({"engine": "compiled"}, id="compiled", marks=needs_compiler)
