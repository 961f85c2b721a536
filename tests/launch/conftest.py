"""Shards that the launch tests train on: real text of this machine (Python's own library), cut short."""

import sysconfig
from pathlib import Path

import pytest

from tests.launch.train_program import RECIPE


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """A prepared folder of shards for tiny.yaml."""
    from data_prep.prep import prepare
    from recipes.load import load_recipe

    folder = tmp_path_factory.mktemp("launch")
    corpus = folder / "corpus"
    corpus.mkdir()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:25]:
        (corpus / f"{source.stem}.txt").write_text(source.read_text()[:12000])
    recipe = load_recipe(RECIPE, [f"data.shards={folder / 'shards'}", f"data.sources=[{{path: {corpus}}}]"])
    return prepare(recipe.data, seq_length=80, vocab_size=320).folder
