"""The stored masks mark what a model can copy from the very sequence that it reads, and nothing else.

The definition here is of its own: it looks at one stored sequence, as the model does, and knows no documents beyond it.
"""

import json
import shutil

import numpy as np
import pytest
from streaming import LocalDataset

from data_prep.guard import read_manifest
from data_prep.loader import TrainLoader
from data_prep.prep import prepare
from data_prep.recall import MASKS, recall_masks
from data_prep.tokenizer import train_tokenizer
from recipes.schema import DataConfig, SourceConfig

GAP, SPAN, REACH = 512, 4, 64
SEQ_LENGTH = 1200


def marks_of_piece(piece: list[int]) -> tuple[set[int], set[int]]:
    """Positions of a piece whose label recalls something, and those that switch to another source: by brute force."""
    places: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(piece) - SPAN + 1):
        places.setdefault(tuple(piece[i : i + SPAN]), []).append(i)

    def source(i: int) -> int | None:
        """Where the span at i stands once before, far enough back."""
        if not 0 <= i <= len(piece) - SPAN:
            return None
        before = [e for e in places[tuple(piece[i : i + SPAN])] if e < i]
        return before[0] if len(before) == 1 and i - before[0] > GAP else None

    recall, switch, last = set(), set(), None
    for t in range(len(piece) - 1):
        begins, goes_on = source(t + 1), source(t - 3)
        if begins is not None and begins >= 1 and piece[begins - 1] != piece[t]:
            recall.add(t)
            if last is not None and t - last[0] <= REACH and abs(begins - last[1]) > REACH:
                switch.add(t)
            last = (t, begins)
        elif goes_on is not None and piece[goes_on + SPAN] == piece[t + 1]:
            recall.add(t)
    return recall, switch


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents that copy passages from near and far in themselves, some of them several sequences long."""
    folder, rng = tmp_path_factory.mktemp("masks"), np.random.default_rng(5)
    texts = []
    for size in (300, 700, 5200, 900, 2900, 40):
        text = "".join(map(chr, rng.integers(97, 123, size)))
        for _ in range(size // 40):
            begin, length, at = rng.integers(0, size - 30), rng.integers(6, 40), rng.integers(0, size)
            text = text[:at] + text[begin : begin + length] + text[at:]
        texts.append(text)
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(["a"], 300).save(folder / "tokenizer")  # bytes
    return folder


def shards(corpus, name, packing, workers=1):
    data = DataConfig(
        shards=str(corpus / name),
        sources=[SourceConfig(path=str(corpus / "x.jsonl"))],
        tokenizer=str(corpus / "tokenizer"),
        heldout_fraction=0.0,
        packing=packing,
        recall_masks=True,
        prep_workers=workers,
    )
    return prepare(data, seq_length=SEQ_LENGTH, vocab_size=300).folder


@pytest.mark.parametrize("packing", ["concat", "best_fit", "long_first"])
def test_masks_are_those_of_what_one_sequence_holds(corpus, packing):
    folder = shards(corpus, packing, packing)
    dataset = LocalDataset(str(folder / "train"))
    total = dict.fromkeys(MASKS, 0)
    for sample in (dataset[i] for i in range(len(dataset))):
        want: dict[str, set[int]] = {name: set() for name in MASKS}
        first = 0
        for length in sample["doc_lengths"].tolist():
            piece = sample["tokens"][first : first + length].tolist()
            for name, marks in zip(MASKS, marks_of_piece(piece), strict=True):
                want[name] |= {first + t for t in marks}
            first += length
        for name in MASKS:
            got = set(np.flatnonzero(np.unpackbits(sample[name], count=SEQ_LENGTH)).tolist())
            assert got == want[name]
            total[name] += len(got)
    assert total["recall"] > 50 and total["switch"] > 0
    if packing == "concat":  # the test can tell: marks of whole documents, which lie in order there, are others
        eos = read_manifest(folder)["eos_id"]
        assert sum(recall_masks(np.array(one))[0].sum() for one in documents(dataset, eos)) > total["recall"] + 50


def documents(dataset, eos: int) -> list[list[int]]:
    """Token ids of the documents, put together from the pieces where they lie in order."""
    samples = [dataset[i] for i in range(len(dataset))]
    stream = np.concatenate([sample["tokens"][: int(sample["doc_lengths"].sum())] for sample in samples])
    ends = np.flatnonzero(stream == eos) + 1
    return [one.tolist() for one in np.split(stream, ends)[:-1]]


def test_masks_of_another_kind_are_refused_where_they_would_weigh(corpus):
    folder = corpus / "older"
    shutil.copytree(shards(corpus, "concat", "concat"), folder)
    numbers = {"global_batch": 1, "micro_batch": 1, "seed": 0}
    TrainLoader(folder, recall_beta=9.0, **numbers).close()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["settings"]["recall_masks"] = True  # made of whole documents
    (folder / "manifest.json").write_text(json.dumps(manifest))
    TrainLoader(folder, **numbers).close()
    for beta in ("recall_beta", "switch_beta"):
        with pytest.raises(ValueError, match=r"copies from outside their sequence .* prepare the shards anew"):
            TrainLoader(folder, **numbers, **{beta: 9.0})
    with pytest.raises(ValueError, match=r"other settings: recall_masks \(then True, now pieces\)"):
        shards(corpus, "older", "concat")
