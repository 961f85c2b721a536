"""Read documents out of files: a text file is one document, a JSONL file holds one on each line.

The order is that of the sources and, within one, of the sorted paths, so the same files always give the same sequence
of documents. Every document read is either yielded or counted as skipped, with the reason.
"""

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.schema import BAD_DOCUMENT_POLICIES, SourceConfig

FORMATS = ("auto", "text", "jsonl")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """One text and where it comes from."""

    text: str
    file: Path
    line: int | None  # from 1; None where the whole file is the document
    size: int  # bytes it takes in the file


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, with how to read it."""

    path: Path
    is_jsonl: bool
    field: str


class BadDocument(ValueError):
    """A document that cannot be used; `reason` is the heading under which it is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def find_files(sources: Sequence[SourceConfig]) -> list[SourceFile]:
    """The files of all sources, in reading order.

    Raises:
        FileNotFoundError: a path does not exist, or a directory or glob holds no file to read.
        ValueError: no source is given, or a format is unknown.
    """
    if not sources:
        raise ValueError("data.sources is empty; name at least one directory, file or glob to read")
    files = []
    for source in sources:
        if source.format not in FORMATS:
            raise ValueError(f"data.sources format {source.format!r} is not one of {', '.join(FORMATS)}")
        for path in _paths(source):
            is_jsonl = source.format == "jsonl" or (source.format == "auto" and path.suffix.lower() in JSONL_SUFFIXES)
            files.append(SourceFile(path, is_jsonl, source.text_field))
    return files


def _paths(source: SourceConfig) -> list[Path]:
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = tuple(suffix.lower() for suffix in source.suffixes)
        found = [Path(root, name) for root, names in _walk(path, source.exclude) for name in names]
        found = [file for file in found if file.name.lower().endswith(suffixes) and file.is_file()]
        nothing = f"{path} holds no file that ends in {', '.join(source.suffixes)}; name other suffixes in data.sources"
    elif glob.has_magic(str(path)):
        found = [Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match)]
        nothing = f"no file matches {path}; correct this path in data.sources"
    else:
        raise FileNotFoundError(f"{path} does not exist; correct this path in data.sources")
    if not found:
        raise FileNotFoundError(nothing)
    return sorted(found, key=lambda file: file.parts)


def _walk(path: Path, exclude: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for root, folders, names in os.walk(path):
        folders[:] = [folder for folder in folders if folder not in exclude]
        yield root, names


def read_documents(files: Sequence[SourceFile], bad_documents: str, skipped: Counter[str]) -> Iterator[Document]:
    """Yield the documents of `files` in order.

    Args:
        bad_documents: "stop" raises at the first document that cannot be used, "skip" counts it.
        skipped: receives the number of documents left out, by reason; documents without text are always left out.

    Raises:
        ValueError: a bad document under "stop", named with file and line.
    """
    if bad_documents not in BAD_DOCUMENT_POLICIES:
        raise ValueError(f"data.bad_documents is {bad_documents!r}; give one of {', '.join(BAD_DOCUMENT_POLICIES)}")
    for file in files:
        try:
            for line, raw in _raw_documents(file):
                document = _usable(file, line, raw, bad_documents, skipped)
                if document:
                    yield document
        except OSError as error:
            _reject(file.path, BadDocument("unreadable", f"cannot be read ({error.strerror})"), bad_documents, skipped)


def _usable(
    file: SourceFile, line: int | None, raw: bytes, bad_documents: str, skipped: Counter[str]
) -> Document | None:
    try:
        text = _text(file, raw)
    except BadDocument as bad:
        _reject(file.path if line is None else f"{file.path}:{line}", bad, bad_documents, skipped)
        return None
    if not text.strip():
        skipped["empty"] += 1
        return None
    return Document(text, file.path, line, len(raw))


def _reject(place: Path | str, bad: BadDocument, bad_documents: str, skipped: Counter[str]) -> None:
    if bad_documents == "stop":
        raise ValueError(f"{place}: {bad}; repair it, or set data.bad_documents: skip") from bad
    skipped[bad.reason] += 1


def _raw_documents(file: SourceFile) -> Iterator[tuple[int | None, bytes]]:
    """Line number (None for a whole file) and bytes of each document."""
    with open(file.path, "rb") as stream:
        if file.is_jsonl:
            yield from enumerate(stream, start=1)
        else:
            yield None, stream.read()


def _text(file: SourceFile, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument("invalid UTF-8", f"is not UTF-8 at byte {error.start}") from error
    return _json_field(text, file.field) if file.is_jsonl and text.strip() else text


def _json_field(line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadDocument("not JSON", f"is not JSON ({error})") from error
    if not isinstance(record, dict) or field not in record:
        raise BadDocument("no such field", f"has no field {field!r}")
    text = record[field]
    if not isinstance(text, str):
        raise BadDocument("not a string", f"field {field!r} is a {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument("invalid UTF-8", f"field {field!r} holds half a surrogate pair at {error.start}") from error
    return text
