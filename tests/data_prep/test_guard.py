"""Damage to shards is found before training, and named with the file and a way out."""

import json
import shutil

import numpy as np
import pytest

from data_prep.guard import DataError, check_manifest, check_split
from tests.data_prep.rig import numbered, write_split


@pytest.fixture
def split(tmp_path):
    return write_split(tmp_path / "train", numbered(12))


def damage_index(split, change):
    index = json.loads((split / "index.json").read_text())
    change(index)
    (split / "index.json").write_text(json.dumps(index))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


SHARD = "shard.00001.mds"
DAMAGE = {
    "missing": (lambda s: (s / SHARD).unlink(), SHARD),
    "empty": (lambda s: (s / SHARD).write_bytes(b""), SHARD),
    "truncated": (lambda s: (s / SHARD).write_bytes((s / SHARD).read_bytes()[:-50]), SHARD),
    "longer": (lambda s: (s / SHARD).write_bytes((s / SHARD).read_bytes() + b"x"), SHARD),
    "another-shard": (lambda s: shutil.copy(s / "shard.00002.mds", s / SHARD), SHARD),
    "folder": (lambda s: ((s / SHARD).unlink(), (s / SHARD).mkdir()), SHARD),
    "index-missing": (lambda s: (s / "index.json").unlink(), "index.json"),
    "index-empty": (lambda s: (s / "index.json").write_text(""), "index.json"),
    "index-cut": (lambda s: (s / "index.json").write_text((s / "index.json").read_text()[:100]), "index.json"),
    "index-list": (lambda s: (s / "index.json").write_text("[]"), "index.json"),
    "index-no-shards": (lambda s: damage_index(s, lambda i: i.update(shards=[])), "index.json"),
    "index-key": (lambda s: damage_index(s, lambda i: i["shards"][1].pop("samples")), "samples for shard 1"),
    "index-raw": (lambda s: damage_index(s, lambda i: i["shards"][1]["raw_data"].pop("bytes")), "index.json"),
    "index-inflated": (lambda s: damage_index(s, lambda i: i["shards"][1].update(samples=7)), SHARD),
    "split-missing": (lambda s: shutil.rmtree(s), "index.json does not exist"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(split, name):
    check_split(split)
    break_it, named = DAMAGE[name]
    break_it(split)
    with pytest.raises(DataError) as error:
        check_split(split)
    assert named in str(error.value) and str(split) in str(error.value)
    assert "\n" not in str(error.value) and "longpitch prep" in str(error.value)


def test_flipped_bit_is_seen_by_the_hash_only(split):
    flip(split / SHARD)
    check_split(split)
    with pytest.raises(DataError, match=f"{SHARD} has other contents"):
        check_split(split, verify_hashes=True)


def test_hashes_that_were_not_stored_cannot_be_verified(split):
    damage_index(split, lambda index: index["shards"][0]["raw_data"].update(hashes={}))
    check_split(split)
    with pytest.raises(DataError, match="data.verify_hashes: false"):
        check_split(split, verify_hashes=True)


def test_what_a_whole_split_says(split):
    checked = check_split(split, verify_hashes=True)
    assert (checked.num_sequences, checked.seq_length) == (12, 8)
    assert checked.columns == {"tokens", "doc_lengths"}
    other = check_split(write_split(split.parent / "other", numbered(11)))
    assert other.index_hash != checked.index_hash


def test_shards_of_something_else(tmp_path):
    samples = [{"pixels": np.zeros(4, np.uint8), "doc_lengths": np.ones(1, np.uint32)}]
    with pytest.raises(DataError, match="no packed token sequences"):
        check_split(write_split(tmp_path / "images", samples))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    from tests.data_prep.test_prep import config, run

    return run(config(tmp_path_factory.mktemp("guard"))).folder


def test_manifest_fits_the_recipe(shards):
    manifest = check_manifest(shards, seq_length=64, vocab_size=300)
    check_manifest(shards, seq_length=64, vocab_size=300, expected_tokenizer=manifest["tokenizer_hash"])
    with pytest.raises(ValueError, match="sequences of 64 tokens but model.seq_length is 128"):
        check_manifest(shards, seq_length=128, vocab_size=300)
    with pytest.raises(ValueError, match="300 entries but model.vocab_size is 299"):
        check_manifest(shards, seq_length=64, vocab_size=299)
    with pytest.raises(ValueError, match="another tokenizer than the checkpoint"):
        check_manifest(shards, seq_length=64, vocab_size=300, expected_tokenizer="x")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("manifest.json", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.write_text("{")),
        ("train/index.json", lambda path: path.write_text(path.read_text() + " ")),
        ("heldout/index.json", lambda path: path.unlink()),
        ("tokenizer/tokenizer.json", lambda path: path.write_text(path.read_text().replace('"h"', '"~h"'))),
        ("tokenizer/tokenizer_config.json", lambda path: path.unlink()),
    ],
)
def test_files_that_are_no_longer_those_of_the_manifest(shards, tmp_path, file, damage):
    copy = shutil.copytree(shards, tmp_path / "shards")
    damage(copy / file)
    with pytest.raises(DataError) as error:
        check_manifest(copy, seq_length=64, vocab_size=300)
    assert file.split("/")[0] in str(error.value) and "longpitch prep" in str(error.value)
