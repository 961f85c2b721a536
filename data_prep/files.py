"""Find the files of a corpus and open them, on local disks or at any URL that fsspec knows, compressed or not."""

import contextlib
import fnmatch
import glob
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from data_prep.remote import file_system, is_url
from recipes.errors import UserError
from recipes.schema import SOURCE_FORMATS, SourceConfig

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
TABLES = (".csv", ".tsv", ".xls", ".xlsx", ".orc", ".avro", ".feather")  # that would be taken for one text
PACKED = (".xz", ".lzma", ".lz4", ".snappy", ".zip", ".7z", ".rar", ".tar", ".tgz")  # that nothing here unpacks
KINDS_SAID = 8  # kinds of files left out that are listed; the rest is counted
CHANGE_MARKS = ("mtime", "LastModified", "last_modified", "ETag", "etag", "checksum", "created")  # of fsspec's infos


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, with how to read it and by what to notice that it changed."""

    path: str  # local path or URL
    source: int  # index of its SourceConfig
    kind: str  # text | jsonl | parquet | arrow
    compression: str | None  # pyarrow's name of it
    size: int  # bytes as it lies there
    stamp: str  # differs when the file has been written again


class MissingSource(UserError):
    """A path of data.sources that does not exist, or holds no file to read."""


def find_files(sources: Sequence[SourceConfig], ignored: Counter[str] | None = None) -> list[SourceFile]:
    """The files of all sources, in reading order: that of the sources and, within one, of the sorted paths.

    Folders are read with all below them, linked ones too; a link back to a folder above it is not followed.

    Args:
        ignored: receives how many files of the folders are left out, by suffix.

    Raises:
        MissingSource: a path does not exist, or a directory or glob holds no file to read.
        UserError: no source is given, or a format, a kind of file or a URL is unknown.
    """
    if not sources:
        raise UserError("data.sources is empty; name at least one directory, file or glob to read")
    ignored = Counter() if ignored is None else ignored
    return [file for number, source in enumerate(sources) for file in _files_of(source, number, ignored)]


def list_ignored(ignored: dict[str, int]) -> str:
    """The files that suffixes leave out, in words: the most frequent kinds first."""
    kinds = sorted(ignored.items(), key=lambda kind: (-kind[1], kind[0]))
    more = sum(count for _, count in kinds[KINDS_SAID:])
    said = [f"{count} {suffix}" for suffix, count in kinds[:KINDS_SAID]]
    return ", ".join([*said, f"{more} of {len(kinds) - KINDS_SAID} other kinds"] if more else said)


def _files_of(source: SourceConfig, number: int, ignored: Counter[str]) -> list[SourceFile]:
    if source.format not in SOURCE_FORMATS:
        raise UserError(f"data.sources format {source.format!r} is not one of {', '.join(SOURCE_FORMATS)}")
    place = _place(source.path)
    if source.format == "hf" or (source.format == "auto" and place.holds_data_set()):
        found = place.join(_data_set_files(place, source.split))
    else:
        found = place.files(source, ignored)
    files = []
    for path, size, stamp in found:
        kind, compression = _kind(path, source.format)
        if kind == "text" and source.language_field:
            raise UserError(f"{path} is text and has no field {source.language_field!r}; drop language_field for it")
        files.append(SourceFile(path, number, kind, compression, size, stamp))
    return files


def _kind(path: str, wanted: str) -> tuple[str, str | None]:
    """How a file is read and how it is compressed, by its suffixes."""
    name = PurePosixPath(path).name.lower()
    compression = next((code for suffix, code in COMPRESSIONS.items() if name.endswith(suffix)), None)
    inner = name.rsplit(".", 1)[0] if compression else name
    if wanted == "hf":
        return "arrow", None
    if inner.endswith(PACKED):
        packings = ", ".join(COMPRESSIONS)
        raise UserError(f"{path} is packed in a way that is not read here; unpack it, or pack it as one of {packings}")
    if wanted != "auto":
        return wanted, compression
    if inner.endswith(TABLES):
        raise UserError(
            f"{path} is a table of a kind that is not read here; turn it into Parquet or JSON Lines, or set"
            " format: text in data.sources to read it as one text"
        )
    kinds = {**dict.fromkeys(JSONL_SUFFIXES, "jsonl"), ".parquet": "parquet", ".arrow": "arrow"}
    return next((kind for suffix, kind in kinds.items() if inner.endswith(suffix)), "text"), compression


def _wanted(name: str, suffixes: Sequence[str]) -> bool:
    plain = tuple(suffix.lower() for suffix in suffixes)
    return name.lower().endswith(plain + tuple(suffix + packed for suffix in plain for packed in COMPRESSIONS))


def _suffix(name: str) -> str:
    """Under which heading a file is counted that is left out: its suffix, with the one before it where it is packed."""
    suffixes = PurePosixPath(name.lower()).suffixes
    count = 2 if suffixes and suffixes[-1] in (*COMPRESSIONS, *PACKED) else 1
    return "".join(suffixes[-count:]).encode("utf-8", "backslashreplace").decode() or "without suffix"


def _nothing_in(path: str, suffixes: Sequence[str], ignored: dict[str, int]) -> UserError:
    there = f" but {list_ignored(ignored)}" * bool(ignored)
    return MissingSource(
        f"{path} holds no file that ends in {', '.join(suffixes)}{there}; name other suffixes in data.sources"
    )


def _absent(path: str) -> UserError:
    return MissingSource(f"{path} does not exist; correct this path in data.sources")


def _place(path: str) -> "_Local | _Url":
    if not is_url(path):
        return _Local(path)
    url = path.rstrip("/")
    fs, plain = file_system(url)
    return _Local(plain, "file://") if isinstance(fs, LocalFileSystem) else _Url(url, fs, plain)


class _Local:
    """A path of this machine, or a URL that leads to one."""

    def __init__(self, path: str, scheme: str = "") -> None:
        self.path, self.scheme = Path(path).expanduser(), scheme

    def join(self, names: Sequence[str]) -> list[tuple[str, int, str]]:
        return [self._facts(self.path / name) for name in names]

    def _facts(self, file: Path) -> tuple[str, int, str]:
        try:
            facts = file.stat()
        except OSError as error:
            raise MissingSource(f"{file} cannot be read ({error.strerror}); correct data.sources") from error
        return f"{self.scheme}{file}", facts.st_size, str(facts.st_mtime_ns)

    def holds_data_set(self) -> bool:
        return any((self.path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def files(self, source: SourceConfig, ignored: Counter[str]) -> list[tuple[str, int, str]]:
        path = self.path
        if path.is_file():
            return [self._facts(path)]
        if path.is_dir():
            names = [Path(root, name) for root, names in _walk(path, source.exclude) for name in names]
            wanted = [file for file in names if _wanted(file.name, source.suffixes)]
            found = [file for file in wanted if file.is_file()]
            others = Counter(_suffix(file.name) for file in names if not _wanted(file.name, source.suffixes))
            if broken := len(wanted) - len(found):
                others["links that lead nowhere"] = broken
            if not found:
                raise _nothing_in(str(path), source.suffixes, others)
            ignored.update(others)
        elif glob.has_magic(str(path)):
            found = [match for match in _glob(path) if match.is_file()]
            if not found:
                raise MissingSource(f"no file matches {path}; correct this path in data.sources")
        else:
            raise _absent(str(path))
        return [self._facts(file) for file in sorted(found, key=lambda file: file.parts)]


def _walk(path: Path, exclude: Sequence[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Folders and the files in them, through links too, but never into a folder from within itself."""

    def identity(folder: str) -> tuple[int, int]:
        facts = os.stat(folder)
        return facts.st_dev, facts.st_ino

    above = {str(path): frozenset({identity(str(path))})}  # folders that each one to come lies in, and itself
    for root, folders, names in os.walk(path, followlinks=True, onerror=_unreadable):
        inside, kept = above.pop(root), []
        for folder in folders:
            here = os.path.join(root, folder)
            if folder not in exclude and (this := identity(here)) not in inside:
                above[here] = inside | {this}
                kept.append(folder)
        folders[:] = kept
        yield root, names


def _unreadable(error: OSError) -> NoReturn:
    reason = f"{error.filename} cannot be read ({error.strerror})"
    raise UserError(f"{reason}; make it readable, or exclude it in data.sources") from error


def _glob(pattern: Path) -> Iterator[Path]:
    """What matches, as Python's own `glob` says, which would follow links in a circle for ever."""
    parts = pattern.parts
    if "**" not in parts:
        yield from map(Path, glob.glob(str(pattern)))
        return
    at = parts.index("**")
    first = Path(*parts[:at])
    for folder in map(Path, glob.glob(str(first)) if glob.has_magic(str(first)) else [str(first)]):
        if folder.is_dir():
            for root, names in _walk(folder):
                below = Path(root).relative_to(folder).parts
                yield from (Path(root, name) for name in names if _fits((*below, name), parts[at:]))


def _fits(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the components of a path match those of a pattern; hidden ones only by a pattern that begins so."""
    if not pattern or not names:
        return not names and set(pattern) <= {"**"}
    hidden = names[0].startswith(".")
    if pattern[0] == "**":
        return _fits(names, pattern[1:]) or (not hidden and _fits(names[1:], pattern))
    fits = fnmatch.fnmatchcase(names[0], pattern[0]) and (pattern[0].startswith(".") or not hidden)
    return fits and _fits(names[1:], pattern[1:])


class _Url:
    """A place that fsspec reaches."""

    def __init__(self, url: str, fs: Any, path: str) -> None:
        self.url, self.fs, self.path = url, fs, path

    def join(self, names: Sequence[str]) -> list[tuple[str, int, str]]:
        return [self._facts(self.fs.info(f"{self.path}/{name}")) for name in names]

    def _facts(self, info: dict[str, Any]) -> tuple[str, int, str]:
        mark = next((info[key] for key in CHANGE_MARKS if info.get(key) is not None), "")
        return self.fs.unstrip_protocol(info["name"]), int(info["size"] or 0), str(mark)

    def holds_data_set(self) -> bool:
        return any(self.fs.isfile(f"{self.path}/{name}") for name in ("state.json", "dataset_dict.json"))

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.path}/{name}")

    def files(self, source: SourceConfig, ignored: Counter[str]) -> list[tuple[str, int, str]]:
        if glob.has_magic(self.path):
            found = self.fs.glob(self.path, detail=True).values()
            found = [info for info in found if info["type"] == "file"]
            if not found:
                raise MissingSource(f"no file matches {self.url}; correct this path in data.sources")
        elif self.fs.isfile(self.path):
            found = [self.fs.info(self.path)]
        elif self.fs.isdir(self.path):
            infos = [info for info in self.fs.find(self.path, detail=True).values() if not self._excluded(info, source)]
            found = [info for info in infos if _wanted(info["name"], source.suffixes)]
            others = Counter(_suffix(info["name"]) for info in infos if not _wanted(info["name"], source.suffixes))
            if not found:
                raise _nothing_in(self.url, source.suffixes, others)
            ignored.update(others)
        else:
            raise _absent(self.url)
        return [self._facts(info) for info in sorted(found, key=lambda info: PurePosixPath(info["name"]).parts)]

    def _excluded(self, info: dict[str, Any], source: SourceConfig) -> bool:
        folders = PurePosixPath(info["name"]).parts[len(PurePosixPath(self.path).parts) : -1]
        return bool(set(folders) & set(source.exclude))


def _data_set_files(place: _Local | _Url, split: str) -> list[str]:
    """The Arrow files, in order, of a data set that `datasets` saved to disk."""
    name = place.path if isinstance(place, _Local) else place.url
    try:
        folder = ""
        with contextlib.suppress(FileNotFoundError):
            splits = json.loads(place.read("dataset_dict.json"))["splits"]
            if split not in splits:
                raise UserError(f"{name} has the splits {', '.join(splits)}, not {split}; set split in data.sources")
            folder = f"{split}/"
        state = json.loads(place.read(f"{folder}state.json"))
        files = [folder + entry["filename"] for entry in state["_data_files"]]
    except FileNotFoundError as error:
        raise UserError(f"{name} is no data set saved to disk: it has no state.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{name} is a damaged data set ({type(error).__name__}: {error})") from error
    if state.get("_indices_data_files"):
        raise UserError(f"{name} keeps its rows by an index; save it again with a newer version of `datasets`")
    return files


def open_raw(path: str) -> BinaryIO:
    """The bytes of a file as it lies there."""
    if not is_url(path):
        return open(path, "rb")
    store, place = fsspec.url_to_fs(path)
    return store.open(place, "rb")


@contextlib.contextmanager
def open_plain(file: SourceFile) -> Iterator[tuple[Any, Any]]:
    """A stream of the decompressed bytes, and the raw one under it, whose tell() shows how much has been read.

    A compressed file that ends early is an OSError, unlike with some libraries' own readers.
    """
    with open_raw(file.path) as raw:
        if file.compression is None:
            yield raw, raw
        else:
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), file.compression) as stream:
                yield stream, raw
