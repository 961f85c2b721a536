"""Several folders mixed, and folders at a URL behind a cache: the same order everywhere, and nothing lost."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from data_prep.cache import ShardFolder, open_shards
from data_prep.guard import DataError, check_manifest
from data_prep.heldout import EvalReader
from data_prep.loader import TrainLoader
from data_prep.prep import prepare
from recipes.schema import DataConfig, SourceConfig
from tests.data_prep.rig import global_batches, numbered, read_and_state, read_steps, run_ranks, write_split

NUMBERS = {"global_batch": 4, "seed": 7, "timeout_seconds": 30.0}
SHARES = (0.7, 0.3)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[Path]:
    """Folders of 150 and of 50 sequences; the second's are numbered from 150 on, as the loader counts them."""
    root = tmp_path_factory.mktemp("two")
    samples = numbered(200)
    for name, part in (("a", samples[:150]), ("b", samples[150:])):
        write_split(root / name / "train", part)
    return [root / "a", root / "b"]


def alone(shards, steps, state=None, **numbers):
    with TrainLoader(shards, **({"micro_batch": 1} | NUMBERS | numbers)) as loader:
        if state:
            loader.load_state_dict(state)
        return read_steps(loader, steps), loader.state_dict()


def test_streams_are_mixed_by_their_proportions(two):
    with TrainLoader(two, micro_batch=1, proportions=SHARES, **NUMBERS) as loader:
        size = loader.samples_per_epoch
        assert size == 160  # 49 / 0.3, in whole batches
        for _ in range(2):
            epoch = sum(read_steps(loader, size // 4), [])
            assert len(set(epoch)) == size
            assert sum(number >= 150 for number in epoch) / size == pytest.approx(0.3, abs=1 / size)


@pytest.mark.parametrize("layout", [(2, 1, 2, 0), (4, 2, 1, 1)])
def test_streams_have_one_order_on_any_ranks_and_resume(two, tmp_path, layout):
    order, _ = alone(two, 60, proportions=SHARES)
    world, replication, micro_batch, workers = layout
    numbers = NUMBERS | {"replication": replication, "micro_batch": micro_batch, "num_workers": workers}
    numbers |= {"proportions": SHARES}
    outcomes, _ = run_ranks(world, read_and_state, two, 25, None, str(tmp_path / "job"), numbers)
    assert global_batches([steps for steps, _ in outcomes], replication) == [sorted(step) for step in order[:25]]
    assert alone(two, 35, outcomes[0][1], proportions=SHARES)[0] == order[25:]


def test_other_proportions_are_another_order(two):
    _, state = alone(two, 3, proportions=SHARES)
    with pytest.raises(ValueError, match=r"does not fit .*: proportions \(then \[0.7, 0.3\], now \[0.6, 0.4\]\)"):
        alone(two, 1, state, proportions=(0.6, 0.4))


def test_streams_that_do_not_fit(two, tmp_path):
    with pytest.raises(ValueError, match="one folder twice"):
        alone([two[0], two[0]], 1, proportions=SHARES)
    for shares in ((0.5,), (1.0, 0.0)):
        with pytest.raises(ValueError, match="a proportion above 0 for each"):
            alone(two, 1, proportions=shares)
    write_split(tmp_path / "train", numbered(20, seq_length=16))
    with pytest.raises(ValueError, match=r"sequences of \[8, 16\] tokens"):
        alone([two[0], tmp_path], 1, proportions=SHARES)
    with pytest.raises(ValueError, match="has 163 sequences but one global batch"):
        alone(two, 1, proportions=SHARES, global_batch=400)


# ---- at a URL


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A finished folder of several shards."""
    folder = tmp_path_factory.mktemp("remote")
    rng = np.random.default_rng(0)
    for number in range(100):
        text = " ".join(map(str, rng.integers(0, 1 << 40, 4500)))
        (folder / f"{number:02}.txt").write_text(text)
    data = DataConfig(
        shards=str(folder / "shards"),
        sources=[SourceConfig(path=str(folder), suffixes=[".txt"])],
        tokenizer_vocab_size=300,
        heldout_fraction=0.2,
        shard_mib=1,
        prep_workers=1,
    )
    return prepare(data, seq_length=1024, vocab_size=300).folder


def cached(prepared: Path, cache: Path, limit: int = 0) -> ShardFolder:
    return open_shards(f"file://{prepared}", cache, limit)


def ids(shards, steps, **numbers) -> list[list[int]]:
    found = []
    with TrainLoader(shards, micro_batch=1, **(NUMBERS | numbers)) as loader:
        for _ in range(steps):
            batches = [next(loader) for _ in range(loader.micro_batches_per_step)]
            found.append([(batch.sample_ids[0], int(batch.tokens.sum())) for batch in batches])
            loader.step_done()
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", [0, 4 << 20])
def test_cache_gives_what_the_originals_give_and_keeps_its_limit(prepared, tmp_path, workers, limit):
    before = {p: p.read_bytes() for p in prepared.rglob("*") if p.is_file()}
    folder = cached(prepared, tmp_path, limit)
    check_manifest(folder.path, seq_length=1024, vocab_size=300)
    assert not list(folder.path.glob("train/*.mds"))
    steps = 500  # more than an epoch
    assert ids(folder, steps, num_workers=workers) == ids(prepared, steps)
    here = sum(p.stat().st_size for p in folder.path.glob("train/*.mds"))
    total = sum(p.stat().st_size for p in prepared.glob("train/*.mds"))
    assert total > 5 << 20 and (here <= limit if limit else here == total)
    assert {p: p.read_bytes() for p in prepared.rglob("*") if p.is_file()} == before
    local = [int(b.tokens.sum()) for b in EvalReader(prepared, micro_batch=1)]
    assert [int(b.tokens.sum()) for b in EvalReader(folder.path, micro_batch=1)] == local


def test_originals_are_never_in_a_cache(prepared, tmp_path):
    assert open_shards(prepared, tmp_path, 1).path == prepared  # a local folder has no limit
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="lies inside"):
        open_shards(f"file://{prepared}", prepared / "cache")
    with pytest.raises(ValueError, match=r"data\.cache_gib allows 1000 bytes but 4 shards"):
        cached(prepared, tmp_path, 1000)


def test_damage_at_the_url_is_an_error(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "copy")
    shard = sorted((copy / "train").glob("*.mds"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=rf"{shard.name} is damaged: its size or hash"):
        ids(cached(copy, tmp_path / "cache"), 400)
    assert not list((tmp_path / "cache").glob(f"*/train/{shard.name}*"))
    os.truncate(shard, 100)
    with pytest.raises(DataError, match=rf"{shard.name} has 100 bytes where the index states"):
        ids(cached(copy, tmp_path / "cache"), 1)
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name} does not exist"):
        ids(cached(copy, tmp_path / "cache"), 1)
    with pytest.raises(DataError, match=r"manifest\.json cannot be read"):
        open_shards(f"file://{tmp_path}/nothing", tmp_path / "cache")


def test_original_that_changed_empties_the_cache(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "copy")
    folder = cached(copy, tmp_path / "cache")
    ids(folder, 2)
    (copy / "manifest.json").write_text((copy / "manifest.json").read_text() + "\n")
    assert not list(cached(copy, tmp_path / "cache").path.glob("train/*.mds"))


def test_many_at_once_fetch_a_shard_once(prepared, tmp_path, monkeypatch):
    import data_prep.cache as module

    folder, seen = cached(prepared, tmp_path), []
    real = module._download
    monkeypatch.setattr(module, "_download", lambda url, *rest: (seen.append(url), real(url, *rest)))
    from data_prep.guard import read_index

    stated = read_index(prepared / "train")[0]["raw_data"]
    threads = [threading.Thread(target=folder.fetch, args=("train", stated)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1
