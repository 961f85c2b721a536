"""`longpitch report`: one page that needs nothing else and holds what metrics.jsonl does."""

import json
import re
from html.parser import HTMLParser

import pytest

from launch.report import draw_losses
from launch.report_page import write_page
from recipes.errors import UserError


def write_run(folder, name: str, *, gates: bool = False, steps: int = 5000):
    run = folder / name
    (run / "checkpoints" / "step_7").mkdir(parents=True)
    (run / "checkpoints" / "step_7" / "complete.json").write_text('{"files": [{"gone": 3}]}')
    (run / "recipe.yaml").write_text("run_dir: a <b> & c\n")
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": 8 / step if step != 3 else None, "lr": 1e-3, "grad_norm": 1.0 / step,
                      "tokens": step * 4096, "tokens_per_second": 1e4 + step, "mfu": None,
                      "memory_gib": 71.25}  # fmt: skip
            if gates:
                record |= {"open_fraction": [0.5, 0.25], "aux": 0.125}
            if step == steps:
                record["heldout_loss"] = 1.5
            file.write(json.dumps(record) + "\n")
    return run


class Balanced(HTMLParser):
    """Fails where tags do not close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_holds_everything_and_needs_nothing(tmp_path):
    out = tmp_path / "deep" / "page.html"
    write_page([write_run(tmp_path, "plain"), write_run(tmp_path, "l2a", gates=True)], out)
    page = out.read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    # pictures refer to their own parts or carry their data
    assert all(link.startswith(("#", "data:")) for link in parser.links)
    assert "20,480,000" in page and "<td>1.5000</td>" in page and "71.2 GiB" in page
    for title in (
        "Loss",
        "Gradient norm",
        "Learning rate",
        "Speed",
        "Peak memory",
        "Penalty of open gates",
        "Gates of l2a",
    ):
        assert title in page
    assert "Model FLOP utilisation</" not in page and "Gates of plain" not in page  # neither was measured
    assert "a &lt;b&gt; &amp; c" in page and "its gone is missing" in page
    assert "currentColor" in page and "#0b0b0c" not in page
    assert len(page) < 1_000_000


def test_long_run_is_thinned_out_and_its_end_is_there(tmp_path):
    write_page([write_run(tmp_path, "long", steps=50_000)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert len(page) < 1_000_000 and "204,800,000" in page
    assert max(len(path.split()) for path in re.findall(r'd="([^"]*)"', page)) < 10_000


def test_a_run_without_steps_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for write, name in ((write_page, "page.html"), (draw_losses, "loss.png")):
        with pytest.raises(UserError, match="no metrics.jsonl there"):
            write([tmp_path / "empty"], tmp_path / name)
        assert not (tmp_path / name).exists()
