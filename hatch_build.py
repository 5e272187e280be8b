"""Puts the compiled engine into the wheel where OPINTERCEPT_BUILD asks for it. Without that the wheel is pure Python.

`OPINTERCEPT_BUILD=1` builds for the Python and torch that make the wheel. Any other value is a folder with what
`opintercept build --into FOLDER` has made, with as many versions of Python and torch as there are.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
SETTING = "OPINTERCEPT_BUILD"
INSIDE = "opintercept/_native/libraries"  # as `opintercept._native.build.PACKAGED`


class CompiledEngine(BuildHookInterface[Any]):
    """Adds the libraries, and marks the wheel as one for this kind of machine."""

    _built: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Find or build the libraries. An editable install takes them from the cache, as any checkout does."""
        setting = os.environ.get(SETTING, "")
        if setting in ("", "0") or version == "editable":
            return
        folder = self._build() if setting == "1" else Path(setting)
        files = sorted([*folder.glob("*.so"), *folder.glob("*.so.sha256")])
        if not files:
            raise RuntimeError(
                f"{SETTING} must be 1, or a folder that `opintercept build --into FOLDER` has filled, got {setting!r}"
            )
        build_data["force_include"].update({str(file): f"{INSIDE}/{file.name}" for file in files})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"  # any Python: without its library it runs kernels in Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built, which is in the wheel now."""
        if self._built is not None:
            self._built.cleanup()

    def _build(self) -> Path:
        if importlib.util.find_spec("torch") is None:
            raise RuntimeError(f"{SETTING}=1 needs torch beside the build backend; pass --no-build-isolation to pip")
        self._built = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "opintercept", "build", "--into", self._built.name]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        return Path(self._built.name)


def _platform() -> str:
    """The platform's tag, as pip knows it. A Python for two processors builds for the one on which it runs."""
    return sysconfig.get_platform().replace("universal2", platform.machine()).replace("-", "_").replace(".", "_")
