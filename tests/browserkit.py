"""A page in headless Chromium, where there is one: does it fit, and do its pictures decode?"""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The page stands in a frame of each width; the frame's own policy holds inside it alone. All is
# said when the frame has loaded, which the dump waits for.
_HARNESS = """<!doctype html><meta charset="utf-8">
<style>iframe {{ border: 0; height: 900px }}</style>
<pre id="found"></pre>
<script>
function look(frame) {{
  const inside = frame.contentDocument, root = inside.documentElement;
  const images = [...inside.images];
  const wide = [...inside.querySelectorAll("body *")].filter(element =>
    !element.closest(".scroll") && element.getBoundingClientRect().right > root.clientWidth + 1);
  document.getElementById("found").textContent = JSON.stringify({{
    width: root.clientWidth, needed: root.scrollWidth, images: images.length,
    broken: images.filter(image => !image.complete || !image.naturalWidth).length,
    wide: wide.map(element => element.tagName + "." + element.className),
    headings: [...inside.querySelectorAll("h1,h2,h3")].map(heading => +heading.tagName[1]),
    scripts: inside.scripts.length,
  }});
}}
</script>
<iframe onload="look(this)" width="{width}" srcdoc="{page}"></iframe>
"""


@dataclass(frozen=True)
class Seen:
    """A page at one width, in CSS pixels. `wide`: elements that reach beyond it."""

    width: int
    needed: int
    images: int
    broken: int
    wide: list[str]
    headings: list[int]
    scripts: int


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install -y --no-install-recommends chromium")
    return found


def look(page: Path, width: int, folder: Path) -> Seen:
    """How Chromium lays `page` out at `width`; `folder`: for the browser's own files."""
    harness = folder / f"harness-{width}.html"
    text = html.escape(page.read_text(encoding="utf-8"))
    harness.write_text(_HARNESS.format(width=width, page=text), encoding="utf-8")
    done = subprocess.run(
        [
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--hide-scrollbars", "--window-size=1400,1000", "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}", harness.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return Seen(**json.loads(html.unescape(found.group(1))))
