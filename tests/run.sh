#!/usr/bin/env bash
# Runs the tests, in rungs; sets up .venv first when that is missing.
#   bash tests/run.sh                 --lint, then --cpu (under 15 minutes on 2 cores)
#   bash tests/run.sh --lint          style, spelling, types
#   bash tests/run.sh --cpu           the tests that need no GPU
#   bash tests/run.sh --slow          the long ones of them, which --cpu leaves out
#   bash tests/run.sh --gpu           the tests on GPUs (tests/gpu.sh)
#   bash tests/run.sh --both          --lint, then --cpu on Python 3.11 (megatron-core 0.16) and on 3.12 (0.19)
#   bash tests/run.sh --found         the same on those of the two that are here
#   bash tests/run.sh ARGUMENTS...    pytest with these arguments
# After --cpu, --slow, --gpu, --both and --found further arguments go to pytest.
# ENVIRONMENTS names another checkout, whose environments are used and made instead of this one's.
set -euo pipefail
cd "$(dirname "$0")/.."
home="${ENVIRONMENTS:-$PWD}"
export OMP_NUM_THREADS=1

lint() { # with .venv, where pyproject.toml sends pyright
    "$home/.venv/bin/ruff" check .
    "$home/.venv/bin/ruff" format --check .
    "$home/.venv/bin/codespell" $(git ls-files '*.py' '*.md' '*.sh' '*.yaml' '*.toml')
    "$home/.venv/bin/pyright" --venvpath "$home"
}

cpu() { # ENVIRONMENT ARGUMENTS...
    local environment="$1"
    shift
    "$environment/bin/python" -m pytest -m "not slow" "$@"
}

# Prints a Python of VERSION that starts and can make environments: pyenv's shims stand on the path for versions that
# they do not start.
find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1".*/bin/python; do
        if [ "$("$candidate" -c 'import ensurepip, sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)" = "$1" ]; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Tests every version given on an environment of its own; the first one's also lints.
versions() { # VERSIONS ARGUMENTS...
    local version python environment linted=no
    for version in $1; do
        python="$(find_python "$version")"
        environment="$home/.venv-$version"
        if [ "$linted" = no ]; then environment="$home/.venv"; fi
        echo "tests: Python $version in $environment"
        PYTHON="$python" bash "$home/launch/setup.sh" "$environment"
        if [ "$linted" = no ]; then lint; fi
        linted=yes
        cpu "$environment" "${@:2}"
    done
}

case "${1:-}" in
    --both | --found)
        found=""
        for version in 3.11 3.12; do
            if find_python "$version" > /dev/null; then
                found="$found $version"
            else
                echo "tests: no python$version that starts, neither on the path nor among pyenv's versions" >&2
                if [ "$1" = --both ]; then exit 2; fi
            fi
        done
        if [ -z "$found" ]; then exit 2; fi
        versions "$found" "${@:2}"
        ;;
    --gpu) PYTHON="${PYTHON:-}" exec bash tests/gpu.sh "${@:2}" ;;
    *)
        bash "$home/launch/setup.sh"
        case "${1:-}" in
            "") lint; cpu "$home/.venv" ;;  # not joined by &&, under which `set -e` would let lint go on
            --lint) lint ;;
            --cpu) cpu "$home/.venv" "${@:2}" ;;
            --slow) "$home/.venv/bin/python" -m pytest -m slow "${@:2}" ;;
            *) "$home/.venv/bin/python" -m pytest "$@" ;;
        esac
        ;;
esac
