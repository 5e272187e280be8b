"""Wheels: pure Python unless OPINTERCEPT_BUILD asks for the compiled engine, and then with what each Python needs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import sampled
from builds import fake_builds, unoptimized
from compiler import needs_compiler
from native import run_python

pytest.importorskip("hatchling")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OTHER = "OPINTERCEPT_OTHER_PYTHON"
"""Names a second interpreter that has torch, of any version."""


def make_wheel(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    return subprocess.run(
        [*command, "-w", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OPINTERCEPT_BUILD"} | environment,
    )


def contents(folder: Path) -> tuple[str, list[str], str]:
    """The tag of the only wheel in a folder, the ends of the names of libraries in it, and what pip reads of it."""
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        libraries = [name for name in names if name.startswith("opintercept/_native/libraries/")]
        sources = {"opintercept/_native/values.cpp", "opintercept/_engines/compiled/kernels.cpp"}
        assert sources | {"opintercept.pth"} <= set(names)
        return path.stem.split("-", 2)[2], libraries, wheel.read(about).decode()


def test_a_wheel_is_pure_python_unless_it_is_asked_for_more_and_its_extra_has_what_a_report_needs(
    tmp_path: Path,
) -> None:
    done = make_wheel(tmp_path, CXX="no-such-compiler", OPINTERCEPT_BUILD="0")
    assert done.returncode == 0, done.stderr
    tag, libraries, about = contents(tmp_path)
    assert (tag, libraries) == ("py3-none-any", [])
    assert "Root-Is-Purelib: true" in about
    environment = tmp_path / "environment"
    venv.create(environment)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # pip takes what the extra needs from there
    (wheel,) = tmp_path.glob("*.whl")
    python = str(environment / "bin/python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", f"{wheel}[cli]"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    installed = subprocess.run(install, capture_output=True, text=True, env=plain, check=False)
    assert (installed.returncode, "does not provide" in installed.stderr) == (0, False), installed.stderr
    (tmp_path / "small.py").write_text("import torch\ntorch.ones(2, 3) @ torch.ones(3, 4)\n")
    (tmp_path / "parent.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:]])\n")
    runs = f"""
        "{environment}/bin/opintercept" run --out a small.py &&
        "{environment}/bin/opintercept" run -q --out b parent.py -I small.py &&
        ls b &&
        "{environment}/bin/opintercept" report a -o report.html &&
        "{python}" -c "import opintercept; print(opintercept.__file__)"
    """
    done = subprocess.run(["sh", "-c", runs], capture_output=True, text=True, cwd=tmp_path, env=plain, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("small-")  # the folder of the child
    assert done.stdout.splitlines()[-1] == str(site / "opintercept/__init__.py")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_one_setting_puts_the_libraries_into_the_wheel(tmp_path: Path) -> None:
    with fake_builds(tmp_path) as builds:
        done = make_wheel(tmp_path / "dist", OPINTERCEPT_BUILD="1", CXX=str(builds.compiler))
    assert done.returncode == 0, done.stderr
    tag, libraries, about = contents(tmp_path / "dist")
    assert tag.startswith("py3-none-")
    assert tag != "py3-none-any"
    assert "Root-Is-Purelib: false" in about
    assert sorted({name.partition(".so")[2] for name in libraries}) == ["", ".sha256"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OPINTERCEPT_BUILD": "1", "CXX": "no-such-compiler"}, "compiled kernels need a C++ compiler"),
        ({"OPINTERCEPT_BUILD": "dist"}, "OPINTERCEPT_BUILD must be 1, or a folder that `opintercept build --into"),
    ],
    ids=["no compiler", "no libraries"],
)
def test_a_wheel_without_what_was_asked_for_is_not_made(
    environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    done = make_wheel(tmp_path, **environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the script makes for this Python, and for the other one if there is one."""
    if sampled.on:
        pytest.skip("builds three libraries; run without --sampled")
    folder = tmp_path_factory.mktemp("wheel")
    pythons = [sys.executable, *filter(None, [os.environ.get(OTHER)])]
    options = ["--no-build-isolation", "--no-index", "--out", str(folder)]
    done = subprocess.run(
        [sys.executable, "scripts/wheel.py", *options, *pythons],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CXX": unoptimized(folder)},  # three libraries are built
    )
    assert done.returncode == 0, done.stderr
    *built, wheel = done.stdout.splitlines()
    assert len(built) == len(pythons)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


# What a program says of the library, and what it sees with it.
PROGRAM = """
import torch
import opintercept
from opintercept import hooks, intercept
with intercept([recorder := hooks.Recorder(), stats := hooks.Stats()]) as interceptor:
    torch.nn.Linear(3, 4)(torch.ones(2, 3)).sum().backward()
(row,) = stats.rows()[:1]
found = opintercept.info()
print(opintercept.__file__)
print(interceptor.watcher.engine.name, found.engine, found.values, found.library, found.reason)
print(*(record.op for record in recorder.records), row.module)
"""


def run_installed(
    folder: Path, empty: Path, python: str = sys.executable, code: str = PROGRAM, **environment: str
) -> list[str]:
    """Run the program where nothing but the wheel could have the library."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    nothing = {"TORCH_EXTENSIONS_DIR": str(empty), "CXX": "no-such-compiler", "PYTHONPATH": path}
    return run_python(code, python, empty, **nothing, **environment)


@needs_compiler
@pytest.mark.parametrize("capability", ["", "avx2", "default"])
def test_the_library_of_a_wheel_is_taken(capability: str, installed: Path, tmp_path: Path) -> None:
    more = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    place, engine, ops = run_installed(installed, tmp_path, **more)
    assert place == str(installed / "opintercept" / "__init__.py")
    assert engine.startswith(f"compiled compiled True {installed / 'opintercept/_native/libraries'}{os.sep}torch")
    assert ops == "aten::addmm aten::mm Linear"
    assert list(tmp_path.iterdir()) == []


@needs_compiler
@pytest.mark.skipif(OTHER not in os.environ, reason=f"needs a second interpreter with torch in {OTHER}")
def test_one_wheel_serves_two_pythons(installed: Path, tmp_path: Path) -> None:
    engines = [run_installed(installed, tmp_path, python)[1] for python in (sys.executable, os.environ[OTHER])]
    assert all(engine.startswith(f"compiled compiled True {installed}{os.sep}") for engine in engines)
    assert engines[0] != engines[1]  # each has a library of its own


@needs_compiler
def test_a_wheel_for_another_torch_runs_kernels_in_python(installed: Path, tmp_path: Path) -> None:
    """As after an upgrade of torch."""
    upgraded = "import torch\ntorch.__version__ = '2.99.0'\n"
    _, engine, ops = run_installed(installed, tmp_path, code=upgraded + PROGRAM)
    assert engine.startswith("kernel kernel False None no library has been built for torch 2.99.0 and Python 3.")
    assert ops == "aten::addmm aten::mm Linear"
