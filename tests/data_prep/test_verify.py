"""`longpitch prep --verify` finds every kind of damage and names the file; a whole folder passes."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_prep.fingerprint import file_hash, manifest_hash
from data_prep.guard import DataError
from data_prep.verify import verify
from launch.cli import app
from tests.data_prep.test_prep import config, run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return run(config(tmp_path_factory.mktemp("verify"), recall_masks=True)).folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change(path: Path, **keys) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def forge(folder: Path) -> None:
    """A shard, its index and the manifest changed together, so that all hashes agree."""
    shard, index = folder / "train" / "shard.00000.mds", folder / "train" / "index.json"
    flip(shard)
    content = json.loads(index.read_text())
    content["shards"][0]["raw_data"]["hashes"]["xxh64"] = file_hash(shard)
    index.write_text(json.dumps(content))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"]["index_hash"] = file_hash(index)
    manifest["splits"]["train"]["labels"] += 1
    manifest["hash"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = {
    "flipped bit": (lambda f: flip(f / "train" / "shard.00000.mds"), "train/shard.00000.mds has other contents"),
    "cut": (lambda f: os.truncate(f / "heldout" / "shard.00000.mds", 99), "heldout/shard.00000.mds has 99 bytes"),
    "gone": (lambda f: (f / "train" / "shard.00000.mds").unlink(), "shard.00000.mds cannot be read"),
    "index": (lambda f: (f / "train" / "index.json").write_text("{"), "index.json is not valid JSON"),
    "index gone": (lambda f: (f / "train" / "index.json").unlink(), "index.json does not exist"),
    "tokenizer": (lambda f: (f / "tokenizer" / "tokenizer.json").unlink(), "tokenizer is not the tokenizer"),
    "manifest": (lambda f: change(f / "manifest.json", tokens=5), "manifest.json was changed"),
    "manifest gone": (lambda f: (f / "manifest.json").unlink(), "manifest.json does not exist"),
    "too much": (lambda f: (f / "train" / "shard.00009.mds").write_text(""), "shard.00009.mds does not belong here"),
    "stranger": (lambda f: (f / "notes.txt").write_text(""), "notes.txt does not belong here"),
    "counts": (forge, "labels where manifest.json states"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(made, tmp_path, name):
    copy = shutil.copytree(made, tmp_path / "shards")
    assert verify(copy)["tokens"] > 0
    damage, named = DAMAGE[name]
    damage(copy)
    with pytest.raises(DataError) as error:
        verify(copy)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_every_damaged_file_is_named_at_once(made, tmp_path):
    copy = shutil.copytree(made, tmp_path / "shards")
    for split in ("train", "heldout"):
        flip(copy / split / "shard.00000.mds")
    with pytest.raises(DataError, match=r"train/shard.*heldout/shard"):
        verify(copy)


def test_the_command(made):
    done = CliRunner().invoke(app, ["prep", "--verify", str(made)])
    assert done.exit_code == 0 and "whole" in done.output and "sequences" in done.output
    for arguments in ([], ["recipes/quickstart.yaml", "--verify", str(made)]):
        assert "prep takes a recipe, or --verify" in str(CliRunner().invoke(app, ["prep", *arguments]).exception)
