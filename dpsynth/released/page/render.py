"""Jinja templates with autoescape, and how numbers and pictures are spelt on a page.

Names of plans, classes and files are untrusted: every value is escaped by the templates, and the
page's own policy (`Content-Security-Policy`) lets a browser load nothing but `data:` images.
"""

import base64
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dpsynth.accounting.tradeoff import percent_up

HERE = Path(__file__).parent / "templates"


def render(template: str, values: Mapping[str, Any], *, folder: Path | None = None) -> str:
    """The page of a template; `folder` holds templates beside this package's own.

    Raises jinja2's UndefinedError where a template asks for what was not given.
    """
    return _environment(folder).get_template(template).render(values)


@cache
def _environment(folder: Path | None) -> Environment:
    made = Environment(
        loader=FileSystemLoader([HERE] if folder is None else [folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"number": number, "share": share, "at_most": percent_up}
    # A constant of this package, read as it is: the one thing on a page that is not escaped.
    made.globals["style"] = Markup((HERE / "style.css").read_text(encoding="utf-8"))  # noqa: S704
    return made


def png_uri(png: bytes) -> str:
    """A PNG as a `data:` address.

    >>> png_uri(b"PNG")
    'data:image/png;base64,UE5H'
    """
    return "data:image/png;base64," + base64.b64encode(png).decode()


def number(value: object, digits: int = 4) -> str:
    """A value as people read it; a dash for what was not measured.

    >>> number(0.912345), number(1800), number(None), number(93.71891), number(True)
    ('0.9123', '1,800', '–', '93.72', 'yes')
    >>> number(1e-5), number(float("nan")), number(12345.6), number([1, 2.5])
    ('1e-05', '–', '12,346', '1, 2.5')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 10**digits <= abs(value) < 1e9 else f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        return ", ".join(number(item, digits) for item in value) or "none"
    return str(value)


def share(value: float) -> str:
    """A chosen share as a percentage of three figures; bounds are rounded up by `at_most`.

    >>> share(0.5), share(0.01234), share(0.001)
    ('50%', '1.23%', '0.1%')
    """
    return f"{100 * value:.3g}%"
