"""recipes/KEYS.md says of every key what the schema says."""

from dataclasses import fields, is_dataclass
from pathlib import Path

from recipes.reference import SECTIONS, key_table, reference
from recipes.schema import Recipe


def test_the_document_is_up_to_date():
    document = Path(__file__).resolve().parents[2] / "recipes" / "KEYS.md"
    assert document.read_text() == reference(), "run `python -m recipes.reference > recipes/KEYS.md`"


def test_every_section_is_there_and_every_key_says_what_it_is_for():
    nested = {field.type for field in fields(Recipe) if is_dataclass(field.type)}
    assert nested <= set(SECTIONS.values())
    for section in SECTIONS.values():
        rows = key_table(section)[2:]
        own = [field for field in fields(section) if not is_dataclass(field.type)]
        assert len(rows) == len(own)
        silent = [row for row in rows if row.endswith("|  |")]
        assert silent == [], section
