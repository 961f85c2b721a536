"""What the launch tests rest on: a job that dies is an error of its own, and no rank is waited for in vain."""

import json
import subprocess
import sys
import time

import pytest

from tests import distributed
from tests.launch.runs import run_jobs
from tests.launch.train_program import found_path


def test_only_the_dead_job_has_no_result(tmp_path):
    launches = []

    def launch(path):
        """Runs jobs as the train program does, and dies in b with half a line written."""
        names = [job["name"] for job in json.loads(path.read_text())]
        launches.append(names)
        with open(found_path(path), "w") as file:
            for name in names:
                if name == "b":
                    file.write('{"b": {"los')
                    file.flush()
                    raise AssertionError("rank 1, exit 1: no more memory")
                file.write(json.dumps({name: {"losses": [1.0]}}) + "\n")

    found = run_jobs(tmp_path, 2, [{"name": name} for name in "abcd"], launch)
    assert launches == [["a", "b", "c", "d"], ["c", "d"]]
    assert [found[name]["losses"] for name in "acd"] == [[1.0]] * 3
    with pytest.raises(AssertionError, match="job b died: rank 1, exit 1: no more memory"):
        found["b"]
    with pytest.raises(KeyError):
        found["e"]


def test_a_launch_that_fails_after_its_last_job_is_not_passed_over(tmp_path):
    def launch(path):
        found_path(path).write_text('{"a": {}}\n')
        raise AssertionError("rank 0, exit 139")

    with pytest.raises(AssertionError, match="all jobs were done, but rank 0, exit 139"):
        run_jobs(tmp_path, 1, [{"name": "a"}], launch)


def test_ranks_are_not_waited_for_once_one_has_failed(monkeypatch):
    monkeypatch.setattr(distributed, "GRACE", 0.2)
    codes = ("import sys; sys.exit(3)", "import time; time.sleep(60)")
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    began = time.monotonic()
    try:
        assert distributed._exit_codes(ranks, timeout=50) == [3, None]
    finally:
        ranks[1].kill()
        ranks[1].wait()
    assert time.monotonic() - began < 20
