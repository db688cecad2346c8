"""Titles of contact sheets: each line is drawn, and moves what stands below it."""

import numpy as np
from PIL import Image

from dpsynth.artifacts.sheet import LINE, contact_sheet


def test_a_title_of_several_lines_covers_no_image(tmp_path):
    black = np.zeros((3, 8, 8, 1), np.uint8)
    sheets = []
    for title in ("one line", "one line\na second, longer line than the first one is"):
        path = contact_sheet([("row", black)], tmp_path / "sheet.png", title=title)
        sheets.append(np.asarray(Image.open(path).convert("L")))
    one, two = sheets
    assert two.shape[0] == one.shape[0] + LINE and two.shape[1] > one.shape[1]
    # Below the titles both are the same: images are not drawn over.
    left = np.flatnonzero((one == 0).mean(axis=0) > 0.4)
    assert ((one == 0).sum(axis=0)[left] <= (two == 0).sum(axis=0)[left]).all()
    first = [int(np.flatnonzero((s == 0).sum(axis=1) > 100)[0]) for s in sheets]
    assert first[1] - first[0] == LINE
