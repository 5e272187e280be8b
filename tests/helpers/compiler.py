"""Whether this machine can build the compiled kernels, and the engine that needs them as a parameter of tests."""

from __future__ import annotations

import os
import shutil

import pytest

BUILDS = shutil.which(os.environ.get("CXX", "c++")) is not None

needs_compiler = pytest.mark.skipif(not BUILDS, reason="needs a C++ compiler")
COMPILED = pytest.param({"engine": "compiled"}, id="compiled", marks=needs_compiler)
