"""Pieces of pages: the card's prose as HTML, the attacker's odds, charts, pictures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagekit import Page
from scipy.stats import norm
from spendkit import make_lock, make_slots

from dpsynth.accounting.statistics import ClassMoments
from dpsynth.artifacts.lock import Slot
from dpsynth.released.card_contents import literal
from dpsynth.released.page.chart import bar_chart
from dpsynth.released.page.odds import RATES, odds_of
from dpsynth.released.page.pictures import png_file, shrunk
from dpsynth.released.page.prose import sections

MOMENTS = ClassMoments(0.6, 0.64, 0.48, "class", classes=10, dim=8)


def gaussian(multiplier: float) -> Slot:
    return Slot(1, "moments", "moments", MOMENTS, multiplier)


@pytest.mark.parametrize("multiplier", [0.5, 1.4, 5.0])
def test_odds_are_the_closed_form_of_a_gaussian(multiplier: float) -> None:
    """Dong, Roth and Su 2022: TPR = Phi(Phi^-1(FPR) + 1/sigma), advantage 2 Phi(1/2sigma) - 1."""
    found, mu = odds_of(make_lock(), [gaussian(multiplier)]), 1 / multiplier
    exact = norm.cdf(norm.ppf(RATES) + mu)
    ours = np.array([row.tpr for row in found.rows])
    assert (ours >= exact).all()
    assert ours == pytest.approx(exact, rel=0.02)
    advantage = 2 * norm.cdf(mu / 2) - 1
    assert advantage <= found.advantage <= 1.02 * advantage
    for row in found.rows:
        assert row.even == pytest.approx(row.tpr / (row.tpr + row.fpr), rel=1e-6)
        assert row.rare == pytest.approx(row.tpr / (row.tpr + 99 * row.fpr), rel=1e-6)


def test_epsilon_and_delta_alone_say_less() -> None:
    found = odds_of(make_lock(budget={"epsilon": 3.0}), [gaussian(1.4)])
    assert all(row.alone > row.tpr for row in found.rows)
    assert found.rows[0].alone == pytest.approx(np.exp(3) * 0.001 + 1e-5, rel=1e-6)


def test_nothing_spent_has_no_odds() -> None:
    found = odds_of(make_lock(), [])
    assert found.advantage is None
    assert "Nothing was spent" in found.missing


def test_the_curve_stays_in_its_frame_and_never_falls() -> None:
    chart = odds_of(make_lock(), make_slots()).chart
    assert chart is not None
    points = np.array([tuple(map(float, p.split(","))) for p in chart.curve.split()])
    assert (np.diff(points[:, 0]) >= 0).all()
    assert (np.diff(points[:, 1]) <= 0).all()
    assert points.min(axis=0).tolist() == [chart.left, chart.top]
    assert points[:, 0].max() == chart.right
    assert points[:, 1].max() <= chart.bottom


def test_bars_are_to_scale() -> None:
    chart = bar_chart({"moments": 1.0, "train": 2.0, "odd": float("inf")}, 2.5, 4.0, room=400)
    assert [bar.width for bar in chart.bars] == [100, 200, 400, 250]
    assert chart.limit == chart.left + 400
    assert [bar.total for bar in chart.bars] == [False, False, False, True]


def test_prose_has_captions_scopes_and_indented_rounds() -> None:
    table = "| m | n |\n| --- | --- |\n| all | 1 |\n| - one | 2 |"
    text = f"# T\n\nlead\n\n## A `x`\n\n{table}\n\n## B\n\nb"
    found = sections(text, {"A `x`": ["What it holds"]})
    assert [one.title for one in found] == ["A `x`", "B"]
    page = Page(str(found[0].body))
    assert "What it holds" in page.text
    assert [th["scope"] for th in page.all("th")] == ["col", "col"]
    assert "\u2003one" in page.text
    assert "- one" not in page.text


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_only_text(name: str) -> None:
    """A class name, in a line and in a table: no element, no section, and all of it is shown."""
    text = literal(name)
    markdown = f"## One\n\nClasses: {text}.\n\n| class | n |\n| --- | --- |\n| {text} | 1 |\n"
    (found,) = sections(markdown, {})
    page = Page(str(found.body))
    known = {"p", "div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, _ in page.tags} <= known
    shown = " ".join(name.split()).replace("\0", "\ufffd")
    assert f"Classes: {shown}." in " ".join(page.text.split()) or not shown.isprintable()


@pytest.mark.parametrize(
    "evil",
    [
        "<img src=x onerror=y>",
        "![a](http://b/c.png)",
        "<http://b>",
        "[a](http://b)",
        "[a]: http://b",
        "http://b/c",
        "&lt;script&gt;",
        "```\nx\n```",
    ],
)
def test_markdown_of_the_card_makes_no_link_image_or_html(evil: str) -> None:
    found = sections(f"## One\n\n{evil}\n\n{evil} [a]", {})
    page = Page("".join(str(one.body) for one in found))
    assert {tag for tag, _ in page.tags} <= {"p", "pre", "code"}
    assert not any("href" in a or "src" in a for _, a in page.tags)


def test_large_pictures_shrink_and_small_ones_stay() -> None:
    wide = np.zeros((50, 200, 3), np.uint8)
    assert shrunk(wide).shape == (24, 96, 3)
    grey = np.zeros((300, 300, 1), np.uint8)
    assert shrunk(grey).shape == (96, 96, 1)
    small = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    assert shrunk(small) is small


def test_only_a_png_is_taken_as_one(tmp_path) -> None:
    path = tmp_path / "a.png"
    assert png_file(path) is None
    path.write_text("<svg onload=alert(1)>")
    assert png_file(path) is None
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert png_file(path, 50) is None
    assert str(png_file(path)).startswith("data:image/png;base64,")
    (tmp_path / "link.png").symlink_to(path)
    assert png_file(tmp_path / "link.png") is None
