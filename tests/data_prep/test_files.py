"""Which files a corpus is: through links but never in a circle; every file that is left out is counted by its kind."""

import gzip
import json
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from data_prep.files import find_files, list_ignored
from data_prep.prep import prepare
from data_prep.tokenizer import train_tokenizer
from recipes.errors import UserError
from recipes.schema import DataConfig, SourceConfig
from tests.data_prep.test_corpus import read, texts

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def found(path, **source) -> list[str]:
    """Paths below `path` of what is read, in order."""
    files = find_files([SourceConfig(path=str(path), **source)])
    return [file.path.removeprefix("file://") for file in files]


# ---- kinds


@pytest.mark.parametrize(
    ("name", "data"), [("a.json", LINES), ("a.JSON.gz", gzip.compress(LINES))], ids=["plain", "gz"]
)
def test_json_holds_json_lines(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert texts(tmp_path / name) == ["one", "two"] == texts(tmp_path, suffixes=[".json"])
    assert texts(f"file://{tmp_path}/{name}") == ["one", "two"]


@pytest.mark.parametrize("content", ['{\n "text": "one"\n}', '[{"text": "one"}]'])
def test_json_of_another_kind_is_refused_with_a_way_out(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=r"a\.json:1: (is not JSON|has no field 'text').* in data\.sources"):
        read(tmp_path / "a.json")
    assert texts(tmp_path / "a.json", format="text") == [content]


@pytest.mark.parametrize("name", ["a.csv", "A.TSV", "a.csv.gz", "a.xlsx", "a.avro"])
@pytest.mark.parametrize("by", ["path", "suffix", "glob"])
def test_tables_are_not_taken_for_one_text(tmp_path, name, by):
    data = b"id,text\n1,one\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    source = {
        "path": {"path": tmp_path / name},
        "suffix": {"path": tmp_path, "suffixes": [name.lower()[1:]]},
        "glob": {"path": tmp_path / "[aA].*"},
    }[by]
    with pytest.raises(UserError, match=r"is a table .* Parquet or JSON Lines, or set format: text"):
        read(**source)
    assert texts(**source, format="text") == [data.decode()]


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.zip", "a.tar.gz", "a.tgz"])
@pytest.mark.parametrize("format", ["auto", "jsonl", "text"])
def test_packings_that_are_not_read_are_refused(tmp_path, name, format):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"is packed in a way that is not read here; .*\.gz, \.zst, \.bz2"):
        read(tmp_path / name, format=format)


# ---- links


@pytest.fixture
def linked(tmp_path) -> Path:
    """A corpus with links: to a folder elsewhere, beside it, above it, to nothing, and two that lead to each other."""
    for name in ("corpus/a/x.txt", "corpus/z/y.txt", "elsewhere/deep/e.txt", "p/p.txt", "q/q.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    links = {"corpus/far": "elsewhere", "corpus/b": "corpus/a", "corpus/z/up": "corpus", "corpus/p": "p"}
    for name, target in (links | {"p/q": "q", "q/p": "p", "corpus/self": "corpus/self"}).items():
        (tmp_path / name).symlink_to(tmp_path / target)
    (tmp_path / "corpus/gone.txt").symlink_to(tmp_path / "nothing")
    return tmp_path / "corpus"


def in_time(function, *arguments, **options):
    """The result; a failure if it takes longer than any of these few files can."""
    results: list = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments, **options)), daemon=True)
    thread.start()
    thread.join(20)
    assert results, "it does not end"
    return results[0]


@pytest.mark.parametrize("form", ["{}", "{}/**/*.txt", "file://{}", "file://{}/**/*.txt"])
def test_linked_folders_are_read_and_circles_are_not(linked, form):
    names = [Path(path).relative_to(linked).as_posix() for path in in_time(found, form.format(linked))]
    assert names == ["a/x.txt", "b/x.txt", "far/deep/e.txt", "p/p.txt", "p/q/q.txt", "z/y.txt"]


def test_copies_through_links_count_once(linked, tmp_path):
    train_tokenizer(["a"], 300).save(tmp_path / "tok")
    data = DataConfig(
        shards=str(tmp_path / "shards"), sources=[SourceConfig(path=str(linked))], tokenizer=str(tmp_path / "tok")
    )
    manifest = prepare(data, seq_length=16, vocab_size=300).manifest
    assert manifest["documents"]["written"] == 5 and manifest["documents"]["skipped"] == {"duplicate": 1}
    assert manifest["sources"]["ignored"] == {"links that lead nowhere": 1, "without suffix": 1}


@pytest.mark.parametrize(
    "pattern",
    ["**/*.txt", "**", "a/**/*.txt", "**/deep/**", "*/**/?.txt", "**/.*", "**/.h/*", "[ab]/**/*", "**/a/**/x.txt"],
)
def test_globs_are_those_of_python(tmp_path, pattern):
    import glob

    for name in ("x.txt", "a/x.txt", "a/b/x.txt", "a/deep/n.txt", "b/.h/x.txt", ".h/y.txt", "b/.hidden", "c/a/d/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    want = {path for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(path)}
    assert want and set(found(tmp_path / pattern)) == want
    assert set(found(f"{tmp_path.parent}/*{tmp_path.name[1:]}/{pattern}")) == want


def test_folder_that_cannot_be_read_is_named(linked, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).endswith("z"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for path in (linked, linked / "**" / "*.txt"):
        with pytest.raises(UserError, match=r"corpus/z cannot be read \(Permission denied\)"):
            found(path)
    assert "a/x.txt" in str(found(linked, exclude=["z"]))


# ---- what is left out


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_files_left_out_are_counted_by_suffix(tmp_path, scheme):
    names = ["a.jsonl", "b.jsonl.xz", "c.JSONL.XZ", "d.csv", "LICENSE", "e.py", "skip/f.pdf", "g/h.v1.json.gz"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    if scheme:
        import fsspec

        fsspec.filesystem("memory").put(str(tmp_path), str(tmp_path), recursive=True)
    ignored = Counter()
    source = SourceConfig(path=f"{scheme}{tmp_path}", exclude=["skip"])
    assert len(find_files([source], ignored)) == 1
    assert ignored == {".jsonl.xz": 2, ".csv": 1, "without suffix": 1, ".py": 1, ".json.gz": 1}
    assert list_ignored(ignored) == "2 .jsonl.xz, 1 .csv, 1 .json.gz, 1 .py, 1 without suffix"
    source.suffixes = [".parquet"]
    with pytest.raises(UserError, match=r"no file that ends in \.parquet but 2 \.jsonl\.xz, 1 \.csv"):
        find_files([source])


def test_many_kinds_are_summed_up():
    assert list_ignored({f".{n:02}": 30 - n for n in range(12)}).endswith("23 .07, 82 of 4 other kinds")


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(10)))
    (tmp_path / "y.jsonl.xz").write_bytes(b"x")
    (tmp_path / os.fsdecode(b"n.\xff")).write_bytes(b"x")
    train_tokenizer(["a"], 300).save(tmp_path / "tokenizer")
    source = SourceConfig(path=str(tmp_path), suffixes=[".jsonl"], exclude=["tokenizer", "shards.partial", "shards"])
    data = DataConfig(shards=str(tmp_path / "shards"), sources=[source], tokenizer=str(tmp_path / "tokenizer"))
    return data, prepare(data, seq_length=16, vocab_size=300)


def test_files_left_out_are_said_and_in_the_manifest(prepared, capfd):
    data, made = prepared
    wanted = "1 .\\udcff, 1 .jsonl.xz"
    assert f"files left out by their suffixes: {wanted}; data.sources.suffixes names others" in str(made)
    assert made.manifest["sources"]["ignored"] == {".jsonl.xz": 1, ".\\udcff": 1}
    data.shards += "2"
    data.sources[0].exclude.append("shards2.partial")
    prepare(data, seq_length=16, vocab_size=300)
    assert f"left out of data.sources by their suffixes: {wanted}" in capfd.readouterr().err


# ---- a corpus that changes


def test_file_edited_in_place_at_the_same_size_is_noticed(prepared):
    data, made = prepared
    path = Path(data.sources[0].path) / "x.jsonl"
    again = prepare(data, seq_length=16, vocab_size=300)
    assert not again.fresh
    size = path.stat().st_size
    path.write_text(path.read_text().replace("text 3", "next 3"))
    assert path.stat().st_size == size
    with pytest.raises(UserError, match=r"were written again, .* \(the newest is .*x\.jsonl\); change data\.shards"):
        prepare(data, seq_length=16, vocab_size=300)
    path.unlink()  # shards outlive their corpus
    assert not prepare(data, seq_length=16, vocab_size=300).fresh


def test_change_is_noticed_by_a_run_that_was_killed_in_its_last_moment(prepared):
    data, made = prepared
    made.folder.rename(made.folder.with_name("shards.partial"))
    os.utime(Path(data.sources[0].path) / "x.jsonl", ns=(1, 1))
    assert prepare(data, seq_length=16, vocab_size=300).manifest["sources"] != made.manifest["sources"]
