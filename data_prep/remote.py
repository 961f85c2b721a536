"""Reach files at a URL through fsspec: one sentence for a package that is missing, or for whatever the far end says."""

import contextlib
from collections.abc import Iterator
from typing import Any

from fsspec.core import url_to_fs

from data_prep.guard import DataError
from recipes.errors import UserError


def is_url(path: str) -> bool:
    """Whether fsspec, not the operating system, opens this path."""
    return "://" in path


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        UserError: no such protocol is known, its package is not installed (with the line that installs it), or it
            cannot be set up.
    """
    try:
        return url_to_fs(url)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        scheme = url.partition("://")[0]
        package = (cause.name or scheme).partition(".")[0]
        raise UserError(
            f"{url} cannot be opened: {scheme}:// needs the package {package}; `pip install {package}`"
        ) from error
    except Exception as error:  # every protocol's package has errors of its own
        raise UserError(f"{url} cannot be opened ({words(error)})") from error


@contextlib.contextmanager
def named_errors(what: str, way_out: str = "") -> Iterator[None]:
    """Turn whatever fails inside into one DataError: `what`, the reason, the way out."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of credentials, of the network: packages raise what they like
        raise DataError(f"{what} ({words(error)}){way_out and '; '}{way_out}") from error


def words(error: BaseException) -> str:
    """What an error says, in one line; its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
