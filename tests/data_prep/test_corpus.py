"""Documents come in a fixed order, and none disappears without being counted."""

import json
import os
from collections import Counter

import pytest

from data_prep.corpus import find_files, read_documents
from recipes.schema import SourceConfig


def read(path, bad_documents="stop", **source):
    skipped = Counter()
    documents = list(read_documents(find_files([SourceConfig(path=str(path), **source)]), bad_documents, skipped))
    return documents, dict(skipped)


@pytest.fixture
def tree(tmp_path):
    for name, text in (("b.txt", "two"), ("a.md", "one"), ("sub/c.txt", "three"), ("sub/d.bin", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_directory_in_sorted_order_by_suffix(tree):
    documents, skipped = read(tree)
    assert [(d.text, d.file.name, d.line) for d in documents] == [
        ("one", "a.md", None),
        ("two", "b.txt", None),
        ("three", "c.txt", None),
    ]
    assert skipped == {}
    assert [d.text for d in read(tree, suffixes=[".bin"])[0]] == ["no"]


def test_file_and_glob(tree):
    assert [d.text for d in read(tree / "sub" / "d.bin")[0]] == ["no"]
    assert [d.text for d in read(tree / "**" / "*.txt")[0]] == ["two", "three"]


def test_sources_keep_their_order(tree):
    sources = [SourceConfig(path=str(tree / "sub"), suffixes=[".txt"]), SourceConfig(path=str(tree / "a.md"))]
    assert [d.text for d in read_documents(find_files(sources), "stop", Counter())] == ["three", "one"]


def test_jsonl_has_a_document_on_each_line(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"body": "first\nline"}), "", json.dumps({"body": "zweite Ä 🙂"}), json.dumps({"body": " "})]
    path.write_bytes("\r\n".join(lines).encode())  # no newline at the end
    documents, skipped = read(path, text_field="body")
    assert [(d.text, d.line) for d in documents] == [("first\nline", 1), ("zweite Ä 🙂", 3)]
    assert skipped == {"empty": 2}
    assert sum(d.size for d in documents) < path.stat().st_size


def test_format_overrides_the_suffix(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text('{"text": "a"}\n')
    assert read(path)[0][0].text == '{"text": "a"}\n'
    assert read(path, format="jsonl")[0][0].text == "a"


BAD_LINES = {
    "not JSON": b'{"text": "cut',
    "no such field": b'{"other": "x"}',
    "not a string": b'{"text": 5}',
    "invalid UTF-8": b'{"text": "\xff"}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_bad_line_stops_with_file_and_line_or_is_counted(tmp_path, reason):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + BAD_LINES[reason] + b'\n{"text": "also"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: .*bad_documents: skip") as error:
        read(path)
    assert "\n" not in str(error.value)
    documents, skipped = read(path, "skip")
    assert [d.text for d in documents] == ["good", "also"]
    assert skipped == {reason: 1}


@pytest.mark.parametrize("line", [b"[1, 2]", b'"text"', b'{"text": "\\ud800"}', b"[" * 100_000, b"null"])
def test_hostile_lines_are_counted(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(line)
    documents, skipped = read(path, "skip")
    assert documents == [] and sum(skipped.values()) == 1


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Müller".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: is not UTF-8 at byte 1"):
        read(tmp_path)
    assert read(tmp_path, "skip") == ([], {"invalid UTF-8": 1})


def test_file_that_vanishes_is_unreadable(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("text")
    files = find_files([SourceConfig(path=str(path))])
    os.unlink(path)
    with pytest.raises(ValueError, match=r"x\.txt: cannot be read"):
        list(read_documents(files, "stop", Counter()))
    skipped = Counter()
    assert list(read_documents(files, "skip", skipped)) == [] and skipped == {"unreadable": 1}


def test_long_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "x" * 5_000_000}) + "\n" + json.dumps({"text": "y"}))
    assert [len(d.text) for d in read(path)[0]] == [5_000_000, 1]


def test_paths_that_lead_nowhere(tmp_path):
    for path in (tmp_path / "absent", tmp_path, tmp_path / "*.txt"):
        with pytest.raises(FileNotFoundError, match="data.sources"):
            read(path)
    with pytest.raises(ValueError, match="data.sources is empty"):
        find_files([])


def test_unknown_words_are_refused(tree):
    with pytest.raises(ValueError, match="'parquet'"):
        read(tree, format="parquet")
    with pytest.raises(ValueError, match="'ignore'"):
        read(tree, "ignore")
