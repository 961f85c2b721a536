"""The quickstart after its set-up: makes shards, trains, kills and resumes a run, and shows that nothing was lost."""

import random
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from launch.report import unigram_entropy
from launch.run_directory import read_metrics

RECIPE = "recipes/quickstart.yaml"
PROMPTS = ("import os\n", "def __init__(self", "class ")
PROCESSES = 2


def main(folder: Path) -> int:
    """Run every part in order; returns the exit code."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    library = sysconfig.get_paths()["stdlib"]
    source = f"{{path: {library}, suffixes: [.py], exclude: [site-packages, dist-packages, __pycache__]}}"
    shards = folder / "shards"
    _say(f"1. Shards from the Python library in {library}")
    settings = [f"data.shards={shards}", f"data.sources=[{source}]", *_device_settings()]
    _check(subprocess.run([*_longpitch("prep"), RECIPE, *settings]).returncode)

    whole, broken = folder / "whole", folder / "broken"
    _say("2. A run from beginning to end, two processes, context parallelism 2")
    _check(_train(settings, whole).wait())
    _say("3. The same run, killed (SIGKILL) in the middle and started again with the same command")
    killed_at = _train_and_kill(settings, broken, steps=len(read_metrics(whole / "metrics.jsonl")))
    _check(_train(settings, broken).wait())

    same = _compare(whole, broken, killed_at)
    _show(whole, folder)
    print(f"\nEverything is in {folder}; it took {time.monotonic() - began:.0f} s. To go on:")
    print(f"  .venv/bin/longpitch generate {whole} --prompt 'def main(' --tokens 64")
    print(f"  .venv/bin/longpitch report {whole} {broken} --out {folder / 'both.png'}")
    return 0 if same else 1


def _device_settings() -> list[str]:
    import torch

    return [] if torch.cuda.device_count() >= PROCESSES else ["train.device=cpu"]


def _longpitch(command: str) -> list[str]:
    return [sys.executable, "-m", "launch", command]


def _train(settings: list[str], run_dir: Path) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
    # a random free port, so that a second quickstart on the machine is not in the way
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*torchrun, "-m", "launch", "train", RECIPE, f"run_dir={run_dir}", *settings]
    return subprocess.Popen(command, start_new_session=True)


def _train_and_kill(settings: list[str], run_dir: Path, steps: int) -> int:
    """Start a run, kill all its processes at a random step in its middle, and return the last step it had finished."""
    wanted = random.randint(steps // 3, 2 * steps // 3)
    process = _train(settings, run_dir)
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(read_metrics(metrics)) >= wanted):
        time.sleep(0.05)
    if process.poll() is not None:
        return steps  # it had been finished by an earlier quickstart, or failed; the caller's next step tells
    _kill_session(process)
    done = len(read_metrics(metrics))
    print(f"\nkilled after step {done}", flush=True)
    return done


def _kill_session(process: subprocess.Popen) -> None:
    """SIGKILL torchrun and its workers, which it starts in sessions of their own."""
    import psutil

    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGKILL)
    psutil.wait_procs(family)
    process.wait()


def _compare(whole: Path, broken: Path, killed_at: int) -> bool:
    """Print losses of both runs side by side; whether all are equal to the last bit."""
    a, b = (read_metrics(run / "metrics.jsonl") for run in (whole, broken))
    _say(f"4. The losses of the unbroken run and of the one killed after step {killed_at}")
    print(f"{'step':>6} {'unbroken':>20} {'killed and resumed':>20}")
    last = len(a)
    for step in sorted({1, killed_at, min(killed_at + 1, last), min(killed_at + 2, last), last}):
        print(f"{step:>6} {a[step - 1]['loss']!r:>20} {b[step - 1]['loss']!r:>20}")
    same = [r["loss"] for r in a] == [r["loss"] for r in b]
    print(f"all {last} losses are equal to the last bit" if same else "THE LOSSES DIFFER")
    return same


def _show(run: Path, folder: Path) -> None:
    last = read_metrics(run / "metrics.jsonl")[-1]
    _say("5. What it learned")
    print(
        f"held-out loss {last['heldout_loss']:.3f} nats per token after {last['tokens']} tokens;"
        f" the best model without context (unigram entropy) {unigram_entropy(run):.3f}"
    )
    _check(
        subprocess.run(
            [*_longpitch("generate"), str(run), *(p for text in PROMPTS for p in ("--prompt", text))]
        ).returncode
    )
    _say("6. The picture")
    _check(subprocess.run([*_longpitch("report"), str(run), "--out", str(folder / "loss.png")]).returncode)


def _say(sentence: str) -> None:
    print(f"\n== {sentence}", flush=True)


def _check(code: int) -> None:
    if code:
        raise SystemExit(f"quickstart: the command above ended with exit code {code}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
