"""`longpitch launch` on one machine, its commands elsewhere and its SLURM script: restarts, stops, exit codes."""

import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.cluster.chain import NoProgressError, note_start
from launch.cluster.faults import first_fault
from launch.cluster.hosts import read_hosts, remote_command
from tests.distributed import ROOT
from tests.launch.train_program import RECIPE
from tests.launch.two_nodes import Launched

SETTINGS = ["parallel.context=1", "train.steps=12", "model.attention.kind=swa", "train.eval_sequences=0"]


def launched(run: Path, shards, *settings: str, options: tuple[str, ...] = ()) -> Launched:
    return Launched(run, ["--gpus", "1", *options], [f"data.shards={shards}", *SETTINGS, *settings])


def checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text("{}")


def test_a_chain_goes_on_only_while_there_are_newer_checkpoints(tmp_path):
    assert note_start(tmp_path, again=False) == 0
    with pytest.raises(NoProgressError, match="without a checkpoint beyond step 0"):
        note_start(tmp_path, again=True)
    checkpoint(tmp_path, 90)
    checkpoint(tmp_path, 100)
    assert note_start(tmp_path, again=True) == 100
    with open(tmp_path / "logs" / "starts.jsonl", "a") as file:
        file.write('{"time": 1, "st')  # of a start that was killed
    with pytest.raises(NoProgressError, match="beyond step 100"):
        note_start(tmp_path, again=True)
    assert note_start(tmp_path, again=False) == 100  # a person may have mended the cause


def test_a_killed_rank_is_started_again_until_there_is_no_progress(tmp_path, shards):
    job = launched(tmp_path / "run", shards, "train.steps=1000", "checkpoint.interval=3")
    job.wait_for_step(4)
    job.ranks()[0].kill()
    job.wait_for_step(7)
    at_most = max(job.steps())
    job.ranks()[0].kill()
    # from here on no start gets further: its first step is never finished
    while job.process.poll() is None:
        for rank in job.ranks().values():
            rank.kill()
    assert job.end() == 93, job.said()
    assert "started again from step" in job.said() and "is not started again" in job.said()
    assert max(job.steps()) >= at_most


def test_a_signal_and_the_stop_file_save_and_end(tmp_path, shards):
    job = launched(tmp_path / "run", shards, "train.steps=100000")
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0, job.said()
    saved = max(job.steps())
    assert (job.run / "checkpoints" / f"step_{saved}" / "complete.json").exists()

    job = launched(tmp_path / "run", shards, "train.steps=100000")
    job.wait_for_step(saved + 2)
    (job.run / "STOP").touch()
    assert job.end() == 0, job.said()
    assert (job.run / "checkpoints" / f"step_{max(job.steps())}" / "complete.json").exists()
    assert "STOP is there" in job.said()

    job = launched(tmp_path / "run", shards, "train.steps=100000")
    assert job.end() == 0 and "nothing is started; remove it to go on" in job.said()


def test_layouts_that_do_not_fit_are_refused_before_anything_starts(tmp_path):
    def refused(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "launch", "launch", str(RECIPE), f"run_dir={tmp_path / 'run'}", *words],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    hosts = tmp_path / "hosts"
    hosts.write_text("a\n\n# nothing\nb 10.0.0.2\n")
    assert "does not divide the 3 processes started" in refused("--gpus", "3", "parallel.context=2")
    assert "--nodes asks for 3 machines" not in refused("--gpus", "1", "--nodes", "3:2")
    assert "names 2" in refused("--gpus", "1", "--nodes", "4", "--hosts", str(hosts))
    assert "8 sequences" in refused("--gpus", "3", "train.micro_batch=1")
    assert "leave out --hosts" in refused("--gpus", "1", "--slurm", "--hosts", str(hosts))
    hosts.write_text("a\na\n")
    assert "names a machine twice" in refused("--gpus", "1", "--hosts", str(hosts))
    assert not (tmp_path / "run").exists()


def test_commands_go_to_machines_as_they_are(tmp_path, monkeypatch):
    """A word with spaces, quotes and a dollar arrives as it was, with this folder and what concerns training."""
    (tmp_path / "hosts").write_text("anything\n")
    monkeypatch.setenv("NCCL_DEBUG", "a b$c")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    shell.chmod(0o755)
    words = ["it's", "two words", "$HOME", ""]
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['NCCL_DEBUG'], os.getcwd()]))"
    (host,) = read_hosts(tmp_path / "hosts")
    command = remote_command(host, [str(shell)], [sys.executable, "-c", program, *words])
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(said) == [words, "a b$c", os.getcwd()]
    assert "SECRET_TOKEN" not in shlex.join(command)


def test_the_first_fault_is_the_cause_and_not_a_rank_that_waited(tmp_path):
    def fault(node: int, rank: int, when: int, sentence: str) -> None:
        folder = tmp_path / f"node_{node}" / "job_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("".join(f"line {n}\n" for n in range(30)))
        (folder / "error.json").write_text(f'{{"message": {{"message": "{sentence}"}}}}')
        os.utime(folder / "error.json", (when, when))

    assert first_fault(tmp_path) is None
    fault(0, 1, 10, "rank 9 failed and this rank waited for it (no space)")
    fault(1, 1, 12, "no space")
    fault(1, 0, 14, "no memory")
    said = first_fault(tmp_path).splitlines()
    assert said[0] == "node 1, local rank 1 failed first: no space"
    assert said[2] == "  line 18" and said[-1] == "  line 29"


SLURM = {
    "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; else echo "scontrol $*" >> "$TRACE"; fi',
    "scancel": 'echo "scancel $*" >> "$TRACE"',
    "sbatch": 'cp "$1" "$TRACE.script"; echo "Submitted batch job 77"',
    # one task stands for all: says its words, waits for the signal, ends with the wanted code
    "srun": """shift
printf '%s\\n' "$@" > "$TRACE.words"
if [ "$WANTED" = signal ]; then
    trap 'echo saved >> "$TRACE"; exit 0' USR1
    kill -USR1 $PPID
    while :; do sleep 0.1; done
fi
exit "$WANTED\"""",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands as far as the script uses them; returns a function that runs the script as a job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)
    trace = tmp_path / "trace"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("TRACE", str(trace))

    def job(script: str, wanted: str, **variables: str) -> tuple[int, list[str]]:
        trace.write_text("")
        (tmp_path / "script").write_text(script)
        known = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "WANTED": wanted}
        done = subprocess.run(["bash", str(tmp_path / "script")], env=os.environ | known | variables, timeout=120,
                              capture_output=True, text=True)  # fmt: skip
        return done.returncode, trace.read_text().splitlines()

    return job


def make_script(run: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "launch", "launch", str(RECIPE), "--nodes", "2", "--gpus", "1", "--slurm", "--dry-run",
         *options, f"run_dir={run}", "data.tokenizer=two words"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_slurm_script_saves_requeues_and_stops(tmp_path, slurm):
    run = tmp_path / "a run"
    script = make_script(run, "--sbatch=--partition=gpu")
    assert len(script.splitlines()) <= 60
    for line in ("--ntasks-per-node=1", "--signal=B:USR1@300", "--requeue", "--open-mode=append", "--partition=gpu"):
        assert f"#SBATCH {line}" in script

    assert slurm(script, "signal") == (0, ["saved", "scontrol requeue 77"])
    words = Path(f"{tmp_path / 'trace'}.words").read_text().splitlines()
    assert words[words.index("--rendezvous") + 1] == "first:20077" and "data.tokenizer=two words" in words
    assert slurm(script, "1") == (1, ["scontrol requeue 77"])
    assert slurm(script, "0") == (0, [])  # trained to the end
    assert slurm(script, "0", SLURM_RESTART_COUNT="1") == (93, [])
    checkpoint(run, 5)
    assert slurm(script, "1", SLURM_RESTART_COUNT="2") == (1, ["scontrol requeue 77"])
    (run / "STOP").touch()
    assert slurm(script, "1", SLURM_RESTART_COUNT="3") == (94, [])


def test_slurm_array_ends_with_its_chain(tmp_path, slurm):
    script = make_script(tmp_path / "run", "--chain", "5", "--nodes", "1:2")
    assert "#SBATCH --array=1-5%1" in script and "--requeue" not in script and "#SBATCH --nodes=1-2" in script
    task = {"SLURM_ARRAY_JOB_ID": "70"}
    assert slurm(script, "1", **task, SLURM_ARRAY_TASK_ID="1") == (1, [])  # the next task goes on
    assert slurm(script, "1", **task, SLURM_ARRAY_TASK_ID="2") == (93, ["scancel 70"])
    checkpoint(tmp_path / "run", 5)
    assert slurm(script, "0", **task, SLURM_ARRAY_TASK_ID="3") == (0, ["scancel 70"])


def test_slurm_job_is_submitted(tmp_path, slurm):
    words = ["launch", str(RECIPE), "--gpus", "1", "--slurm", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-m", "launch", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 77\n"), done.stderr
    assert (tmp_path / "trace.script").read_text() == (tmp_path / "run" / "logs" / "job.slurm").read_text()


def test_pods_run_a_node_each(tmp_path):
    """The words of every pod's command, by a stand-in of python; failures are started again, ends of the chain not."""
    job = yaml.safe_load((ROOT / "launch" / "cluster" / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert replicas["Master"]["replicas"] == 1 and replicas["Worker"]["restartPolicy"] == "ExitCode"
    assert container == replicas["Master"]["template"]["spec"]["containers"][0]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >> "$TRACE"\ncase "$3" in chain) exit $CHAIN;; *) exit $NODE;; esac\n')
    python.chmod(0o755)
    given = {one["name"]: one["value"] for one in container["env"]}

    def pod(index: int, chain: int, node: int) -> tuple[int, list[str]]:
        trace = tmp_path / "trace"
        trace.write_text("")
        known = {"WORLD_SIZE": "2", "RANK": str(index), "MASTER_ADDR": "longpitch-master-0", "TRACE": str(trace),
                 "PATH": f"{tmp_path}:{os.environ['PATH']}", "CHAIN": str(chain), "NODE": str(node)}  # fmt: skip
        command = [*container["command"], *container["args"]]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | given | known
        ).returncode, trace.read_text().splitlines()

    code, (first, second) = pod(0, 0, 0)
    assert (code, first) == (0, "-m launch chain /work/runs/mine --again")
    assert "node --nodes 2 --node 0 --gpus 8 --rendezvous localhost:29400 --job longpitch" in second
    assert second.endswith("recipes/freesolo_340m.yaml data.shards=/work/shards/mine run_dir=/work/runs/mine")
    code, (only,) = pod(1, 0, 1)
    assert code == 201 and "--node 1 --gpus 8 --rendezvous longpitch-master-0:29400" in only
    assert pod(0, 93, 0)[0] == 93
