"""Text to token ids: a byte-level BPE trained here, or any fast Hugging Face tokenizer from disk.

Documents are encoded without special tokens and closed by one end-of-document token (EOS). The literal text of a
special token in a document is encoded as text, so a document cannot forge its own end.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"  # of the tokenizer trained here
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")  # looked for in a bare tokenizer.json
SMALLEST_VOCABULARY = 257  # every byte and the end of a document
PIECE = 1 << 20  # characters given to the trainer at a time


class TextEncoder:
    """Encodes batches of documents with a Hugging Face fast tokenizer.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: the token that closes every document.
        dtype: the smallest unsigned integer that holds every id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
        vocabulary = tokenizer.get_vocab()
        if tokenizer.eos_token not in vocabulary:
            raise ValueError(f"the tokenizer {name} has no end-of-document token; name eos_token in its config")
        self._tokenizer = tokenizer
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True  # the name says otherwise, but True means: as plain text
        self.eos_id = vocabulary[tokenizer.eos_token]
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each document, closed by EOS."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.eos_id], dtype=self.dtype) for encoding in encodings]

    def save(self, folder: Path) -> None:
        """Write a directory that `AutoTokenizer.from_pretrained` loads."""
        self._tokenizer.save_pretrained(folder)


def load_tokenizer(path: str | Path) -> TextEncoder:
    """A tokenizer directory, or a tokenizer.json (with the tokenizer_config.json beside it, if there is one).

    Raises:
        FileNotFoundError, ValueError: it is missing, unusable, or has no end-of-document token.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"the tokenizer {path} does not exist; correct data.tokenizer, or leave it out")
    folder = path if path.is_dir() else path.parent
    try:
        if path.is_dir() or (path.name == "tokenizer.json" and (folder / "tokenizer_config.json").is_file()):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        else:
            tokenizer = _from_bare_file(path)
    except Exception as error:  # the libraries raise bare Exception for a damaged file
        raise ValueError(f"the tokenizer {path} cannot be loaded ({str(error).splitlines()[0]})") from error
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {path} has no fast version; save it with its tokenizer.json")
    return TextEncoder(tokenizer, str(path))


def _from_bare_file(path: Path) -> PreTrainedTokenizerFast:
    added = {token["content"] for token in json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])}
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
        raise ValueError(f"data.tokenizer_vocab_size is {vocab_size}; a byte-level BPE needs {SMALLEST_VOCABULARY}")
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
        tokenizer_object=bpe, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False
    )
    return TextEncoder(tokenizer, "trained here")


def _pieces(texts: Iterable[str], share: float) -> Iterator[str]:
    for text in texts:
        end = max(1, int(len(text) * share))
        for start in range(0, end, PIECE):
            yield text[start : min(start + PIECE, end)]
