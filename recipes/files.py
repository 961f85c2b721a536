"""Reads small files that others wrote: what is empty, a stand-in or damaged is named, with the way out."""

import json
from pathlib import Path
from typing import Any

from recipes.errors import UserError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # what a clone without git-lfs holds in place of a file


def check_whole(path: Path) -> None:
    """Raise UserError for a file that is empty or only says where its content lies."""
    with open(path, "rb") as file:
        head = file.read(len(LFS_POINTER))
    if not head:
        raise UserError(f"{path} is empty; copy it again")
    if head == LFS_POINTER:
        raise UserError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` there, or download it")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: it is empty, a Git LFS pointer, unreadable, or something else than an object.
        FileNotFoundError: it is not there.
    """
    try:
        check_whole(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UserError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; copy it again")
    return content
