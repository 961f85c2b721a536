"""The Triton kernels under Triton's interpreter, against the reference, on small shapes chosen to hurt.

The interpreter is chosen when a kernel module is first imported, so the cases run in one process of their own.
They are fp32, and fp16 in the place of bf16, which the interpreter cannot multiply.
"""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("triton_cases.py")


def test_kernels_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CASES.parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
