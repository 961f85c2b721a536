#!/usr/bin/env bash
# From nothing to a trained, killed, resumed and sampled FreeSolo model: `bash launch/quickstart.sh [FOLDER]`.
# Text: Python's own library, which every machine has. Two processes with context parallelism 2 on the CPU, or on two
# GPUs where there are two. FOLDER (default runs/quickstart) receives everything; delete it to start over.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=true
exec .venv/bin/python -m launch.quickstart "${1:-runs/quickstart}"
