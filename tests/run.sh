#!/usr/bin/env bash
# Runs every test that needs no GPU; sets up .venv first when that is missing.
#   bash tests/run.sh                 lint, types and the tests CI runs (under 15 minutes on 2 cores)
#   bash tests/run.sh --slow          the long tests only
#   bash tests/run.sh --both          the tests on Python 3.11 (megatron-core 0.16) and 3.12 (0.19), where both are found
#   bash tests/run.sh ARGUMENTS...    pytest with these arguments
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

if [ "${1:-}" = "--both" ]; then
    shift
    for version in 3.11 3.12; do
        command -v "python$version" > /dev/null || { echo "tests: no python$version here, skipping it"; continue; }
        echo "tests: Python $version"
        PYTHON="python$version" bash launch/setup.sh ".venv-$version"
        ".venv-$version/bin/python" -m pytest -m "not slow" "$@"
    done
    exit 0
fi

bash launch/setup.sh
case "${1:-}" in
    "") 
        .venv/bin/ruff check .
        .venv/bin/ruff format --check .
        .venv/bin/codespell $(git ls-files '*.py' '*.md' '*.sh' '*.yaml' '*.toml')
        .venv/bin/pyright
        .venv/bin/python -m pytest -m "not slow"
        ;;
    --slow) shift; .venv/bin/python -m pytest -m slow "$@" ;;
    *) .venv/bin/python -m pytest "$@" ;;
esac
