"""From corpus to shards: complete, repeatable, atomic, and plain about what is wrong."""

import errno
import json
import math
import os
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from streaming import LocalDataset
from transformers import AutoTokenizer
from typer.testing import CliRunner

import data_prep.folder_lock
from data_prep.fingerprint import file_hash
from data_prep.folder_lock import lock_folder
from data_prep.guard import check_manifest, check_split
from data_prep.prep import _hash, prepare
from data_prep.tokenizer import train_tokenizer
from launch.cli import app
from recipes.errors import UserError
from recipes.schema import DataConfig, MixtureConfig, SourceConfig

STDLIB = Path(sysconfig.get_path("stdlib"))
SEQ_LENGTH = 64


def config(tmp_path: Path, **changes) -> DataConfig:
    source = SourceConfig(path=str(STDLIB / "json"), suffixes=[".py"])
    defaults = {"shards": str(tmp_path / "shards"), "sources": [source], "tokenizer_vocab_size": 300}
    return DataConfig(**(defaults | {"heldout_fraction": 0.3} | changes))


def run(data: DataConfig, **changes):
    return prepare(data, **({"seq_length": SEQ_LENGTH, "vocab_size": 1000} | changes))


def documents_of(folder: Path, eos: int) -> list[list[int]]:
    """The token ids of every document of a split, EOS included, put together again from the pieces."""
    dataset, stream = LocalDataset(str(folder)), []
    for i in range(len(dataset)):
        stream += dataset[i]["tokens"][: int(dataset[i]["doc_lengths"].sum())].tolist()
    documents, current = [], []
    for token in stream:
        current.append(token)
        if token == eos:
            documents.append(current)
            current = []
    assert not current, "the last document has no EOS"
    return documents


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prep")
    corpus = folder / "corpus.jsonl"
    texts = [path.read_text(encoding="utf-8") for path in sorted((STDLIB / "email").glob("*.py"))]
    texts += [texts[0] + "changed", "", "one more 🙂"]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "broken\n")
    sources = [SourceConfig(path=str(corpus)), SourceConfig(path=str(STDLIB / "json"), suffixes=[".py"])]
    data = config(folder, sources=sources, bad_documents="skip", recall_masks=True, heldout_fraction=0.2)
    texts += [path.read_text(encoding="utf-8") for path in sorted((STDLIB / "json").glob("*.py"))]
    return data, run(data), [text for text in texts if text]


def test_every_document_is_in_exactly_one_split(prepared):
    _, result, texts = prepared
    tokenizer = AutoTokenizer.from_pretrained(result.folder / "tokenizer")
    eos = result.manifest["eos_id"]
    splits = {name: documents_of(result.folder / name, eos) for name in ("train", "heldout")}
    decoded = [tokenizer.decode(d[:-1]) for split in splits.values() for d in split]
    assert sorted(decoded) == sorted(texts)
    in_order = {name: [texts.index(tokenizer.decode(d[:-1])) for d in split] for name, split in splits.items()}
    assert all(order == sorted(order) and order for order in in_order.values())


def test_manifest_counts(prepared):
    _, result, texts = prepared
    manifest = result.manifest
    assert json.loads((result.folder / "manifest.json").read_text()) == manifest
    documents = manifest["documents"]
    assert documents["skipped"] == {"empty": 1, "not JSON": 1}
    assert documents["read"] == documents["written"] + 2 == len(texts) + 2
    for name, split in manifest["splits"].items():
        folder = result.folder / name
        dataset = LocalDataset(str(folder))
        lengths = [int(dataset[i]["doc_lengths"].sum()) for i in range(len(dataset))]
        assert split["sequences"] == len(dataset) and split["tokens"] == sum(lengths)
        assert split["documents"] == len(documents_of(folder, manifest["eos_id"]))
        assert split["bytes"] == sum(f.stat().st_size for f in folder.iterdir())
        assert split["index_hash"] == file_hash(folder / "index.json")
        assert all(n == SEQ_LENGTH for n in lengths[:-1])
        assert (dataset[len(dataset) - 1]["tokens"][lengths[-1] :] == manifest["eos_id"]).all()
    assert manifest["token_dtype"] == "uint16" == str(dataset[0]["tokens"].dtype)
    check_manifest(result.folder, seq_length=SEQ_LENGTH, vocab_size=1000)
    assert (
        check_split(result.folder / "train", verify_hashes=True).num_sequences
        == manifest["splits"]["train"]["sequences"]
    )


def test_unigram_entropy_is_that_of_the_heldout_labels(prepared):
    _, result, _ = prepared
    dataset, labels = LocalDataset(str(result.folder / "heldout")), Counter()
    for i in range(len(dataset)):
        position = 0
        for length in dataset[i]["doc_lengths"].tolist():
            labels.update(dataset[i]["tokens"][position + 1 : position + length].tolist())
            position += length
    total = labels.total()
    want = -sum(n / total * math.log(n / total) for n in labels.values())
    assert result.manifest["heldout_unigram_entropy"] == pytest.approx(want, rel=1e-12)
    assert result.manifest["splits"]["heldout"]["labels"] == total


def test_second_run_does_nothing(prepared):
    data, first, _ = prepared
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    second = run(data)
    assert not second.fresh and first.fresh and second.manifest == first.manifest
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before
    assert "nothing to do" in str(second) and "left out: 1 empty, 1 not JSON" in str(first)


def test_same_corpus_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        run(config(tmp_path, shards=str(tmp_path / name), recall_masks=True))
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) >= 7
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@pytest.mark.parametrize(
    ("key", "change", "prep_change"),
    [
        ("seq_length", {}, {"seq_length": 32}),
        ("heldout_fraction", {"heldout_fraction": 0.5}, {}),
        ("recall_masks", {"recall_masks": True}, {}),
        ("tokenizer_vocab_size", {"tokenizer_vocab_size": 301}, {}),
        ("sources", {"sources": [SourceConfig(path=str(STDLIB / "json"), suffixes=[".py", ".txt"])]}, {}),
        ("split_seed", {"split_seed": 1}, {}),
        ("packing", {"packing": "best_fit"}, {}),
        ("deduplicate", {"deduplicate": False}, {}),
    ],
)
def test_other_settings_are_refused(tmp_path, key, change, prep_change):
    folder = run(config(tmp_path)).folder
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=rf"other settings: {key} \(then ") as error:
        run(config(tmp_path, **change), **prep_change)
    assert "\n" not in str(error.value)
    assert (folder / "manifest.json").read_bytes() == before and not (tmp_path / "shards.partial").exists()


def test_replaced_tokenizer_is_noticed(tmp_path):
    train_tokenizer(["some text"], 300).save(tmp_path / "mine")
    data = config(tmp_path, tokenizer=str(tmp_path / "mine"))
    run(data)
    assert not run(data).fresh
    settings = tmp_path / "mine" / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | {"chat_template": "{{ messages }}"}))
    assert not run(data).fresh
    named = {"seq_length": SEQ_LENGTH, "vocab_size": 1000}
    check_manifest(tmp_path / "shards", **named, tokenizer=str(tmp_path / "mine/tokenizer.json"))  # of that folder
    for change in ({"eos_token": "a"}, {"add_bos_token": True}):
        settings.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=r"other settings: tokenizer_files_hash \(then "):
            run(data)
        with pytest.raises(ValueError, match="another tokenizer than"):
            check_manifest(tmp_path / "shards", **named, tokenizer=data.tokenizer)
    older = json.loads((tmp_path / "shards/manifest.json").read_text())  # whose hash was another one, of one file
    older["settings"]["tokenizer_file_hash"] = older["settings"].pop("tokenizer_files_hash")[:16]
    (tmp_path / "shards/manifest.json").write_text(json.dumps(older))
    settings.write_text(json.dumps(content))
    check_manifest(tmp_path / "shards", **named, tokenizer=data.tokenizer)
    assert not run(data).fresh
    train_tokenizer(["another word"], 300).save(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"another tokenizer than .*mine now is; change data\.shards"):
        run(data)
    shutil.rmtree(tmp_path / "mine")  # the shards hold a copy
    assert not run(data).fresh


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_or_quota_wherever_it_is_noticed(tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code), "somewhere")

    monkeypatch.setattr("data_prep.prep.write_index", fail)
    with pytest.raises(ValueError, match=r"shards\.partial is full .* run the same command"):
        run(config(tmp_path))


def test_another_seed_of_training_is_the_same_preparation(tmp_path):
    """Recipes that differ in their seed share the shards; the split has a seed of its own."""
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
    override = [f"data.shards={tmp_path}/s", f"data.sources=[{{path: {STDLIB}/json, suffixes: [.py]}}]"]
    for seed, said in ((1, "tokens"), (2, "nothing to do")):
        done = CliRunner().invoke(app, ["prep", str(recipe), f"seed={seed}", *override])
        assert done.exit_code == 0 and said in done.output, done.output


def test_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "thesis.txt").write_text("dear")
    with pytest.raises(ValueError, match="no finished folder of shards"):
        run(config(tmp_path))
    assert (tmp_path / "shards" / "thesis.txt").read_text() == "dear"


def one_document(tmp_path: Path, *texts: str) -> list[SourceConfig]:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [SourceConfig(path=str(tmp_path / "x.jsonl"))]


@pytest.mark.parametrize(
    ("change", "prep_change", "message"),
    [
        ({"sources": []}, {}, "data.sources is empty"),
        ({"sources": [SourceConfig(path="/does/not/exist")]}, {}, "/does/not/exist does not exist"),
        ({"tokenizer": "/does/not/exist"}, {}, "tokenizer /does/not/exist does not exist"),
        ({}, {"vocab_size": 299}, "300 entries but model.vocab_size is 299"),
        ({"heldout_fraction": 1.0}, {}, "data.heldout_fraction is 1.0"),
        ({"shard_mib": 4096}, {}, "data.shard_mib is 4096"),
        ({"packing": "tight"}, {}, "data.packing is 'tight'"),
        ({"max_document_mib": 0}, {}, "data.max_document_mib is 0"),
        ({"max_tokens": 0}, {}, "data.max_tokens is 0"),
        ({"shards": "s3://bucket/shards"}, {}, "prepare into a local folder"),
        ({"mixture": [MixtureConfig(proportion=0)]}, {}, "a part of proportion 0"),
        ({"mixture": [MixtureConfig(proportion=1, source="no")]}, {}, "names the source 'no'"),
        ({"tokenizer_vocab_size": 100}, {}, "tokenizer_vocab_size is 100"),
        ({}, {"seq_length": 1}, "model.seq_length is 1"),
        ({"bad_documents": "maybe"}, {}, "'maybe'"),
    ],
)
def test_wrong_settings_in_one_sentence(tmp_path, change, prep_change, message):
    with pytest.raises(UserError) as error:
        run(config(tmp_path, **change), **prep_change)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "shards").exists()


def test_corpus_without_text(tmp_path):
    with pytest.raises(ValueError, match=r"no document with text \(left out: 2 empty\)"):
        run(config(tmp_path, sources=one_document(tmp_path, "", " \n")))


@pytest.mark.parametrize("upgraded", [False, True])
def test_nothing_of_a_killed_run_outlives_the_repair_of_its_files(tmp_path, monkeypatch, capfd, upgraded):
    """Killed before the manifest, then the bad line is repaired, or a library is another version."""
    train_tokenizer(["good"], 300).save(tmp_path / "tok")
    sources = one_document(tmp_path, "good", "better")
    data = config(tmp_path, sources=sources, tokenizer=str(tmp_path / "tok"), bad_documents="skip")
    with open(tmp_path / "x.jsonl", "a") as file:
        file.write("bad\n")
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.prep.manifest_hash", None)
        with pytest.raises(TypeError):
            run(data)
    assert (tmp_path / "shards.partial" / "left_out.txt").exists()
    one_document(tmp_path, "good", "better")
    if upgraded:
        monkeypatch.setattr("data_prep.prep.version", lambda name: "9.9")
    capfd.readouterr()
    assert run(data).manifest["documents"]["skipped"] == {}
    assert ("begun with other settings, files or versions" in capfd.readouterr().err) == upgraded
    assert not (tmp_path / "shards" / "left_out.txt").exists()


def test_heldout_outside_the_mixture_is_said(tmp_path):
    """The only held-out document is one that the mixture does not want."""
    texts = ["a", "b " * 50, "c " * 60, "d " * 70]
    sources, hashes = one_document(tmp_path, *texts), [_hash(text, 0)[0] for text in texts]
    first = texts[hashes.index(min(hashes))]
    longer = len(first) > 1
    parts = [MixtureConfig(proportion=1, max_tokens=10) if longer else MixtureConfig(proportion=1, min_tokens=10)]
    with pytest.raises(ValueError, match="no document of the mixture is held out"):
        run(config(tmp_path, sources=sources, heldout_fraction=1e-9, mixture=parts))


def test_bad_line_stops_before_anything_is_written(tmp_path):
    sources = one_document(tmp_path, "good")
    with open(tmp_path / "x.jsonl", "a") as file:
        file.write("bad\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2: is not JSON"):
        run(config(tmp_path, sources=sources))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shards.partial", "x.jsonl"]
    assert not list((tmp_path / "shards.partial").rglob("*.mds"))


def test_heldout_is_never_empty_nor_everything(tmp_path):
    for number, fraction in enumerate((1e-9, 0.5, 0.999)):
        data = config(
            tmp_path,
            shards=str(tmp_path / str(number)),
            sources=one_document(tmp_path, "a", "b"),
            heldout_fraction=fraction,
        )
        splits = run(data).manifest["splits"]
        assert (splits["train"]["documents"], splits["heldout"]["documents"]) == (1, 1)


def test_one_distinct_document_cannot_be_split(tmp_path):
    sources = one_document(tmp_path, "same", "same")
    changes = {"sources": sources, "deduplicate": False}
    with pytest.raises(ValueError, match="only one distinct document"):
        run(config(tmp_path, **changes))
    result = run(config(tmp_path, **changes, heldout_fraction=0.0))
    assert result.manifest["documents"] == {"read": 2, "written": 2, "skipped": {}}
    assert list(result.manifest["splits"]) == ["train"] and not (result.folder / "heldout").exists()
    assert result.manifest["heldout_unigram_entropy"] is None


def test_split_follows_the_text_not_the_place(tmp_path):
    texts = [f"document {i}" for i in range(40)]
    heldout = []
    for order in (texts, texts[::-1]):
        folder = tmp_path / str(len(heldout))
        folder.mkdir()
        train_tokenizer(texts, 300).save(folder / "tok")
        result = run(config(folder, sources=one_document(folder, *order), tokenizer=str(folder / "tok")))
        tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
        heldout.append(
            {tokenizer.decode(d[:-1]) for d in documents_of(result.folder / "heldout", result.manifest["eos_id"])}
        )
    assert heldout[0] == heldout[1] and 4 < len(heldout[0]) < 22


def test_tokenizer_does_not_learn_from_heldout_documents(tmp_path):
    """The same training documents with other held-out ones give the same tokenizer."""
    result = run(config(tmp_path, sources=one_document(tmp_path, *[f"text {i} " * 20 for i in range(20)])))
    tokenizer = AutoTokenizer.from_pretrained(result.folder / "tokenizer")
    documents = documents_of(result.folder / "train", result.manifest["eos_id"])
    train_tokenizer([tokenizer.decode(d[:-1]) for d in documents], 300).save(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.get_vocab() == tokenizer.get_vocab()


def test_shards_are_cut_by_size(tmp_path):
    words = np.random.default_rng(0).integers(0, 1 << 40, 60_000)
    data = config(tmp_path, sources=one_document(tmp_path, "a", " ".join(map(str, words))), shard_mib=1)
    folder = run(data, seq_length=1024).folder
    sizes = [
        p.stat().st_size for p in sorted((folder / "train").glob("*.mds")) + sorted((folder / "heldout").glob("*.mds"))
    ]
    assert len(sizes) > 2 and max(sizes) <= 1 << 20


def test_two_preparations_do_not_mix(tmp_path, monkeypatch):
    monkeypatch.setattr(data_prep.folder_lock, "WAIT_SECONDS", 0.2)
    with lock_folder(tmp_path / "shards.partial"), pytest.raises(ValueError, match="another process is writing"):
        run(config(tmp_path))
    assert run(config(tmp_path)).fresh


def test_progress_goes_to_stderr_with_a_rate(tmp_path, capfd):
    run(config(tmp_path))
    out, err = capfd.readouterr()
    assert out == "" and "tokens/s" in err and "writing" in err
