"""How much of public images each scale holds, and what a prefix of scales lacks.

`pretrain` measures both on up to 4,096 public images and keeps them in `calibration.json`:
a scale's share of the energy, the squared error a pixel of the exact coefficients up to a scale
(`kept`), of the decoded tokens up to it (`decoded`), and of the mean image (`mean`).
"""

import json
from pathlib import Path
from typing import Any

COLUMNS = ("scale", "tokens", "energy", "error, exact", "error, decoded", "codes in use", "nats")


def facts_of(run: Path) -> dict[str, Any]:
    """What a run's calibration says of its tokens."""
    facts: dict[str, Any] = json.loads((run / "public" / "calibration.json").read_text())["tokens"]
    return facts


def lines(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row a scale, coarse to fine.

    >>> use = {"share": 0.5, "perplexity": 3.0}
    >>> lines({"counts": [4, 12], "energy": [0.9, 0.1], "kept": [0.02, 0.0],
    ...        "decoded": [0.03, 0.01], "use_by_scale": [use, use],
    ...        "losses": {"scales": [1.0, 2.0]}})[1]
    ('1', '12', '0.1000', '0.0000', '0.0100', '50% (3)', '2.00')
    """
    columns = (facts[key] for key in ("counts", "energy", "kept", "decoded", "use_by_scale"))
    rows = zip(*columns, facts["losses"]["scales"], strict=True)
    return [
        (
            str(scale),
            str(count),
            f"{energy:.4f}",
            f"{kept:.4f}",
            f"{decoded:.4f}",
            f"{use['share']:.0%} ({use['perplexity']:.0f})",
            f"{nats:.2f}",
        )
        for scale, (count, energy, kept, decoded, use, nats) in enumerate(rows)
    ]


def show(name: str, run: Path) -> None:
    """Print the table of a run's public images."""
    from dpsynth.console import render, table

    facts = facts_of(run)
    title = f"{name}: public images by scale (error of the mean image {facts['mean']:.4f})"
    render(table(COLUMNS, lines(facts), title=title))
