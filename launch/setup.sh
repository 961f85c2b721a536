#!/usr/bin/env bash
# Makes the virtual environment: `bash launch/setup.sh [FOLDER]` (default .venv), with $PYTHON (default python3).
# Installs the exact versions of launch/constraints.txt, and does nothing when that has been done already.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
venv="${1:-$here/.venv}"
python="${PYTHON:-python3}"

if ! "$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' 2>/dev/null; then
    echo "setup: $python is not Python 3.11 or 3.12; set PYTHON to one that is" >&2
    exit 2
fi
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
stamp="$version $(cat "$here/pyproject.toml" "$here/launch/constraints.txt" | cksum) $here"
if [ -f "$venv/.longpitch" ] && [ "$(cat "$venv/.longpitch")" = "$stamp" ]; then
    exit 0
fi

echo "setup: installing into $venv with Python $version (several GB of packages, some minutes)"
[ -x "$venv/bin/python" ] && [ "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$version" ] \
    || "$python" -m venv --clear "$venv"
rm -f "$venv/.longpitch"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$here/launch/constraints.txt" --editable "$here[dev]"
echo "$stamp" > "$venv/.longpitch"
echo "setup: done"
