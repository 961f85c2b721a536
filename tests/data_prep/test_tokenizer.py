"""Tokenizers: exact on real text, the same on every training, one EOS after every document."""

import errno
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from data_prep.fingerprint import tokenizer_hash
from data_prep.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_tokenizer
from recipes.errors import UserError

STDLIB = Path(sysconfig.get_path("stdlib"))
HARD_TEXTS = [
    "",
    " leading",
    "trailing  \n\n",
    "tabs\t\tand\r\nreturns",
    "Ä ö ß 漢字 🙂👩‍👩‍👧",
    "\x00\x7f",
    "e\u0301 \ufeff",
    "  ! 's  's",
]


def real_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((STDLIB / "json").glob("*.py"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    encoder = train_tokenizer(real_texts(), 600)
    encoder.save(folder)
    return encoder, folder


def test_round_trip_through_the_saved_tokenizer(trained):
    encoder, folder = trained
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in real_texts() + HARD_TEXTS:
        (ids,) = encoder.encode([text])
        assert ids[-1] == encoder.eos_id == tokenizer.eos_token_id
        assert tokenizer.decode(ids[:-1]) == text
        assert tokenizer.encode(text, add_special_tokens=False) == ids[:-1].tolist()
    assert encoder.vocab_size == len(tokenizer) == 600
    assert set(tokenizer("text")) == {"input_ids", "attention_mask"}  # what `model.generate(**...)` takes


def test_a_document_cannot_forge_its_end(trained):
    encoder, folder = trained
    text = f"before {END_OF_DOCUMENT} after"
    (ids,) = encoder.encode([text])
    assert (ids == encoder.eos_id).sum() == 1
    assert AutoTokenizer.from_pretrained(folder).decode(ids[:-1]) == text


def test_full_disk_while_saving_is_an_os_error(trained, tmp_path):
    """The library itself would raise a bare Exception, which nobody takes for a full disk."""
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        trained[0].save(tmp_path)
    assert error.value.errno == errno.ENOSPC


def test_training_is_repeatable(trained, tmp_path):
    train_tokenizer(real_texts(), 600).save(tmp_path)
    assert tokenizer_hash(tmp_path) == tokenizer_hash(trained[1])
    train_tokenizer(real_texts()[1:], 600).save(tmp_path)
    assert tokenizer_hash(tmp_path) != tokenizer_hash(trained[1])


def test_share_bounds_what_is_learned_from():
    texts = ["abcabcabc" + "xyzxyzxyz"] * 10
    half, whole = train_tokenizer(texts, 300, share=0.5), train_tokenizer(texts, 300)
    assert len(half.encode(["xyz"])[0]) > len(whole.encode(["xyz"])[0])


def test_vocabulary_sizes():
    with pytest.raises(ValueError, match="257"):
        train_tokenizer(["text"], 256)
    assert train_tokenizer(["aa"], 5000).vocab_size < 5000  # nothing more to learn


def test_loading_what_was_saved(trained):
    encoder, folder = trained
    for path in (folder, folder / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.vocab_size, loaded.eos_id, loaded.dtype) == (600, encoder.eos_id, np.uint16)
        np.testing.assert_array_equal(loaded.encode(real_texts()[:1])[0], encoder.encode(real_texts()[:1])[0])


def test_bare_tokenizer_file(trained, tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes((trained[1] / "tokenizer.json").read_bytes())
    assert load_tokenizer(path).eos_id == trained[0].eos_id


def test_truncation_and_padding_settings_are_not_obeyed(trained, tmp_path):
    content = Tokenizer.from_file(str(trained[1] / "tokenizer.json"))
    content.enable_truncation(4)
    content.enable_padding(length=50)
    content.save(str(tmp_path / "t.json"))
    text = real_texts()[0]
    assert len(load_tokenizer(tmp_path / "t.json").encode([text])[0]) == len(trained[0].encode([text])[0]) > 50


def word_tokenizer(path: Path, size: int, eos: bool) -> None:
    """A tokenizer of `size` words, with or without an end-of-document token."""
    bpe = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    if eos:
        bpe.add_special_tokens(["</s>"])
    bpe.save(str(path))


def test_large_vocabulary_needs_32_bits(tmp_path):
    for size, dtype in ((65_535, np.uint16), (65_536, np.uint32)):
        word_tokenizer(tmp_path / "t.json", size, eos=True)
        encoder = load_tokenizer(tmp_path / "t.json")
        (ids,) = encoder.encode(["w1 w65534"])
        assert encoder.vocab_size == size + 1 and ids.dtype == encoder.dtype == dtype
        assert ids.tolist() == [1, 65_534, size]


def test_tokenizers_that_cannot_be_used(tmp_path):
    word_tokenizer(tmp_path / "t.json", 10, eos=False)
    with pytest.raises(ValueError, match=r"t\.json has no end-of-document token"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(UserError, match=r"absent does not exist; correct data\.tokenizer"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(UserError, match=r"t\.json cannot be read") as error:
        load_tokenizer(tmp_path / "t.json")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_hash_sees_the_end_token(trained, tmp_path):
    before = tokenizer_hash(trained[1])
    trained[0].save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "a"}))
    assert tokenizer_hash(tmp_path) != before


# ---- beginnings


def with_bos(trained, folder: Path, adds: bool) -> Path:
    """The trained tokenizer with a BOS token, which it puts in front of texts or does not."""
    tokenizer = AutoTokenizer.from_pretrained(trained[1])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_bos_only_where_the_tokenizer_or_the_recipe_wants_it(trained, tmp_path, adds, asked):
    encoder = load_tokenizer(with_bos(trained, tmp_path, adds), asked)
    (ids,) = encoder.encode(["text <s>"])
    wanted = adds if asked is None else asked
    bos = AutoTokenizer.from_pretrained(tmp_path).bos_token_id
    assert encoder.bos_id == (bos if wanted else None)
    assert (ids == bos).sum() == wanted and (ids[0] == bos) == wanted and ids[-1] == encoder.eos_id
    assert (trained[0].bos_id, trained[0].encode(["a"])[0][-1]) == (None, encoder.eos_id)


def test_bos_that_is_not_there(trained):
    with pytest.raises(ValueError, match="data.add_bos is true but the tokenizer"):
        load_tokenizer(trained[1], True)


# ---- long documents


def test_long_document_in_pieces_has_the_ids_of_the_whole(trained, monkeypatch):
    """Real text whole and cut; text without line ends, or with only white space at them, is not cut wrongly."""
    text = "".join(path.read_text() for path in sorted(STDLIB.glob("a*.py")))
    encoder = load_tokenizer(trained[1])
    hard = [text, "x" * 60_000, "word " * 15_000, "\n" * 30_000, ("a\n  b\r\n" * 4000) + "\n\n end", "é\n漢" * 15_000]
    whole = [np.array([*encoder._backend.encode(one, add_special_tokens=False).ids, encoder.eos_id]) for one in hard]
    monkeypatch.setattr("data_prep.tokenizer.LONG_TEXT", 8000)
    assert len(list(encoder._cut(text))) > 20
    for got, want in zip(encoder.encode(hard), whole, strict=True):
        np.testing.assert_array_equal(got, want)


# ---- SentencePiece


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def sentencepiece_model(request, tmp_path_factory) -> Path:
    import io

    import sentencepiece

    model = io.BytesIO()
    lines = [line for text in real_texts() for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=500, model_type=request.param,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def test_sentencepiece_ids_are_the_librarys(sentencepiece_model, tmp_path):
    import sentencepiece

    want = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    for path in (sentencepiece_model, sentencepiece_model.parent):
        encoder = load_tokenizer(path)
        texts = real_texts() + HARD_TEXTS + ["a </s> forged"]
        for text, ids in zip(texts, encoder.encode(texts), strict=True):
            assert ids.tolist() == [*want.encode(text), want.eos_id()] and ids.dtype == np.uint16
            assert (ids == want.eos_id()).sum() == 1
    assert (encoder.bos_id, load_tokenizer(path, True).encode(["a"])[0][0]) == (None, want.bos_id())
    encoder.save(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert (saved.eos_token_id, len(saved)) == (want.eos_id(), want.vocab_size())
    for text in real_texts():
        assert saved.decode(encoder.encode([text])[0][:-1]) == text
    before = tokenizer_hash(tmp_path)
    again = load_tokenizer(tmp_path)
    np.testing.assert_array_equal(again.encode(real_texts()[:1])[0], encoder.encode(real_texts()[:1])[0])
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model.read_bytes() + b" ")
    assert tokenizer_hash(tmp_path) != before


def test_damaged_sentencepiece_model(tmp_path):
    (tmp_path / "x.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"x\.model cannot be loaded"):
        load_tokenizer(tmp_path / "x.model")
