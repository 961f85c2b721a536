#!/usr/bin/env bash
# Runs the tests that need a GPU: the kernels at full sizes, and training from shards to a checkpoint and on from there.
# One NVIDIA GPU with 80 GB, or two: then also what is cut over two. Takes about ten minutes.
#   bash tests/gpu.sh                 all of them
#   bash tests/gpu.sh ARGUMENTS...    pytest with these arguments
# PYTHON chooses the interpreter; the default is .venv's, or python3 where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
"$PYTHON" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "tests/gpu.sh: torch sees no GPU")'
exec "$PYTHON" -m pytest tests/gpu --durations=5 "$@"
