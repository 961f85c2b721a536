"""A preparation that is killed anywhere, or done by any number of workers, ends in the same bytes."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import corpus as corpus_module
from data_prep.guard import DataError
from data_prep.pool import run_tasks
from data_prep.prep import prepare
from data_prep.tokenizer import train_tokenizer
from data_prep.verify import verify
from recipes.errors import UserError
from recipes.schema import DataConfig, MixtureConfig, SourceConfig
from tests.data_prep.rig import CONTEXT

STDLIB = Path(sysconfig.get_path("stdlib"))
ROOT = Path(__file__).parents[2]
LICENSES = Path("/usr/share/common-licenses")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Python's library as JSONL, compressed JSONL, Parquet and text, with faults in it."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [p.read_text(encoding="utf-8") for p in sorted((STDLIB).glob("*.py"))[:50]]
    lines = [json.dumps({"text": text, "lang": "py"}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join([*lines[:20], "broken", *lines[10:25], ""]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[25:40]).encode()) + b"junk")
    pq.write_table(pa.table({"text": texts[40:]}), folder / "c.parquet", row_group_size=5)
    (folder / "docs").mkdir()
    for path in sorted(LICENSES.glob("*")) if LICENSES.is_dir() else []:
        if path.is_file():
            (folder / "docs" / f"{path.name}.txt").write_bytes(path.read_bytes())
    (folder / "docs" / "latin.txt").write_bytes("Müller".encode("latin-1"))
    return folder


def config(corpus: Path, shards: Path, workers: int, **changes) -> DataConfig:
    names = ("a.jsonl", "b.jsonl.gz", "c.parquet", "docs")
    defaults = {
        "sources": [SourceConfig(path=str(corpus / name), name=name) for name in names],
        "shards": str(shards),
        "tokenizer_vocab_size": 400,
        "bad_documents": "skip",
        "heldout_fraction": 0.1,
        "recall_masks": True,
        "shard_mib": 1,
        "prep_workers": workers,
    }
    return DataConfig(**(defaults | changes))


def prepare_in_small_blocks(data: DataConfig, said) -> None:
    """Program: prepare, in blocks of a size that gives this corpus some dozens."""
    corpus_module.BLOCK_BYTES = 60_000
    try:
        prepare(data, seq_length=2048, vocab_size=400)
    except Exception as error:
        said.put(f"{type(error).__name__}: {error}")
        sys.exit(1)
    said.put("done")


def start(data: DataConfig):
    """A preparation in a process of its own, and the queue in which it says how it ended."""
    said = CONTEXT.Queue()
    process = CONTEXT.Process(target=prepare_in_small_blocks, args=(data, said))
    process.start()
    return process, said


def finish(data: DataConfig) -> str:
    """Prepare to the end; "done" or the error."""
    process, said = start(data)
    outcome = said.get(timeout=120)
    process.join(60)
    return outcome


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """Prepared in one go by one worker."""
    folder = tmp_path_factory.mktemp("whole") / "shards"
    assert finish(config(corpus, folder, 1)) == "done"
    return folder


def test_result_is_whole_and_everything_is_counted(whole):
    manifest = verify(whole)
    documents = manifest["documents"]
    assert documents["read"] == documents["written"] + sum(documents["skipped"].values())
    assert documents["skipped"]["duplicate"] >= 10
    assert {"not JSON": 1, "damaged file": 1, "invalid UTF-8": 1}.items() <= documents["skipped"].items()
    places = (whole / "left_out.txt").read_text().splitlines()
    assert len(places) == 3 and "a.jsonl:21: is not JSON" in places[0] and "b.jsonl.gz: is damaged" in places[1]
    assert not list(whole.glob("work*"))


def test_number_of_workers_does_not_matter(corpus, whole, tmp_path):
    assert finish(config(corpus, tmp_path / "shards", 3)) == "done"
    assert files_of(tmp_path / "shards") == files_of(whole)


def done_parts(partial: Path) -> int:
    work = partial / "work"
    try:
        return len(list(work.glob("blocks/*/*.json"))) + len(list(work.glob("shards/*.json")))
    except FileNotFoundError:  # it was finished and removed while we looked
        return 0


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_again_and_again(corpus, whole, tmp_path, workers):
    """SIGKILL whenever some more parts are done, until nothing is left to do; once a part's record is lost too."""
    folder, seed = tmp_path / "shards", random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng, kills = random.Random(seed), 0
    while not folder.exists():
        process, _ = start(config(corpus, folder, 1 + kills % 2 if workers == 2 else 1))
        partial = folder.with_name("shards.partial")
        enough = done_parts(partial) + rng.randint(2, 7)
        while process.is_alive() and not folder.exists() and done_parts(partial) < enough:
            time.sleep(0.002)
        if process.is_alive():
            process.kill()  # its workers notice by themselves
            kills += 1
        process.join(60)
        if kills == 1:  # as a loss of power leaves a file that the disk had not taken
            next(partial.glob("work/blocks/*/*.json")).write_bytes(b"")
    assert kills >= 3
    assert finish(config(corpus, folder, 1)) == "done"
    assert files_of(folder) == files_of(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shards"]


def test_mixture_and_packing_do_not_depend_on_workers(corpus, tmp_path):
    made = []
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer([path.read_text() for path in (STDLIB / "json").glob("*.py")], 400).save(tokenizer)
    parts = [MixtureConfig(proportion=0.7, min_tokens=2000), MixtureConfig(proportion=0.3, max_tokens=2000)]
    for workers, policy in ((1, "best_fit"), (2, "best_fit"), (2, "long_first")):
        folder = tmp_path / f"{policy}{workers}"
        changes = {"packing": policy, "mixture": parts, "tokenizer": str(tokenizer), "recall_masks": False}
        assert finish(config(corpus, folder, workers, **changes)) == "done"
        made.append(files_of(folder))
        manifest = verify(folder)
        assert [part["reached"] for part in manifest["mixture"]] == pytest.approx([0.7, 0.3], abs=0.01)
        assert manifest["packing"]["policy"] == policy and 0 < manifest["packing"]["padding_share"] < 0.1
    assert made[0] == made[1] != made[2]


def test_changed_file_is_read_again(corpus, whole, tmp_path):
    """Another file under the same name: with a tokenizer at hand only its blocks are done again."""
    import shutil

    copy = shutil.copytree(corpus, tmp_path / "corpus")
    tokenizer = whole / "tokenizer"
    data = config(copy, tmp_path / "shards", 1, tokenizer=str(tokenizer), bad_documents="stop")
    assert "a.jsonl:21: is not JSON" in finish(data)
    (copy / "a.jsonl").write_text((copy / "a.jsonl").read_text().replace("broken\n", ""))
    (copy / "b.jsonl.gz").write_bytes((copy / "b.jsonl.gz").read_bytes()[:-4])
    (copy / "docs" / "latin.txt").unlink()
    assert finish(data) == "done"
    assert set(verify(tmp_path / "shards")["documents"]["skipped"]) == {"duplicate"}


# ---- workers


def test_worker_that_dies_is_an_error():
    def work(task):
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with pytest.raises(UserError, match="a worker process was killed by signal 9"):
        list(run_tasks(work, range(8), 2))
    with pytest.raises(UserError, match="a worker process ended with code 1"):
        list(run_tasks(lambda task: work, [0], 1))  # a function in a function cannot be sent


def test_error_of_a_worker_is_the_parents():
    def work(task):
        raise DataError(f"task {task}")

    with pytest.raises(DataError, match="task 0"):
        list(run_tasks(work, [0], 2))


def test_large_tasks_and_results_pass():
    data = [bytes([i]) * 9_000_000 for i in range(7)]
    assert sorted(run_tasks(lambda task: task[::-1], data, 2)) == data
    assert list(run_tasks(abs, [], 2)) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """40 MB of text in blocks of 1 MiB, of which a process holds one or two."""
    text = (STDLIB / "argparse.py").read_text()
    line = json.dumps({"text": text})
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", compresslevel=1) as file:
        for number in range(400):
            file.write(line.replace("argparse", f"argparse{number}") + "\n")
    train_tokenizer([text], 300).save(tmp_path / "tok")
    program = f"""
import resource, sys
from data_prep import corpus
corpus.BLOCK_BYTES = 1 << 20
from data_prep.prep import prepare
from recipes.schema import DataConfig, SourceConfig
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(DataConfig(shards={str(tmp_path / "shards")!r}, tokenizer={str(tmp_path / "tok")!r}, prep_workers=1,
    shard_mib=4, sources=[SourceConfig(path={str(tmp_path / "x.jsonl.gz")!r})]), seq_length=4096, vocab_size=300)
for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
    print(resource.getrusage(who).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    parent, worker = map(int, done.stdout.split())
    assert parent < 40_000 and worker < 120_000, "KiB more than before"


def full_disk(folder: Path) -> bool:
    """A file system of 3 MB at `folder`, where this process may make one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    return subprocess.run(mount, capture_output=True).returncode == 0


def test_full_disk_is_named_and_the_run_goes_on_later(corpus, tmp_path):
    small = tmp_path / "small"
    if not full_disk(small):
        pytest.skip("this process may not mount a file system")
    try:
        said = finish(config(corpus, small / "shards", 2))
        assert said.startswith("UserError: the disk of") and "run the same command" in said
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        assert finish(config(corpus, small / "shards", 2)) == "done"
        verify(small / "shards")
    finally:
        subprocess.run(["umount", str(small)], check=True)
