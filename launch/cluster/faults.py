"""Finds which rank of a failed attempt was the first to fail, and what it said, in the files that torchrun keeps."""

import json
from pathlib import Path

LAST_LINES = 12
WAITED = "waited for it"  # in the sentence of a rank that failed because of another


def first_fault(logs: Path) -> str | None:
    """One sentence that names node, local rank and cause, then that rank's last lines; None where no rank left one."""
    found = sorted(_faults(logs), key=lambda fault: (WAITED in fault[1], fault[0], fault[2]))
    if not found:
        return None
    _, sentence, folder = found[0]
    node = next(part for part in folder.relative_to(logs).parts if part.startswith("node_"))
    head = f"{node.replace('_', ' ')}, local rank {folder.name} failed first: {sentence}"
    lines = _last_lines(folder / "stderr.log")
    return "\n".join([head, f"the last lines of {folder / 'stderr.log'}:", *(f"  {line}" for line in lines)])


def _faults(logs: Path) -> list[tuple[float, str, Path]]:
    """When a rank failed, its sentence, and torchrun's folder of it."""
    found = []
    for path in logs.glob("node_*/*/attempt_*/*/error.json"):
        try:
            said = json.loads(path.read_text())["message"]
            sentence = said if isinstance(said, str) else said["message"]
            found.append((path.stat().st_mtime, sentence, path.parent))
        except (OSError, ValueError, TypeError, KeyError):  # cut off when its rank was killed
            continue
    return found


def _last_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        return []
