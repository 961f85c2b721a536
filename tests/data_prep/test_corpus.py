"""Reading a corpus: every kind of file, in order, cut anywhere, every document yielded or counted with its reason."""

import bz2
import gzip
import json
import os
import random
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import corpus
from data_prep.corpus import Block, LeftOut, Rules, cut, read_block, read_documents
from data_prep.files import find_files
from recipes.errors import UserError
from recipes.schema import SourceConfig

PACK = {"": lambda data: data, ".gz": gzip.compress, ".zst": lambda data: zstd.compress(data), ".bz2": bz2.compress}


def read(path, policy="stop", max_bytes=64 << 20, **source):
    """Documents and what was left out, of one source."""
    sources, left_out = [SourceConfig(path=str(path), **source)], LeftOut()
    documents = list(read_documents(find_files(sources), sources, Rules(policy, max_bytes), left_out))
    return documents, left_out


def texts(path, **source):
    return [document.text for document in read(path, **source)[0]]


def jsonl(*values: str, field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in values).encode()


@pytest.fixture
def tree(tmp_path):
    files = {"b.txt": "two", "a.md": "one", "sub/c.txt": "three", "sub/d.bin": "no", "skip/e.txt": "out", "f.MD": "Q"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


# ---- which files


def test_folders_files_and_globs(tree):
    assert texts(tree, exclude=["skip"]) == ["one", "two", "Q", "three"]
    assert texts(tree / "sub" / "d.bin") == ["no"]
    assert texts(tree / "**" / "*.txt", exclude=[]) == ["two", "out", "three"]
    assert texts(tree, suffixes=[".bin"]) == ["no"]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_urls_give_what_paths_give(tree, scheme):
    url = f"{scheme}://{tree}"
    if scheme == "memory":
        fsspec.filesystem("memory").put(str(tree), str(tree), recursive=True)
    assert texts(url, exclude=["skip"]) == texts(tree, exclude=["skip"])
    assert texts(f"{url}/sub/d.bin") == ["no"]
    assert texts(f"{url}/**/*.txt") == texts(tree / "**" / "*.txt")
    with pytest.raises(UserError, match=r"absent does not exist; correct this path in data\.sources"):
        texts(f"{url}/absent")
    with pytest.raises(UserError, match="no file that ends in"):
        texts(url, suffixes=[".xyz"])
    with pytest.raises(UserError, match="no file matches"):
        texts(f"{url}/*.xyz")


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("place", ["local", "memory"])
def test_compressed_files(tmp_path, suffix, place):
    values = [f"document {i} " * 50 for i in range(3000)]
    data = PACK[suffix](jsonl(*values[:1000])) + PACK[suffix](jsonl(*values[1000:]))  # two members, one file
    if place == "memory":
        path = f"memory://packed/x.jsonl{suffix}"
        fsspec.filesystem("memory").pipe(path, data)
    else:
        path = tmp_path / f"x.jsonl{suffix}"
        path.write_bytes(data)
    documents, left_out = read(path)
    assert [d.text for d in documents] == values and not left_out.counts
    assert [d.line for d in documents] == list(range(1, 3001))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / f"page.md{suffix}").write_bytes(PACK[suffix](b"# A page"))
    assert texts(tmp_path / "t") == ["# A page"]


def test_sources_keep_their_order(tree):
    sources = [SourceConfig(path=str(tree / "sub"), suffixes=[".txt"]), SourceConfig(path=str(tree / "a.md"))]
    got = read_documents(find_files(sources), sources, Rules(), LeftOut())
    assert [d.text for d in got] == ["three", "one"]


def test_format_overrides_the_suffix(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text('{"text": "a"}\n')
    assert texts(path) == ['{"text": "a"}\n']
    assert texts(path, format="jsonl") == ["a"]


def test_paths_that_lead_nowhere(tmp_path):
    for path in (tmp_path / "absent", tmp_path, tmp_path / "*.txt"):
        with pytest.raises(UserError, match="data.sources"):
            read(path)
    with pytest.raises(ValueError, match="data.sources is empty"):
        find_files([])
    with pytest.raises(ValueError, match=r"nosuch://x cannot be opened"):
        read("nosuch://x")


def test_unknown_words_are_refused(tree):
    with pytest.raises(ValueError, match="'word'"):
        read(tree, format="word")
    with pytest.raises(ValueError, match="'ignore'"):
        read(tree, "ignore")
    with pytest.raises(ValueError, match="drop language_field"):
        read(tree, language_field="lang")


# ---- tables


def parquet(path: Path, rows: list[dict], **options) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def saved_data_set(folder: Path, shards: list[list[str]]) -> Path:
    """What `datasets.Dataset.save_to_disk` writes: Arrow streams and a state that lists them."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.table({"text": rows, "lang": ["en"] * len(rows)})
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_parquet_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 2000)
    rows = [{"body": f"row {i} " * 9, "n": i} for i in range(500)] + [{"body": None, "n": 0}, {"body": " ", "n": 1}]
    path = parquet(tmp_path / "x.parquet", rows, row_group_size=40)
    documents, left_out = read(path, "skip", text_field="body")
    assert [d.text for d in documents] == [row["body"] for row in rows[:500]]
    assert [d.line for d in documents] == list(range(1, 501))
    assert left_out.counts == {"not a string": 1, "empty": 1} and left_out.places[0].startswith(f"{path}:501: ")
    with pytest.raises(ValueError, match=r"x\.parquet: has no column 'text' but body, n; name another text_field"):
        read(path)
    assert read(path, "skip")[1].counts == {"no such field": 502}


def test_parquet_at_a_url(tmp_path):
    path = parquet(tmp_path / "x.parquet", [{"text": f"t{i}"} for i in range(10)])
    fsspec.filesystem("memory").put(str(path), "/tables/x.parquet")
    assert texts("memory://tables") == texts(path) == [f"t{i}" for i in range(10)]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_parquet(tmp_path, damage):
    path = parquet(tmp_path / "x.parquet", [{"text": f"text {i}" * 50} for i in range(2000)], compression="gzip")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 3 : len(data) // 3 + 40] = b"x" * 40
    path.write_bytes({"cut": data[:-200], "flip": data, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"x\.parquet: cannot be read"):
        read(path)
    documents, left_out = read(path, "skip")
    counted = len(documents) + sum(left_out.counts.values())
    assert counted == (2000 if damage == "flip" else 1)


@pytest.mark.parametrize("place", ["local", "memory"])
def test_hugging_face_data_set(tmp_path, monkeypatch, place):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 500)
    shards = [[f"a{i} " * 20 for i in range(35)], [f"b{i} " * 20 for i in range(12)]]
    saved_data_set(tmp_path / "set", shards)
    saved_data_set(tmp_path / "many" / "test", [["held"]])
    saved_data_set(tmp_path / "many" / "train", shards)
    (tmp_path / "many" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    root = str(tmp_path)
    if place == "memory":
        root = "memory://sets"
        fsspec.filesystem("memory").put(str(tmp_path), "/sets", recursive=True)
    assert texts(f"{root}/set") == shards[0] + shards[1] == texts(f"{root}/many")
    assert texts(f"{root}/many", format="hf", split="test") == ["held"]
    assert texts(f"{root}/set", language_field="lang", languages=["en"]) == shards[0] + shards[1]
    with pytest.raises(ValueError, match="has the splits train, test, not dev"):
        read(f"{root}/many", split="dev")
    with pytest.raises(UserError, match="no data set saved to disk"):
        read(f"{root}/many/..", format="hf") if place == "local" else read(f"{root}", format="hf")


def test_damaged_data_set(tmp_path):
    folder = saved_data_set(tmp_path / "set", [[f"text {i}" for i in range(35)]])
    arrow = folder / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:-700])
    with pytest.raises(ValueError, match=r"\.arrow: cannot be read"):
        read(folder)
    assert sum(read(folder, "skip")[1].counts.values()) >= 1
    arrow.unlink()
    with pytest.raises(UserError, match=r"\.arrow cannot be read"):
        read(folder)


# ---- filters


def test_filters(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [("short", "en"), ("long enough", "en"), ("lang genug", "de"), ("x" * 50, "en"), (" ", "en")]
    path.write_text("".join(json.dumps({"text": text, "lang": lang}) + "\n" for text, lang in rows))
    documents, left_out = read(path, min_chars=6, max_chars=20, language_field="lang", languages=["en"])
    assert [d.text for d in documents] == ["long enough"]
    assert left_out.counts == {
        "shorter than min_chars": 1,
        "longer than max_chars": 1,
        "other language": 1,
        "empty": 1,
    }
    with pytest.raises(ValueError, match=r"x\.jsonl:1: has no field 'language'; name another .*language_field"):
        read(path, language_field="language", languages=["en"])


# ---- JSONL


def test_jsonl_has_a_document_on_each_line(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"body": "first\nline"}), "", json.dumps({"body": "zweite Ä 🙂"}), json.dumps({"body": " "})]
    path.write_bytes("\r\n".join(lines).encode())  # no newline at the end
    documents, left_out = read(path, text_field="body")
    assert [(d.text, d.line) for d in documents] == [("first\nline", 1), ("zweite Ä 🙂", 3)]
    assert left_out.counts == {"empty": 2} and left_out.places == [f"{path}:{n}: is empty" for n in (2, 4)]


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl("a"))
    (tmp_path / "y.txt").write_bytes(b"\xef\xbb\xbfb")
    assert texts(tmp_path) == ["a", "b"]


def test_what_only_the_patient_parser_takes(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a", "score": NaN}\n{"text": "b", "id": 123456789012345678901234567890}\n')
    assert texts(path) == ["a", "b"]


BAD_LINES = {
    "not JSON": b'{"text": "cut',
    "no such field": b'{"other": "x"}',
    "not a string": b'{"text": 5}',
    "invalid UTF-8": b'{"text": "\xff"}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bad_line_stops_with_file_and_line_or_is_counted(tmp_path, monkeypatch, reason, suffix):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 4000)  # the line lies in a later block
    path = tmp_path / f"x.jsonl{suffix}"
    good = [f"good {i}" for i in range(700)]
    path.write_bytes(PACK[suffix](jsonl(*good) + BAD_LINES[reason] + b"\n" + jsonl("also")))
    with pytest.raises(ValueError, match=rf"x\.jsonl{suffix}:701: .*bad_documents: skip") as error:
        read(path)
    assert "\n" not in str(error.value)
    documents, left_out = read(path, "skip")
    assert [d.text for d in documents] == [*good, "also"]
    assert left_out.counts == {reason: 1} and left_out.places[0].startswith(f"{path}:701: ")


@pytest.mark.parametrize("line", [b"[1, 2]", b'"text"', b'{"text": "\\ud800"}', b"[" * 100_000, b"null", b"\x00"])
def test_hostile_lines_are_counted(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(line)
    documents, left_out = read(path, "skip")
    assert documents == [] and sum(left_out.counts.values()) == 1


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("keep", [0.5, 0.95, "all but 4", "none"])
def test_truncated_compression(tmp_path, suffix, keep):
    """What comes before the damage is kept, the damage is one document that was left out, and nothing hangs."""
    rng = random.Random(0)
    values = [" ".join(str(rng.random()) for _ in range(40)) for _ in range(4000)]
    data = PACK[suffix](jsonl(*values))
    end = {"all but 4": len(data) - 4, "none": 0}.get(keep) if isinstance(keep, str) else int(len(data) * keep)
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(data[:end])
    if keep == "none":
        assert read(path)[1].counts == {"empty": 1}
        return
    with pytest.raises(ValueError, match=rf"x\.jsonl{suffix}: is damaged or cut off at or after line \d+"):
        read(path)
    documents, left_out = read(path, "skip")
    got = [d.text for d in documents]
    assert got == values[: len(got)] and left_out.counts == {"damaged file": 1}
    if suffix == ".gz" and keep == 0.95:
        assert len(got) > 3000
    (tmp_path / f"y.txt{suffix}").write_bytes(PACK[suffix](values[0].encode() * 30)[:-9])
    with pytest.raises(ValueError, match=r"y\.txt.*cannot be read"):
        read(tmp_path / f"y.txt{suffix}")


def test_junk_behind_a_compressed_file(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(jsonl("a", "b")) + b"junk")
    with pytest.raises(ValueError, match="damaged or cut off"):
        read(tmp_path / "x.jsonl.gz")
    assert read(tmp_path / "x.jsonl.gz", "skip")[1].counts == {"damaged file": 1}


def test_files_without_anything(tmp_path):
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_bytes(b"")
    documents, left_out = read(tmp_path)
    assert documents == [] and left_out.counts == {"empty": 2}
    assert left_out.places == [f"{tmp_path / name}: is empty" for name in ("a.jsonl", "b.txt")]


def test_names_of_any_bytes_can_be_said(tmp_path):
    """One line each, that a UTF-8 file takes."""
    for name in (b"a\nb.txt", b"c\xff.txt"):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(b"\xff")
    _, left_out = read(tmp_path, "skip")
    assert left_out.places == [f"{tmp_path}/{name}: is not UTF-8 at byte 0" for name in (r"a\nb.txt", r"c\udcff.txt")]
    assert left_out.counts == {"invalid UTF-8": 2}


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Müller".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: is not UTF-8 at byte 1"):
        read(tmp_path)
    documents, left_out = read(tmp_path, "skip")
    assert documents == [] and left_out.counts == {"invalid UTF-8": 1}


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.parquet"])
def test_file_that_vanishes_is_unreadable(tmp_path, name):
    path = tmp_path / name
    path.write_text("text")
    sources = [SourceConfig(path=str(path))]
    files = find_files(sources)
    os.unlink(path)
    with pytest.raises(ValueError, match=rf"{name}: cannot be read"):
        list(read_documents(files, sources, Rules(), LeftOut()))
    left_out = LeftOut()
    assert list(read_documents(files, sources, Rules("skip"), left_out)) == []
    assert left_out.counts == {"unreadable": 1}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", ["first", "middle", "last without an end"])
def test_line_that_is_too_long(tmp_path, suffix, place):
    """A line of 100 MB among sound ones, held to 1 MB: named with its number, never in memory as a whole."""
    import tracemalloc

    long = b'{"text": "' + b"x" * 100_000_000 + b'"}'
    before, after = jsonl("a", "b"), jsonl("c", "d")
    data = {"first": long + b"\n" + before + after, "middle": before + long + b"\n" + after}
    data["last without an end"] = before + after + long
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(gzip.compress(data[place], 1) if suffix else data[place])
    line = {"first": 1, "middle": 3, "last without an end": 5}[place]
    with pytest.raises(
        ValueError, match=rf"x\.jsonl{suffix}:{line}: has 10\d{{7}} bytes, more than .*max_document_mib"
    ):
        read(path, max_bytes=1 << 20)
    tracemalloc.start()
    documents, left_out = read(path, "skip", max_bytes=1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
    assert [d.text for d in documents] == ["a", "b", "c", "d"] and left_out.counts == {"too large": 1}


def test_long_line_that_is_allowed(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(jsonl("x" * 20_000_000, "y"))
    assert [len(text) for text in texts(tmp_path / "x.jsonl")] == [20_000_000, 1]
    (tmp_path / "y.txt").write_text("z" * 3000)
    with pytest.raises(ValueError, match=r"y\.txt: has more bytes"):
        read(tmp_path / "y.txt", max_bytes=2999)


# ---- blocks


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 60), max_size=40),
    st.integers(10, 200),
    st.sampled_from([40, 70, 1000]),
    st.sampled_from(["plain", "packed", "junk behind", "cut off"]),
)
def test_any_cut_reads_the_same_and_can_be_taken_up(sizes, block_bytes, max_bytes, file):
    """Blocks of any size give the same documents; with some of them done before, exactly the others are read.

    Of a damaged file some documents are lost, but always the same.
    """
    import tempfile

    lines = [json.dumps({"text": "t" * size}).encode() for size in sizes]
    data = b"\n".join(lines)
    want = [len(line) for line, size in zip(lines, sizes, strict=True) if size and len(line) <= max_bytes]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_BYTES", block_bytes)
        patch.setattr(corpus, "PLAIN_CHUNK", 32)
        patch.setattr(corpus, "PACKED_CHUNK", 24)
        path = Path(folder) / ("x.jsonl" if file == "plain" else "x.jsonl.gz")
        packed = gzip.compress(data, compresslevel=0)
        path.write_bytes({"plain": data, "junk behind": packed + b"junk", "cut off": packed[:-9]}.get(file, packed))
        sources = [SourceConfig(path=str(path))]
        files, rules = find_files(sources), Rules("skip", max_bytes)

        def read_all(blocks):
            return [(b.key, [d.size for d in read_block(b, sources[0], rules, LeftOut())]) for b in blocks]

        blocks = list(cut(files, rules))
        assert all(isinstance(block, Block) for block in blocks)
        whole = read_all(blocks)
        got = [size for _, some in whole for size in some]
        assert got == want if file in ("plain", "packed") else got == want[: len(got)]
        assert sum(block.cost for block in blocks) == path.stat().st_size
        done = {block.key: json.loads(json.dumps(block.facts())) for block in blocks[::2] + blocks[1::3]}
        again = list(cut(files, rules, done.get))
        facts = [b if isinstance(b, dict) else b.facts() for b in again]
        assert [one | {"cost": 0} for one in facts] == [block.facts() | {"cost": 0} for block in blocks]
        assert read_all([b for b in again if isinstance(b, Block)]) == [one for one in whole if one[0] not in done]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_small_corpus_has_enough_blocks_for_all_workers(tmp_path, monkeypatch, suffix):
    """Blocks shrink with the corpus, else all workers but one would wait; a larger corpus keeps the full size."""
    monkeypatch.setattr(corpus, "SMALLEST_BLOCK", 100)
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 12_800)
    values = [f"document {i:06}" for i in range(4000)]
    path, sources = tmp_path / f"x.jsonl{suffix}", [SourceConfig(path=str(tmp_path))]
    path.write_bytes(PACK[suffix](jsonl(*values)))
    sources[0].suffixes = [".jsonl"]
    blocks = list(cut(find_files(sources), Rules()))
    assert len(blocks) >= corpus.BLOCKS and {block.count for block in blocks[:-1]} <= set(range(1, 4000 // 32))
    assert texts(path) == values
    (tmp_path / "y.jsonl").write_bytes(jsonl("x" * 12_800 * corpus.BLOCKS))
    largest = max(
        block.end - block.start for block in cut(find_files(sources), Rules()) if block.files[0].path == str(path)
    )
    assert 12_800 <= largest < 12_900
