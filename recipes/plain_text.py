"""YAML of a recipe in which keys of text keep what is written: `run_dir: 007` is "007", and `run_dir: no` is "no".

YAML reads such words as numbers and truth values before anybody knows what the key holds; the schema does.
"""

from dataclasses import is_dataclass
from typing import Any, get_args, get_origin

import yaml

TEXT, NOTHING, MERGE = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "merge"))


def quote_text(document: str, kind: Any) -> str:
    """A YAML document that means the same, but for words that a key of text would lose, which are quoted.

    Args:
        kind: what the document holds: a dataclass, list[...], str, ...; of no other type anything is changed.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    root = yaml.compose(document, Loader=yaml.SafeLoader)
    if root is None or not _quote(root, kind):
        return document
    return yaml.serialize(root, Dumper=yaml.SafeDumper, allow_unicode=True, width=2**31)


def kind_of(key: str, section: Any) -> Any:
    """The type of a dotted key, None where the section has no such key."""
    for name in key.split("."):
        field = section.__dataclass_fields__.get(name) if is_dataclass(section) else None
        section = None if field is None else field.type
    return section


def _quote(node: yaml.Node, kind: Any) -> bool:
    """Quote the text under a node; whether there was any to quote."""
    if isinstance(node, yaml.SequenceNode) and get_origin(kind) is list:
        quoted = [_quote(one, get_args(kind)[0]) for one in node.value]
        return any(quoted)
    if isinstance(node, yaml.MappingNode) and is_dataclass(kind):
        quoted = [_quote(value, _kind_under(key, kind)) for key, value in node.value]
        return any(quoted)
    is_text = kind is str or (get_origin(kind) is not list and str in get_args(kind))
    if isinstance(node, yaml.ScalarNode) and is_text and node.style is None and _is_lost(node):
        node.tag, node.style = TEXT, "'"
        return True
    return False


def _kind_under(key: yaml.Node, section: Any) -> Any:
    if key.tag == MERGE:
        return section
    return kind_of(key.value, section) if isinstance(key, yaml.ScalarNode) else None


def _is_lost(node: yaml.ScalarNode) -> bool:
    """Whether a plain word is read as something else than text; a null stays one."""
    if node.tag == NOTHING:
        return False
    try:
        float(node.value)  # omegaconf knows 1e-3 as a number, YAML 1.1 does not
    except ValueError:
        return node.tag != TEXT
    return True
