"""Runs that are killed, told to stop, started twice or lose their shards while they read them."""

import fcntl
import os
import random
import re
import shutil
import signal

from data_prep.host import host_folder
from tests.launch.runs import finish, losses, start, steps_done, wait_for_step


def test_killed_run_goes_on_bit_equal(shards, tmp_path):
    """SIGKILL at a random step; the same command again; then SIGTERM, which saves and exits 0; and again to the end."""
    run_dir, whole = tmp_path / "killed", tmp_path / "whole"
    step = random.SystemRandom().randint(1, 14)
    print("killed after step", step)
    processes = start(run_dir, shards)
    wait_for_step(run_dir, step, processes)
    for process in processes:
        process.kill()
    finish(processes)

    processes = start(run_dir, shards)
    wait_for_step(run_dir, min(step + 2, 16), processes)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes, outputs = finish(processes)
    assert codes == [0, 0], outputs
    newest = max(int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/*/complete.json"))
    assert newest == steps_done(run_dir)

    codes, outputs = finish(start(run_dir, shards))
    assert codes == [0, 0], outputs
    codes, _ = finish(start(whole, shards))
    assert codes == [0, 0] and len(losses(whole)) == 20
    assert losses(run_dir) == losses(whole)
    assert len(list(run_dir.glob("checkpoints/step_*"))) == 2  # the newest checkpoint.keep
    assert [output.count("resumed from") for output in outputs] == [1, 0]  # said by one rank only

    codes, outputs = finish(start(run_dir, shards))
    assert codes == [0, 0] and "already trained to step 20" in outputs[0]
    assert not host_folder(run_dir).with_suffix(".job").exists()


def test_two_jobs_do_not_share_a_run_directory(shards, tmp_path):
    run_dir = tmp_path / "shared"
    run_dir.mkdir()
    with open(run_dir / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        codes, outputs = finish(start(run_dir, shards, "parallel.context=1", world=1))
    assert codes == [1] and "another job is training here" in outputs[0]
    assert "Traceback" not in outputs[0]


def test_vanished_shard_ends_all_ranks(shards, tmp_path):
    """A shard that disappears while the run reads it: exit code 1 and a sentence from every rank, in seconds."""
    copy, run_dir = tmp_path / "vanishing", tmp_path / "vanished"
    shutil.copytree(shards, copy)
    processes = start(run_dir, copy, "train.steps=100000", "checkpoint.interval=0", "data.timeout_seconds=10")
    wait_for_step(run_dir, 2, processes)
    for shard in (copy / "train").glob("shard*"):
        os.truncate(shard, 8)
    codes, outputs = finish(processes, seconds=90)
    assert codes == [1, 1], outputs
    text = "".join(outputs)
    assert "Traceback" not in text and re.search(r"^longpitch \(rank \d\): .*(shard|rank)", text, re.MULTILINE), text
    for rank in range(2):  # what another rank has said alike stands in this one's log
        last = (run_dir / "logs" / f"rank_{rank}.log").read_text().splitlines()[-1]
        assert re.search(r"of shard .* cannot be read|another rank has ended", last), last
