#!/usr/bin/env bash
# Runs the tests on another torch, in a virtual environment of its own that is kept for the next time:
#   tests/versions.sh 2.11.0 [argument of pytest ...]
#   PYTHON=python3.14 tests/versions.sh 2.15.0 --compiled
# pip's own variables say where builds come from; the registry's own for Linux bring CUDA's libraries with them.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?which version of torch, as in: tests/versions.sh 2.11.0}
shift
python=${PYTHON:-python3}
environment=.venv-torch-$version${PYTHON:+-$(basename "$PYTHON")}
"$python" -m venv "$environment"
sed "s/^torch==.*/torch==$version/" constraints.txt > "$environment/constraints.txt"
"$environment/bin/pip" install -q -c "$environment/constraints.txt" -e '.[test]'
"$environment/bin/python" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version)'
"$environment/bin/python" -m pytest -q --whole "$@"
