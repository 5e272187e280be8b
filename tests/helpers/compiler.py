"""Tells whether a C++ compiler is there, and marks what needs one."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest

BUILDS = shutil.which((shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]) is not None

needs_compiler = pytest.mark.skipif(not BUILDS, reason="needs a C++ compiler")
COMPILED = pytest.param({"engine": "compiled"}, id="compiled", marks=needs_compiler)
