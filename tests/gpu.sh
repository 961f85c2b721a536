#!/usr/bin/env bash
# Runs the tests of the GPU kernels at full sizes; needs one NVIDIA GPU with 80 GB and takes about five minutes.
#   bash tests/gpu.sh                 all of them
#   bash tests/gpu.sh ARGUMENTS...    pytest with these arguments
# PYTHON chooses the interpreter; the default is .venv's, or python3 where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
"$PYTHON" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "tests/gpu.sh: torch sees no GPU")'
exec "$PYTHON" -m pytest tests/gpu --durations=5 "$@"
