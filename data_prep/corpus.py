"""Read documents out of files: a text file is one document, a JSONL line, a Parquet or Arrow row is one each.

A corpus is cut into blocks of some megabytes, always at the same places, so that any number of processes can read
them, and a preparation that was killed goes on with the block it had not finished. The order is that of the files, so
the same files always give the same sequence of documents. Every document read is either yielded or counted as left
out, with the reason.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_prep.files import SourceFile, open_plain, open_raw
from data_prep.remote import is_url
from recipes.errors import UserError
from recipes.schema import BAD_DOCUMENT_POLICIES, DataConfig, SourceConfig

BLOCK_BYTES = 4 << 20  # of plain text, at most; a block ends after the line that reaches it
SMALLEST_BLOCK, BLOCKS = 1 << 18, 64  # bytes, and blocks that a corpus has where they are no smaller than that
PLAIN_CHUNK, PACKED_CHUNK = 1 << 20, 1 << 16  # bytes read at a time; what a damaged chunk holds is lost with it
ROWS = 64  # rows of a table that are turned into Python strings at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HINTS = {  # ways out besides repairing the document
    "no such field": "name another text_field or language_field in data.sources, ",
    "not JSON": "set format: text in data.sources if its lines are not JSON, ",
}


@dataclass(frozen=True)
class Document:
    """One text and where it comes from."""

    text: str
    file: str
    line: int | None  # line or row, from 1; None where the whole file is the document
    size: int  # bytes of its line, of its file or of its text


class BadDocument(ValueError):
    """A document that cannot be used; `reason` is the heading under which it is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass(frozen=True)
class Rules:
    """What is done with documents that cannot be used."""

    bad_documents: str = DataConfig.bad_documents  # "stop" raises at the first one, "skip" counts it
    max_bytes: int = DataConfig.max_document_mib << 20  # a larger document is a bad one

    def __post_init__(self) -> None:
        if self.bad_documents not in BAD_DOCUMENT_POLICIES:
            raise UserError(
                f"data.bad_documents is {self.bad_documents!r}; give one of {', '.join(BAD_DOCUMENT_POLICIES)}"
            )


@dataclass
class LeftOut:
    """The documents that were read and not yielded."""

    counts: Counter[str] = field(default_factory=Counter)  # by reason
    places: list[str] = field(default_factory=list)  # file, line and fault of the bad and the empty ones

    def empty(self, place: str) -> None:
        """Count a document without text, which stops nothing."""
        self.counts["empty"] += 1
        self.places.append(f"{_one_line(place)}: is empty")

    def reject(self, place: str, bad: BadDocument, rules: Rules, count: int = 1) -> None:
        """Count a bad document, or stop."""
        sentence = f"{_one_line(place)}: {bad}"
        if rules.bad_documents == "stop":
            hint = HINTS.get(bad.reason, "")
            raise UserError(f"{sentence}; {hint}repair it, or set data.bad_documents: skip") from bad
        self.counts[bad.reason] += count
        self.places.append(sentence)


def _one_line(place: str) -> str:
    """A path as one line that can be written, whatever bytes its names hold."""
    return place.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


@dataclass(frozen=True)
class Block:
    """A part of the corpus that one process reads in one go."""

    key: str  # sorts in the order of the corpus
    files: tuple[SourceFile, ...]  # one, or several small text files of one source
    start: int  # byte of the plain text, row group or record batch; 0 for text
    end: int
    line: int  # number of the first line or row
    count: int  # lines, rows or files
    is_last: bool  # of its files
    cost: int  # bytes of the files as they lie there, for the progress
    data: bytes = b""  # the lines of JSONL
    problem: tuple[str, str] | None = None  # reason and sentence: nothing can be read here

    @property
    def source(self) -> int:
        """Index of the SourceConfig that its files belong to."""
        return self.files[0].source

    def facts(self) -> dict[str, Any]:
        """What a later run needs to know to take the block as done."""
        return {
            "key": self.key,
            "files": files_hash(self.files),
            "start": self.start,
            "end": self.end,
            "line": self.line,
            "count": self.count,
            "is_last": self.is_last,
            "cost": self.cost,
            "source": self.source,
            "problem": list(self.problem) if self.problem else None,
        }


Finished = Callable[[str], dict[str, Any] | None]  # facts of the block with this key, if it is done


def files_hash(files: Sequence[SourceFile]) -> str:
    """Changes when a file is another one, or has been written again."""
    return xxhash.xxh64_hexdigest(repr([(file.path, file.size, file.stamp) for file in files]))


def cut(
    files: Sequence[SourceFile], rules: Rules, finished: Finished = lambda key: None
) -> Iterator[Block | dict[str, Any]]:
    """The blocks of the corpus in order; in place of one that is done, its facts."""
    size = _block_bytes(files)
    for number, group in enumerate(_groups(files, size)):
        cutter = {"jsonl": _cut_lines, "parquet": _cut_parquet, "arrow": _cut_arrow}.get(group[0].kind, _one_block)
        for block in cutter(group, f"{number:06}", size, rules, finished):
            if isinstance(block, dict):
                yield block
                continue
            facts = finished(block.key)
            yield block if facts is None or facts != facts | block.facts() else facts


def _block_bytes(files: Sequence[SourceFile]) -> int:
    """Size of a block: a small corpus has smaller ones, else all processes but one would wait for the last block."""
    total, size = sum(file.size for file in files), BLOCK_BYTES
    while size * BLOCKS > total and size // 2 >= SMALLEST_BLOCK:  # in few steps: a file more seldom moves every border
        size //= 2
    return size


def _groups(files: Sequence[SourceFile], block_bytes: int) -> Iterator[tuple[SourceFile, ...]]:
    """Files one by one, small text files of a source together."""
    group: list[SourceFile] = []
    size = 0
    for file in files:
        joins = file.kind == "text" and group and group[0].source == file.source and size + file.size <= block_bytes
        if group and not joins:
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.size
        if file.kind != "text":
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def _one_block(
    group: tuple[SourceFile, ...], number: str, size: int, rules: Rules, finished: Finished
) -> Iterator[Block]:
    cost = sum(file.size for file in group)
    yield Block(f"{number}-000000", group, 0, 0, 1, len(group), is_last=True, cost=cost)


def _cut_lines(
    group: tuple[SourceFile, ...], number: str, size: int, rules: Rules, finished: Finished
) -> Iterator[Block | dict[str, Any]]:
    index, line, cost_so_far = 0, 1, 0
    files = files_hash(group)
    try:
        with open_plain(group[0]) as (stream, raw):
            lines = _Lines(stream, raw, group[0], size, rules.max_bytes)
            is_last = False
            while not is_last:
                key, start = f"{number}-{index:06}", lines.position
                facts = finished(key)
                if facts is not None and (facts["files"], facts["start"]) == (files, start):
                    lines.skip_to(facts["end"])
                    block: Block | dict[str, Any] = facts
                    count, is_last, cost = facts["count"], facts["is_last"], facts["cost"]
                else:
                    data, count, problem = lines.take(line)
                    is_last, cost = lines.is_done, lines.cost() - cost_so_far
                    if is_last:
                        cost = group[0].size - cost_so_far
                    block = Block(key, group, start, lines.position, line, count, is_last, cost, data, problem)
                yield block
                index, line, cost_so_far = index + 1, line + count, cost_so_far + cost
    except OSError as error:
        yield _unreadable(group, number, error, index=index, line=line)


class _Lines:
    """Cuts a stream into pieces of whole lines, holding one piece in memory."""

    def __init__(self, stream: Any, raw: Any, file: SourceFile, block_bytes: int, max_bytes: int) -> None:
        self._stream, self._raw, self._block_bytes, self._max_bytes = stream, raw, block_bytes, max_bytes
        self._can_seek = file.compression is None
        self._chunk = PLAIN_CHUNK if self._can_seek else PACKED_CHUNK
        self._buffer = bytearray()
        self._ended, self._error = False, None
        self.position = 0  # of the first byte that has not been taken

    @property
    def is_done(self) -> bool:
        """Nothing is left to take, nor to say about how the file ended."""
        if not self._buffer and not self._ended:
            self._read()
        return self._ended and not self._buffer and self._error is None

    def cost(self) -> int:
        """Bytes of the file that have been read."""
        return self._raw.tell()

    def _read(self) -> bytes:
        try:
            chunk = self._stream.read(self._chunk)
        except (OSError, EOFError) as error:
            self._error, chunk = error, b""
        self._ended = not chunk
        self._buffer += chunk
        return chunk

    def skip_to(self, position: int) -> None:
        """Leave out what comes before a position that an earlier run had reached.

        What is packed is read in the same chunks as then: where the file is damaged, a chunk is lost, and it must not
        depend on a kill which one.
        """
        missing = position - self.position
        self.position = position
        if self._can_seek and missing > len(self._buffer):
            self._buffer.clear()
            self._stream.seek(position)
            return
        while missing > len(self._buffer):
            missing -= len(self._buffer)
            self._buffer.clear()
            if not self._read():
                raise OSError(0, "ends earlier than before")
        del self._buffer[:missing]

    def take(self, line: int) -> tuple[bytes, int, tuple[str, str] | None]:
        """The next whole lines, how many, and the problem if there is one instead of them."""
        end, last = self._buffer.find(b"\n", self._block_bytes - 1) + 1, self._buffer.rfind(b"\n")
        while not end and not self._ended:
            if len(self._buffer) >= self._block_bytes and len(self._buffer) - last - 1 > self._max_bytes:
                break
            at = len(self._buffer)
            last = max(last, at + found) if (found := self._read().rfind(b"\n")) >= 0 else last
            end = self._buffer.find(b"\n", max(at, self._block_bytes - 1)) + 1
        # the line across the border of the block goes by itself when it is too long, however much of it was read
        before = self._buffer.rfind(b"\n", 0, end - 1) if end else last
        if (
            len(self._buffer) >= self._block_bytes
            and (end - 1 if end else len(self._buffer)) - before - 1 > self._max_bytes
        ):
            if before < 0:
                return self._drop_line()
            end = before + 1
        elif not end:
            end = len(self._buffer) if self._ended and self._error is None else last + 1
        if not end and self._error is None:
            return b"", 0, ("empty", "is empty") if line == 1 else None
        if not end:
            reason = f"is damaged or cut off at or after line {line} ({_words(self._error)})"
            self._buffer.clear()
            self._error = None
            return b"", 1, ("damaged file", reason)
        data = bytes(self._buffer[:end])
        del self._buffer[:end]
        self.position += end
        return data, data.count(b"\n") + (not data.endswith(b"\n")), None

    def _drop_line(self) -> tuple[bytes, int, tuple[str, str]]:
        dropped, newline = 0, self._buffer.find(b"\n")
        while newline < 0 and not self._ended:
            dropped += len(self._buffer)
            self._buffer.clear()
            newline = self._read().find(b"\n")
        end = newline if newline >= 0 else len(self._buffer)
        size = dropped + end
        del self._buffer[: end + 1]
        self.position += size + (newline >= 0)
        return b"", 1, ("too large", f"has {size} bytes, more than data.max_document_mib allows")


def _words(error: BaseException | None) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error or "unknown").split())


def _unreadable(
    group: tuple[SourceFile, ...], number: str, error: Exception, *, index: int = 0, line: int = 1
) -> Block:
    reason = f"cannot be read ({_words(error)})"
    return Block(f"{number}-{index:06}", group, 0, 0, line, 1, is_last=True, cost=0, problem=("unreadable", reason))


def _cut_parquet(
    group: tuple[SourceFile, ...], number: str, size: int, rules: Rules, finished: Finished
) -> Iterator[Block]:
    """Row groups together until they reach the size of a block."""
    file = group[0]
    try:
        with open_raw(file.path) as raw, pq.ParquetFile(raw) as table:
            groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
            sizes = [(one.num_rows, one.total_byte_size) for one in groups]
    except (OSError, pa.ArrowException) as error:
        yield _unreadable(group, number, error)
        return
    yield from _pieces(group, number, size, sizes)


def _cut_arrow(
    group: tuple[SourceFile, ...], number: str, size: int, rules: Rules, finished: Finished
) -> Iterator[Block]:
    """Record batches together until they reach the size of a block; a file at a URL is one block."""
    if is_url(group[0].path):
        yield from _one_block(group, number, size, rules, finished)
        return
    try:
        with pa.memory_map(group[0].path) as raw, pa.ipc.open_stream(raw) as batches:
            sizes = [(batch.num_rows, batch.nbytes) for batch in batches]
    except (OSError, pa.ArrowException) as error:
        yield _unreadable(group, number, error)
        return
    yield from _pieces(group, number, size, sizes)


def _pieces(
    group: tuple[SourceFile, ...], number: str, block_bytes: int, sizes: list[tuple[int, int]]
) -> Iterator[Block]:
    total = sum(size for _, size in sizes) or 1
    start, row, rows, size, index, cost_so_far = 0, 1, 0, 0, 0, 0
    for i, (more_rows, more_size) in enumerate(sizes, start=1):
        rows, size = rows + more_rows, size + more_size
        if size >= block_bytes or i == len(sizes):
            cost = group[0].size - cost_so_far if i == len(sizes) else group[0].size * size // total
            yield Block(f"{number}-{index:06}", group, start, i, row, rows, i == len(sizes), cost)
            start, row, rows, size, index, cost_so_far = i, row + rows, 0, 0, index + 1, cost_so_far + cost
    if not sizes:
        problem = ("empty", "is empty")
        yield Block(f"{number}-000000", group, 0, 0, 1, 1, is_last=True, cost=group[0].size, problem=problem)


def read_documents(
    files: Sequence[SourceFile], sources: Sequence[SourceConfig], rules: Rules, left_out: LeftOut
) -> Iterator[Document]:
    """The documents of `files` in order, in this process."""
    for block in cut(files, rules):
        assert isinstance(block, Block)
        yield from read_block(block, sources[block.source], rules, left_out)


def read_block(block: Block, source: SourceConfig, rules: Rules, left_out: LeftOut) -> Iterator[Document]:
    """The documents of a block in order.

    Args:
        left_out: receives the number of documents left out, by reason; those without text always are.

    Raises:
        UserError: a bad document under "stop", named with file and line.
    """
    if block.problem:
        reason, sentence = block.problem
        place = block.files[0].path
        if reason == "empty":
            left_out.empty(place)
        else:
            place = f"{place}:{block.line}" if reason == "too large" else place
            left_out.reject(place, BadDocument(reason, sentence), rules)
        return
    if block.files[0].kind == "text":
        rows = _texts(block, rules, left_out)
    elif block.files[0].kind == "jsonl":
        rows = _json_lines(block, source, rules, left_out)
    else:
        rows = _table_rows(block, source, rules, left_out)
    for text, language, document in rows:
        if not text.strip():
            left_out.empty(document.file if document.line is None else f"{document.file}:{document.line}")
        elif reason := _filtered(text, language, source):
            left_out.counts[reason] += 1
        else:
            yield document


def _filtered(text: str, language: Any, source: SourceConfig) -> str | None:
    """Why a sound document is left out."""
    if len(text) < source.min_chars:
        return "shorter than min_chars"
    if source.max_chars is not None and len(text) > source.max_chars:
        return "longer than max_chars"
    if source.language_field and language not in source.languages:
        return "other language"
    return None


Row = tuple[str, Any, Document]  # text, language, document


def _texts(block: Block, rules: Rules, left_out: LeftOut) -> Iterator[Row]:
    for file in block.files:
        try:
            with open_plain(file) as (stream, _):
                raw = stream.read(rules.max_bytes + 1)
            if len(raw) > rules.max_bytes:
                raise BadDocument("too large", "has more bytes than data.max_document_mib allows")
            text = _decode(raw.removeprefix(BYTE_ORDER_MARK))
        except (OSError, EOFError) as error:
            reason = "unreadable" if file.compression is None else "damaged file"
            left_out.reject(file.path, BadDocument(reason, f"cannot be read ({_words(error)})"), rules)
        except BadDocument as bad:
            left_out.reject(file.path, bad, rules)
        else:
            yield text, None, Document(text, file.path, None, len(raw))


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument("invalid UTF-8", f"is not UTF-8 at byte {error.start}") from error


def _json_lines(block: Block, source: SourceConfig, rules: Rules, left_out: LeftOut) -> Iterator[Row]:
    path, lines = block.files[0].path, block.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if block.start == 0:
        lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
    for number, raw in enumerate(lines, start=block.line):
        if not raw.strip():
            left_out.empty(f"{path}:{number}")
            continue
        try:
            if len(raw) > rules.max_bytes:
                raise BadDocument("too large", f"has {len(raw)} bytes, more than data.max_document_mib allows")
            record = _parse(raw)
            text = _string(record, source.text_field)
            language = _string(record, source.language_field) if source.language_field else None
        except BadDocument as bad:
            left_out.reject(f"{path}:{number}", bad, rules)
            continue
        yield text, language, Document(text, path, number, len(raw))


def _parse(raw: bytes) -> Any:
    """A JSON value; what the fast parser refuses (NaN, lone surrogates in other fields) the patient one may take."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        text = _decode(raw)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        raise BadDocument("not JSON", f"is not JSON ({_words(error)})") from error


def _string(record: Any, name: str) -> str:
    if not isinstance(record, dict) or name not in record:
        raise BadDocument("no such field", f"has no field {name!r}")
    return _checked(record[name], name)


def _checked(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise BadDocument("not a string", f"field {name!r} is a {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument("invalid UTF-8", f"field {name!r} holds half a surrogate pair at {error.start}") from error
    return text


def _table_rows(block: Block, source: SourceConfig, rules: Rules, left_out: LeftOut) -> Iterator[Row]:
    path, number = block.files[0].path, block.line
    names = [source.text_field] + ([source.language_field] if source.language_field else [])
    try:
        for batch in _batches(block, names):
            columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
            for row in range(batch.num_rows):
                try:
                    values = [_checked(_value(column, row), name) for column, name in zip(columns, names, strict=True)]
                    if len(values[0]) > rules.max_bytes:
                        raise BadDocument("too large", "is larger than data.max_document_mib allows")
                except BadDocument as bad:
                    left_out.reject(f"{path}:{number}", bad, rules)
                else:
                    size = len(values[0].encode())
                    yield values[0], values[-1], Document(values[0], path, number, size)
                number += 1
    except BadDocument as bad:
        left_out.reject(path, bad, rules, count=block.count)
    except (OSError, pa.ArrowException) as error:
        bad = BadDocument("damaged file", f"cannot be read from row {number} on ({_words(error)})")
        left_out.reject(path, bad, rules, count=max(1, block.line + block.count - number))


def _value(column: pa.Array, row: int) -> Any:
    try:
        return column[row].as_py()
    except UnicodeDecodeError as error:
        raise BadDocument("invalid UTF-8", f"is not UTF-8 at byte {error.start}") from error


def _batches(block: Block, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Small batches of the columns that are wanted."""
    file = block.files[0]

    def check(schema: pa.Schema) -> None:
        missing = [name for name in names if name not in schema.names]
        if missing:
            raise BadDocument("no such field", f"has no column {missing[0]!r} but {', '.join(schema.names)}")

    if file.kind == "parquet":
        with open_raw(file.path) as raw, pq.ParquetFile(raw) as table:
            check(table.schema_arrow)
            groups = list(range(block.start, block.end))
            yield from table.iter_batches(ROWS, row_groups=groups, columns=names, use_threads=False)
        return
    opened = pa.PythonFile(open_raw(file.path), mode="r") if is_url(file.path) else pa.memory_map(file.path)
    with opened as raw, pa.ipc.open_stream(raw) as stream:
        check(stream.schema)
        for number, batch in enumerate(stream):
            if number >= block.start and (number < block.end or not block.end):
                yield batch.select(names)
