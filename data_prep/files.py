"""Find the files of a corpus and open them, on local disks or at any URL that fsspec knows, compressed or not."""

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa

from data_prep.remote import file_system, is_url
from recipes.errors import UserError
from recipes.schema import SOURCE_FORMATS, SourceConfig

JSONL_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
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


def find_files(sources: Sequence[SourceConfig]) -> list[SourceFile]:
    """The files of all sources, in reading order: that of the sources and, within one, of the sorted paths.

    Raises:
        UserError: a path does not exist, or a directory or glob holds no file to read.
        UserError: no source is given, or a format or URL is unknown.
    """
    if not sources:
        raise UserError("data.sources is empty; name at least one directory, file or glob to read")
    return [file for number, source in enumerate(sources) for file in _files_of(source, number)]


def _files_of(source: SourceConfig, number: int) -> list[SourceFile]:
    if source.format not in SOURCE_FORMATS:
        raise UserError(f"data.sources format {source.format!r} is not one of {', '.join(SOURCE_FORMATS)}")
    place = _Url(source.path) if is_url(source.path) else _Local(source.path)
    if source.format == "hf" or (source.format == "auto" and place.holds_data_set()):
        found = place.join(_data_set_files(place, source.split))
    else:
        found = place.files(source)
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
    if wanted != "auto":
        return wanted, compression
    kinds = {**dict.fromkeys(JSONL_SUFFIXES, "jsonl"), ".parquet": "parquet", ".arrow": "arrow"}
    return next((kind for suffix, kind in kinds.items() if inner.endswith(suffix)), "text"), compression


def _wanted(name: str, suffixes: Sequence[str]) -> bool:
    plain = tuple(suffix.lower() for suffix in suffixes)
    return name.lower().endswith(plain + tuple(suffix + packed for suffix in plain for packed in COMPRESSIONS))


def _nothing_in(path: str, suffixes: Sequence[str]) -> UserError:
    return UserError(f"{path} holds no file that ends in {', '.join(suffixes)}; name other suffixes in data.sources")


def _absent(path: str) -> UserError:
    return UserError(f"{path} does not exist; correct this path in data.sources")


class _Local:
    """A path of this machine."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()

    def join(self, names: Sequence[str]) -> list[tuple[str, int, str]]:
        return [self._facts(self.path / name) for name in names]

    def _facts(self, file: Path) -> tuple[str, int, str]:
        try:
            facts = file.stat()
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}); correct data.sources") from error
        return str(file), facts.st_size, str(facts.st_mtime_ns)

    def holds_data_set(self) -> bool:
        return any((self.path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def files(self, source: SourceConfig) -> list[tuple[str, int, str]]:
        path = self.path
        if path.is_file():
            return [self._facts(path)]
        if path.is_dir():
            found = [Path(root, name) for root, names in _walk(path, source.exclude) for name in names]
            found = [file for file in found if _wanted(file.name, source.suffixes) and file.is_file()]
            if not found:
                raise _nothing_in(str(path), source.suffixes)
        elif glob.has_magic(str(path)):
            found = [Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match)]
            if not found:
                raise UserError(f"no file matches {path}; correct this path in data.sources")
        else:
            raise _absent(str(path))
        return [self._facts(file) for file in sorted(found, key=lambda file: file.parts)]


def _walk(path: Path, exclude: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for root, folders, names in os.walk(path):
        folders[:] = [folder for folder in folders if folder not in exclude]
        yield root, names


class _Url:
    """A place that fsspec reaches."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.path = file_system(self.url)

    def join(self, names: Sequence[str]) -> list[tuple[str, int, str]]:
        return [self._facts(self.fs.info(f"{self.path}/{name}")) for name in names]

    def _facts(self, info: dict[str, Any]) -> tuple[str, int, str]:
        mark = next((info[key] for key in CHANGE_MARKS if info.get(key) is not None), "")
        return self.fs.unstrip_protocol(info["name"]), int(info["size"] or 0), str(mark)

    def holds_data_set(self) -> bool:
        return any(self.fs.isfile(f"{self.path}/{name}") for name in ("state.json", "dataset_dict.json"))

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.path}/{name}")

    def files(self, source: SourceConfig) -> list[tuple[str, int, str]]:
        if glob.has_magic(self.path):
            found = self.fs.glob(self.path, detail=True).values()
            found = [info for info in found if info["type"] == "file"]
            if not found:
                raise UserError(f"no file matches {self.url}; correct this path in data.sources")
        elif self.fs.isfile(self.path):
            found = [self.fs.info(self.path)]
        elif self.fs.isdir(self.path):
            found = self.fs.find(self.path, detail=True).values()
            found = [info for info in found if self._is_wanted(info["name"], source)]
            if not found:
                raise _nothing_in(self.url, source.suffixes)
        else:
            raise _absent(self.url)
        return [self._facts(info) for info in sorted(found, key=lambda info: PurePosixPath(info["name"]).parts)]

    def _is_wanted(self, name: str, source: SourceConfig) -> bool:
        folders = PurePosixPath(name).parts[len(PurePosixPath(self.path).parts) : -1]
        return _wanted(name, source.suffixes) and not set(folders) & set(source.exclude)


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
    return fsspec.open(path, "rb").open() if is_url(path) else open(path, "rb")


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
