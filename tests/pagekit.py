"""A small run with released moments and samples, and a reader of the pages that are made of it."""

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from dpsynth.artifacts.moments import ReleasedMoments, save_moments
from dpsynth.artifacts.spending import calibration_hash, spending
from dpsynth.planning.verify import VerifiedPlan, make_run
from dpsynth.public.pretrain import pretrain
from dpsynth.released.sampling import sample

CODE = 4
EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "![p](http://evil.example/p.png) | [l](javascript:alert(1)) `c` *e*",
    "</title></style>{{ 7*7 }}{% raw %}&lt;b&gt;",
)
"""Class names that would be mark-up, were they not escaped."""
_PLAN = """
name: {name}
budget: {{epsilon: 3.0, delta: 1e-5}}
private:
  source: {{kind: digits}}
  public: {public}
  capacity: 1800
  image: {{height: 8, width: 8}}
  classes: {classes}
  held_out: {{by: hash, fraction: 0.2}}
public:
  - {{kind: letters, count: 200}}
representation: {{kind: pca, code: 4}}
stages:
  moments: {{covariance: class}}
prior: {{steps: 1, batch: 32}}
sampling: {{method: release, count: 36}}
"""


def planned(folder: Path, classes: Sequence[str], *, public: bool = False) -> VerifiedPlan:
    """A planned run; nothing of it is done."""
    names = "[" + ", ".join("'" + name.replace("'", "''") + "'" for name in classes) + "]"
    text = _PLAN.format(name="small", classes=names, public=str(public).lower())
    (folder / "plan.yaml").write_text(text)
    return make_run(folder / "plan.yaml", folder / "run")


def finished(folder: Path, classes: Sequence[str], *, public: bool = False) -> VerifiedPlan:
    """A run with moments made by hand (no private record is read), charged, settled and sampled."""
    verified = planned(folder, classes, public=public)
    pretrain(verified)
    rng, number = np.random.default_rng(0), len(classes)
    means, count = 1.5 * rng.normal(size=(number, CODE)), 300.0
    seconds = count * (0.2 * np.eye(CODE) + np.einsum("yi,yj->yij", means, means))
    moments = ReleasedMoments(
        np.full(number, count), count * means, seconds, 1.0, 1.0, 1.0, 10.0, "class"
    )
    path = verified.run.released / "moments.safetensors"
    mark = calibration_hash(verified.run)
    source = verified.noise_source
    with spending(
        verified.run, verified.lock, calibration_hash=mark, noise_source=source
    ) as spender:
        slot = spender.release_slot("moments")
        spender.charge(slot)
        save_moments(path, moments)
        spender.settle(slot, path)
        spender.close()
    sample(verified)
    return verified


class Page(HTMLParser):
    """A page's elements, attributes and text, as a browser would take them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of all elements of that name."""
        return [attributes for name, attributes in self.tags if name == tag]


SAFE = {
    "html", "head", "meta", "title", "style", "body", "div", "header", "main", "footer", "nav",
    "section", "p", "h1", "h2", "h3", "a", "ul", "ol", "li", "dl", "dt", "dd", "strong", "em",
    "code", "pre", "br", "small", "span", "table", "caption", "thead", "tbody", "tr", "th", "td",
    "figure", "figcaption", "img", "svg", "desc", "line", "text", "polygon", "polyline", "rect",
    "g", "blockquote",
}  # fmt: skip


def require_inert(html: str) -> Page:
    """Fail unless a page loads nothing, runs nothing and leads nowhere."""
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag in SAFE, tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in {"srcset", "action", "background", "poster", "xlink:href"}
            if name == "href":
                assert value and value.startswith("#"), value
            if name == "src":
                assert value and value.startswith("data:image/png;base64,"), value
            if name == "style":
                assert value and value.startswith("--heat: "), value
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert policy and policy.startswith("default-src 'none'; img-src data:")
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        assert str(link["href"]).removeprefix("#") in ids
    assert all("alt" in image for image in page.all("img"))
    assert len(page.all("caption")) == len(page.all("table"))
    return page
