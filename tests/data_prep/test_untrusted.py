"""Shards from somebody else: whatever their manifest and indices say, nothing is written outside the cache, nor run."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xxhash

from data_prep.cache import open_shards
from data_prep.files import find_files
from data_prep.guard import DataError, check_split, read_manifest
from data_prep.heldout import EvalReader
from data_prep.loader import TrainLoader
from data_prep.prep import prepare
from data_prep.tokenizer import train_tokenizer
from data_prep.verify import verify
from recipes.schema import DataConfig, SourceConfig
from tests.data_prep.rig import numbered, write_split

OUTWARD = ["../../planted", "..", ".", "", "a/b", "/tmp/planted", "..\\planted", "x\0y", 7, None]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(40)))
    train_tokenizer(["a"], 300).save(folder / "tokenizer")
    source = SourceConfig(path=str(folder / "x.jsonl"))
    data = DataConfig(
        shards=str(folder / "shards"), sources=[source], tokenizer=str(folder / "tokenizer"), heldout_fraction=0.3
    )
    return prepare(data, seq_length=32, vocab_size=300).folder


@pytest.fixture
def place(shards, tmp_path) -> Path:
    """A folder in which `far/away/shards` is theirs, `deep/cache` ours, and files lie where theirs would lead."""
    theirs = shutil.copytree(shards, tmp_path / "far" / "away" / "shards")
    for folder in (theirs.parent.parent, theirs.parent):
        (folder / "planted").mkdir()
        (folder / "planted" / "index.json").write_text("{}")
    (theirs.parent.parent / "planted.mds").write_bytes(b"evil")
    (tmp_path / "deep").mkdir()
    return tmp_path


def outside(place: Path) -> dict[Path, bytes | None]:
    """Everything but the cache."""
    cache = place / "deep" / "cache"
    found = [path for path in place.rglob("*") if path != cache and not path.is_relative_to(cache)]
    return {path: path.read_bytes() if path.is_file() else None for path in found}


def change(path: Path, edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", [name for name in OUTWARD if isinstance(name, str)])
def test_split_that_leads_out_is_refused_before_anything_is_copied(place, name):
    theirs = place / "far/away/shards"
    change(theirs / "manifest.json", lambda manifest: manifest["splits"].update({name: {}}))
    before = outside(place)
    with pytest.raises(DataError, match=r"manifest\.json names .* do not use these shards") as error:
        open_shards(f"file://{theirs}", place / "deep" / "cache")
    assert "\n" not in str(error.value)
    assert outside(place) == before
    assert [path.name for path in (place / "deep").rglob("*") if path.is_file()] == [".lock"]
    for look in (read_manifest, verify):
        with pytest.raises(DataError, match="do not use these shards"):
            look(theirs)


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("name", [*OUTWARD, "../../planted.mds"])
def test_shard_that_leads_out_is_refused_before_any_shard_is_copied(place, split, name):
    theirs = place / "far/away/shards"
    digest = {"xxh64": xxhash.xxh64_hexdigest(b"evil")}
    stated = {"basename": name, "bytes": 4, "hashes": digest}
    change(theirs / split / "index.json", lambda index: index["shards"][0]["raw_data"].update(stated))
    before = outside(place)
    with pytest.raises(DataError, match="do not use these shards"):
        open_shards(f"file://{theirs}", place / "deep" / "cache")
    assert outside(place) == before
    assert not list((place / "deep").rglob("*.mds"))
    with pytest.raises(DataError, match="do not use these shards"):
        check_split(theirs / split)


def test_tokenizer_files_are_named_by_one_component(shards, place, monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.put(str(shards), "/theirs", recursive=True)
    real = type(memory).ls

    def ls(self, path, detail=True, **options):
        more = [{"name": f"{path}/..", "type": "file", "size": 1}] if str(path).endswith("tokenizer") else []
        return real(self, path, detail=detail, **options) + more

    monkeypatch.setattr(type(memory), "ls", ls)
    with pytest.raises(DataError, match=r"tokenizer names '\.\.'"):
        open_shards("memory://theirs", place / "deep" / "cache")


EDITS = {
    "pickled column": (lambda s: s.update(column_names=["evil"], column_encodings=["pkl"]), "only arrays of numbers"),
    "compressed": (lambda s: s.update(compression="zstd", zip_data=s["raw_data"]), "none that prep writes"),
    "another format": (lambda s: s.update(format="json"), "none that prep writes"),
    "another version": (lambda s: s.update(version=1), "none that prep writes"),
    "no mapping": (lambda s: s.update(raw_data=["basename", "bytes"]), "lacks raw_data"),
}


@pytest.mark.parametrize("name", EDITS)
def test_index_that_prep_does_not_write_is_refused(shards, tmp_path, name):
    copy = shutil.copytree(shards, tmp_path / "shards")
    edit, message = EDITS[name]
    for split in ("train", "heldout"):
        change(copy / split / "index.json", lambda index: edit(index["shards"][0]))
    with pytest.raises(DataError, match=message):
        EvalReader(copy, micro_batch=1)
    with pytest.raises(DataError, match=message):
        TrainLoader(copy, global_batch=1, micro_batch=1, seed=0)
    assert len(list(copy.rglob("*.mds"))) == 2


class Shout:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_nothing_is_unpickled(tmp_path, capfd):
    """The library would unpickle a column of that kind when it decodes a sequence."""
    from streaming import MDSWriter

    encodings = {"tokens": "ndarray:uint16:8", "doc_lengths": "ndarray:uint32", "evil": "pkl"}
    with MDSWriter(columns=encodings, out=str(tmp_path / "heldout"), hashes=["xxh64"]) as writer:
        for sample in numbered(4):
            writer.write(sample | {"evil": Shout()})
    assert pickle.dumps(Shout()) in (tmp_path / "heldout/shard.00000.mds").read_bytes()
    with pytest.raises(DataError, match="holds pkl where only arrays of numbers are read"):
        list(EvalReader(tmp_path, micro_batch=1))
    assert "unpickled" not in capfd.readouterr().out


def test_shard_without_a_hash_is_not_copied(place):
    theirs = place / "far/away/shards"
    change(theirs / "heldout/index.json", lambda index: index["shards"][0]["raw_data"].update(hashes={}))
    with pytest.raises(DataError, match="no xxh64 hash of shard"):
        open_shards(f"file://{theirs}", place / "deep" / "cache")


def test_package_of_a_protocol_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    wanted = r"^s3://bucket/x cannot be opened: s3:// needs the package s3fs; `pip install s3fs`$"
    with pytest.raises(ValueError, match=wanted):
        open_shards("s3://bucket/x", tmp_path)
    with pytest.raises(ValueError, match=wanted):
        find_files([SourceConfig(path="s3://bucket/x")])


def test_any_error_of_the_far_end_is_one_sentence(shards, tmp_path, monkeypatch):
    class NoCredentials(Exception):
        """Neither an OSError nor a ValueError, as some packages raise."""

    def fail(*_args, **_options):
        raise NoCredentials("who\nare you")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", fail)
    with pytest.raises(DataError, match=r"memory://theirs/manifest\.json cannot be read \(who are you\)"):
        open_shards("memory://theirs", tmp_path)


def test_whole_split_is_still_read(tmp_path):
    write_split(tmp_path / "heldout", numbered(4))
    assert [int(batch.tokens[0, 0]) for batch in EvalReader(tmp_path, micro_batch=1)] == list(np.arange(4))
