"""Every key of a recipe as a Markdown table, made from the schema: `python -m recipes.reference > recipes/KEYS.md`."""

import ast
import inspect

from recipes import schema

# section of a recipe -> the dataclass that holds its keys
SECTIONS = {
    "(top)": schema.Recipe,
    "model": schema.ModelConfig,
    "model.attention": schema.AttentionConfig,
    "parallel": schema.ParallelConfig,
    "data": schema.DataConfig,
    "data.sources[]": schema.SourceConfig,
    "data.mixture[]": schema.MixtureConfig,
    "data.streams[]": schema.StreamConfig,
    "train": schema.TrainConfig,
    "checkpoint": schema.CheckpointConfig,
}


def key_table(section: type) -> list[str]:
    """One row for each key of a dataclass: its name, type, default, and the comment behind or under it."""
    lines = inspect.getsource(section).splitlines()
    definition = ast.parse("\n".join(lines)).body[0]
    assert isinstance(definition, ast.ClassDef)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in definition.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        default = ast.unparse(field.value) if field.value else ""
        if default.startswith("field(default_factory="):
            factory = default.removeprefix("field(default_factory=").removesuffix(")")
            default = {"list": "[]"}.get(factory, factory.removeprefix("lambda: "))
        if default.endswith("Config"):
            continue  # a section with a table of its own
        default = "(must be given)" if default == "MISSING" else f"`{default}`"
        meaning = _comment(lines, field.end_lineno or field.lineno)
        row = (f"`{ast.unparse(field.target)}`", f"`{ast.unparse(field.annotation)}`", default, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return rows


def _comment(lines: list[str], last: int) -> str:
    """The comment behind line `last` (from 1), or the one that begins under it."""
    _, _, comment = lines[last - 1].partition("  # ")
    if comment:
        return comment.strip()
    under = []
    for line in lines[last:]:
        if not line.strip().startswith("# "):
            break
        under.append(line.strip().removeprefix("# "))
    return " ".join(under)


def reference() -> str:
    """The whole document."""
    parts = [
        "# Every key of a recipe",
        "Made by `python -m recipes.reference > recipes/KEYS.md` from `schema.py`, where each default stands once; "
        "a test keeps the two alike.",
    ]
    for name, section in SECTIONS.items():
        parts += [f"## {name}", (section.__doc__ or "").split("\n")[0], "\n".join(key_table(section))]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - what the module is run for
