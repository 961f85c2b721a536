"""Tokenizers whichever version of transformers saved them: the ids are those of their tokenizer.json, or a refusal."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from data_prep.tokenizer import load_tokenizer, open_tokenizer, vocabulary_size
from recipes.errors import UserError
from recipes.files import LFS_POINTER

TEXTS = ["every word is made of letters", " a space in front", "the end <x> of <s> it"]
# what transformers 5.24 writes beside a tokenizer.json, from which it takes all the rest
VERSION_5 = {
    "backend": "tokenizers",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "extra_special_tokens": ["<x>"],
    "model_max_length": 96,
    "tokenizer_class": "TokenizersBackend",
}


def write(folder: Path, config: dict | None, *, begins: bool = False, spaced: bool = True) -> Path:
    """A small byte-level BPE with `config` beside it; it puts <s>, and a space, in front of texts or does not."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", "</s>", "<x>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXTS[0] * 9], trainer)
    if begins:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="general"),
        pytest.param({"tokenizer_class": "Qwen2Tokenizer"}, id="known"),
        pytest.param({"tokenizer_class": "LlamaTokenizer"}, id="which version 4 would begin with BOS"),
        pytest.param({"tokenizer_class": "ClassOfTheFuture"}, id="unknown"),
        pytest.param({"tokenizer_class": None}, id="none"),
        pytest.param({"tokenizer_class": "ClassOfOneModel", "auto_map": {"AutoTokenizer": ["x.A", None]}}, id="code"),
        pytest.param({"additional_special_tokens": ["<y>"]}, id="both-lists"),
    ],
)
def test_ids_are_those_of_the_file(tmp_path, change, begins, spaced):
    folder = write(tmp_path, VERSION_5 | change, begins=begins, spaced=spaced)
    want = Tokenizer.from_file(str(folder / "tokenizer.json"))
    opened, encoder = open_tokenizer(folder), load_tokenizer(folder)
    for text in TEXTS:
        assert opened.encode(text) == want.encode(text).ids
    assert set(opened.additional_special_tokens) == {"<x>", *change.get("additional_special_tokens", [])}
    assert (encoder.eos_id, encoder.bos_id) == (1, 0 if begins else None)
    (ids,) = encoder.encode([TEXTS[0]])
    assert ids.tolist() == [*want.encode(TEXTS[0]).ids, 1]
    assert encoder.vocab_size == vocabulary_size(opened)
    encoder.save(tmp_path / "shards")  # what a run on its shards opens
    assert open_tokenizer(tmp_path / "shards").encode(TEXTS[1]) == want.encode(TEXTS[1]).ids


def test_class_of_version_4_decides_as_there(tmp_path):
    """Without version 5's mark: Llama's class puts BOS in front, whatever the file says."""
    config = {key: value for key, value in VERSION_5.items() if key not in ("backend", "extra_special_tokens")}
    folder = write(tmp_path, config | {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True})
    assert open_tokenizer(folder).encode("word")[0] == 0 and load_tokenizer(folder).bos_id == 0


def test_file_without_config(tmp_path):
    folder = write(tmp_path, None)
    for path in (folder, folder / "tokenizer.json"):
        assert open_tokenizer(path).eos_token == "</s>" and load_tokenizer(path).eos_id == 1
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<x>"}')
    assert load_tokenizer(folder).eos_id == 2


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty; copy it again"),
        (LFS_POINTER + b"v1\noid sha256:0\nsize 7\n", "is a Git LFS pointer.*git lfs pull"),
        (b"{", "cannot be read"),
        (b"[]", "is not a JSON object"),
        (b"\xff", "cannot be read"),
    ],
)
def test_file_that_is_none_is_named(tmp_path, name, content, match):
    (write(tmp_path, VERSION_5) / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{tmp_path / name} {match}") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_sentencepiece_pointer_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(LFS_POINTER)
    with pytest.raises(UserError, match=r"tokenizer\.model is a Git LFS pointer"):
        load_tokenizer(tmp_path)
