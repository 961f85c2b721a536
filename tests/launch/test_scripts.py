"""The scripts around the tests say what is missing and fail."""

import os
import subprocess

import pytest

from tests.distributed import ROOT


@pytest.mark.parametrize(("option", "missing"), [("--both", ["3.11"]), ("--found", ["3.11", "3.12"])])
def test_a_python_that_does_not_start_is_no_python(tmp_path, option, missing):
    """As pyenv's shims of other versions: they stand on the path and end with 127."""
    for version in ("3.11", "3.12"):
        shim = tmp_path / f"python{version}"
        shim.write_text("#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n")
        shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYENV_ROOT": str(tmp_path)}
    done = subprocess.run(
        ["bash", "tests/run.sh", option], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    say = "tests: no python{} that starts, neither on the path nor among pyenv's versions"
    assert done.stderr.splitlines() == [say.format(version) for version in missing]
