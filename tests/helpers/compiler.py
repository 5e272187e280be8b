"""Tells whether a C++ compiler is there, and marks what needs one."""

from __future__ import annotations

import os
import shlex
import shutil

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
