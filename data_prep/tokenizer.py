"""Text to token ids: a byte-level BPE trained here, a fast Hugging Face tokenizer, or a SentencePiece model.

Documents are encoded without special tokens, closed by one end-of-document token (EOS) and, where the tokenizer itself
would do so, opened by a beginning (BOS). The literal text of a special token in a document is encoded as text, so a
document cannot forge its own end.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from recipes.errors import UserError
from recipes.files import check_whole, read_json

END_OF_DOCUMENT = "<|endoftext|>"  # of the tokenizer trained here
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")  # looked for in a bare tokenizer.json
MODEL_INPUTS = ["input_ids", "attention_mask"]  # transformers would add token_type_ids, which no model here takes
SMALLEST_VOCABULARY = 257  # every byte and the end of a document
PIECE = 1 << 20  # characters given to the trainer at a time
LONG_TEXT = 1 << 20  # characters; longer documents are encoded in pieces where that changes no id
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust ends its sentence
WORD_END = re.compile(r"\w(?=\s)")  # where tokenizers split anyway
SEARCHED = 1 << 16  # characters in which a place for a cut is looked for
TRIES = 8  # places that are looked at for one cut
CONTEXT = 1 << 12  # characters on either side of a cut that must encode alike with and without it


class Encoder(Protocol):
    """What a preparation needs of a tokenizer.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: the token that closes every document.
        bos_id: the token that opens every document, or None.
        dtype: the smallest unsigned integer that holds every id.
    """

    vocab_size: int
    eos_id: int
    bos_id: int | None
    dtype: np.dtype

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each document, with EOS and BOS."""
        ...

    def save(self, folder: Path) -> None:
        """Write a directory that `AutoTokenizer.from_pretrained` loads."""
        ...


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class TextEncoder:
    """Encodes batches of documents with a Hugging Face fast tokenizer; an Encoder.

    Args:
        add_bos: begin documents with BOS; None does as the tokenizer does by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str, add_bos: bool | None = None) -> None:
        vocabulary = tokenizer.get_vocab()
        if tokenizer.eos_token not in vocabulary:
            raise UserError(f"the tokenizer {name} has no end-of-document token; name eos_token in its config")
        self._tokenizer = tokenizer
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True  # the name says otherwise, but True means: as plain text
        self.eos_id = vocabulary[tokenizer.eos_token]
        self.vocab_size = vocabulary_size(tokenizer)
        self.dtype = _dtype(self.vocab_size)
        self.bos_id = document_bos(tokenizer, name, add_bos)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each document, with EOS and BOS."""
        parts = [list(self._cut(text)) if len(text) > LONG_TEXT else [text] for text in texts]
        encodings = iter(self._encode([part for pieces in parts for part in pieces]))
        head = [] if self.bos_id is None else [np.array([self.bos_id], dtype=self.dtype)]
        tail = [np.array([self.eos_id], dtype=self.dtype)]
        return [np.concatenate([*head, *(next(encodings) for _ in pieces), *tail]) for pieces in parts]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        ids, first = [], 0
        while first < len(texts):  # some at a time: what the library returns is many times the size of the ids
            last, size = first, 0
            while last < len(texts) and (last == first or size + len(texts[last]) <= LONG_TEXT):
                size, last = size + len(texts[last]), last + 1
            encodings = self._backend.encode_batch_fast(texts[first:last], add_special_tokens=False)
            ids += [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
            first = last
        return ids

    def _cut(self, text: str) -> Iterator[str]:
        """Pieces of a long text, which take a bounded amount of memory each and give the same ids as the whole.

        A cut is made behind a word where the surroundings encode alike with and without it.
        """
        start = 0
        while len(text) - start > LONG_TEXT:
            first = start + max(LONG_TEXT // 2, LONG_TEXT - SEARCHED)
            ends = [match.end() for match in WORD_END.finditer(text, first, start + LONG_TEXT)]
            border = next((end for end in ends[: -TRIES - 1 : -1] if self._may_cut(text, start, end)), None)
            if border is None:
                break
            yield text[start:border]
            start = border
        yield text[start:]

    def _may_cut(self, text: str, start: int, border: int) -> bool:
        before, after = text[max(start, border - CONTEXT) : border], text[border : border + CONTEXT]
        whole, left, right = self._encode([before + after, before, after])
        return np.array_equal(whole, np.concatenate([left, right]))

    def save(self, folder: Path) -> None:
        """Write a directory that `AutoTokenizer.from_pretrained` loads."""
        _save(self._tokenizer, folder)


def _save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save; the library's Rust part raises a bare Exception where the disk is full, which becomes an OSError again."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if (found := OS_ERROR.search(str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error


def document_bos(tokenizer: PreTrainedTokenizerFast, name: str, add_bos: bool | None) -> int | None:
    """The token that begins documents, None where nothing does; add_bos of None does as the tokenizer does by itself.

    Raises:
        UserError: the tokenizer called `name` has no such token, and add_bos is true.
    """
    bos: Any = tokenizer.bos_token_id  # transformers declares a string or a list besides
    if add_bos is None:
        add_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
    if add_bos and bos is None:
        raise UserError(f"data.add_bos is true but the tokenizer {name} has no beginning-of-document token")
    return bos if add_bos else None


class SentencePieceEncoder:
    """Encodes batches of documents with a SentencePiece model, by the library itself; an Encoder."""

    def __init__(self, path: Path, add_bos: bool | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        self._path = path
        self._processor = SentencePieceProcessor(model_file=str(path))
        self.eos_id, bos = self._processor.eos_id(), self._processor.bos_id()
        if self.eos_id < 0:
            raise UserError(f"the tokenizer {path} has no end-of-document token; train the model with an eos_id")
        if add_bos and bos < 0:
            raise UserError(f"data.add_bos is true but the tokenizer {path} has no beginning-of-document token")
        self.bos_id = (
            bos if (_config_beside(path).get("add_bos_token", False) if add_bos is None else add_bos) else None
        )
        self.vocab_size = self._processor.vocab_size()
        self.dtype = _dtype(self.vocab_size)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each document, with EOS and BOS."""
        head = [] if self.bos_id is None else [self.bos_id]
        ids = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return [np.array([*head, *one, self.eos_id], dtype=self.dtype) for one in ids]

    def save(self, folder: Path) -> None:
        """Write the model and, for `AutoTokenizer`, the same pieces as a Hugging Face tokenizer.

        The latter decodes exactly; of texts that begin with a space it may encode the first piece differently.
        """
        _save(self.converted(), folder)
        shutil.copyfile(self._path, folder / "tokenizer.model")

    def converted(self) -> PreTrainedTokenizerFast:
        """The same pieces as a Hugging Face tokenizer."""
        return LlamaTokenizerFast(
            vocab_file=str(self._path),
            legacy=False,
            add_prefix_space=True,
            add_bos_token=self.bos_id is not None,
            eos_token=self._processor.id_to_piece(self.eos_id),
            unk_token=self._processor.id_to_piece(self._processor.unk_id()),
            bos_token=self._processor.id_to_piece(max(self._processor.bos_id(), self._processor.unk_id())),
        )


def _config_beside(path: Path) -> dict[str, Any]:
    config = path.parent / "tokenizer_config.json"
    return read_json(config) if config.is_file() else {}


def load_tokenizer(path: str | Path, add_bos: bool | None = None) -> Encoder:
    """A tokenizer directory, a tokenizer.json (with the config beside it, if there is one), or a SentencePiece model.

    Args:
        add_bos: begin documents with BOS; None does as the tokenizer does by itself.

    Raises:
        UserError: it is missing, unusable, or has no end-of-document token.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"the tokenizer {path} does not exist; correct data.tokenizer, or leave it out")
    if (model := _only_model(path)) is not None:
        return _sentencepiece(model, add_bos)
    return TextEncoder(open_tokenizer(path), str(path), add_bos)


def open_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """What text becomes ids with, whichever version of transformers saved it: here, in `generate` and in an export.

    A tokenizer.json is taken as it is where the class that its config names is not known here, and where transformers 5
    wrote it, which keeps there all that classes of version 4 would decide anew, such as a BOS in front.

    Args:
        path: a directory, a tokenizer.json, or a SentencePiece model.

    Raises:
        UserError: it cannot be loaded, or has no fast version.
    """
    path = Path(path).expanduser()
    if (model := _only_model(path)) is not None:
        return _sentencepiece(model, None).converted()
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json" if path.is_dir() else path
    beside = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    try:
        if file.is_file() and (file.name != "tokenizer.json" or not any(one.is_file() for one in beside)):
            return _from_bare_file(file)
        for one in (*beside, folder / "added_tokens.json"):
            if one.is_file():
                read_json(one)
        tokenizer = _from_folder(folder)
    except Exception as error:  # the libraries raise bare Exception for a damaged file
        raise _unloadable(path, error) from error
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer {path} has no fast version; save it with its tokenizer.json")
    return tokenizer


def _unloadable(path: Path, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(f"the tokenizer {path} cannot be loaded ({reason})")


def _only_model(path: Path) -> Path | None:
    """The SentencePiece model that `path` is, or that its folder holds without a tokenizer.json."""
    if path.is_dir():
        model = path / "tokenizer.model"
        return model if model.is_file() and not (path / "tokenizer.json").is_file() else None
    return path if path.suffix == ".model" else None


def _sentencepiece(model: Path, add_bos: bool | None) -> SentencePieceEncoder:
    check_whole(model)
    try:
        return SentencePieceEncoder(model, add_bos)
    except Exception as error:  # the library raises RuntimeError for a damaged file
        raise _unloadable(model, error) from error


def _from_folder(folder: Path) -> PreTrainedTokenizerFast:
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    options: dict[str, Any] = {"local_files_only": True}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):  # as transformers 5 writes what 4 calls additional_special_tokens
        named = config.get("additional_special_tokens") or []
        options |= {"additional_special_tokens": [*named, *extra], "extra_special_tokens": {}}
    if not (folder / "tokenizer.json").is_file() or _needs_its_class(config):
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
    # version 4 would set the spaces in front anew from a key that the config need not have
    splitter = read_json(folder / "tokenizer.json").get("pre_tokenizer") or {}
    options["add_prefix_space"] = splitter.get("add_prefix_space", False)
    log = logging.getLogger("transformers.tokenization_utils_base")
    level = log.level
    log.setLevel(logging.ERROR)  # it would warn of the other class
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
    finally:
        log.setLevel(level)


def _needs_its_class(config: dict[str, Any]) -> bool:
    """Whether a tokenizer's config names a class of version 4 of transformers, and was written by it."""
    name = config.get("tokenizer_class")
    if name is None or "backend" in config:
        return False
    return any(tokenizer_class_from_name(known) is not None for known in (name, f"{name}Fast"))


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1


def _from_bare_file(path: Path) -> PreTrainedTokenizerFast:
    added = {token["content"] for token in read_json(path).get("added_tokens", [])}
    end = next((token for token in KNOWN_ENDS if token in added), None)
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=end, clean_up_tokenization_spaces=False)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, share: float = 1.0) -> TextEncoder:
    """Train a byte-level BPE: every text can be encoded, and decoding gives it back exactly.

    Args:
        texts: read once, piece by piece.
        vocab_size: entries including the end-of-document token; fewer if the text has too few different words.
        share: the part of each text, from its beginning, that is learned from; bounds time and memory.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"data.tokenizer_vocab_size is {vocab_size}; a byte-level BPE needs {SMALLEST_VOCABULARY}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_pieces(texts, share), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,
        model_input_names=MODEL_INPUTS,
    )
    return TextEncoder(tokenizer, "trained here")


def _pieces(texts: Iterable[str], share: float) -> Iterator[str]:
    for text in texts:
        end = max(1, int(len(text) * share))
        for start in range(0, end, PIECE):
            yield text[start : min(start + PIECE, end)]
