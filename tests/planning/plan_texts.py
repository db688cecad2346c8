"""Small plans as text, for tests of planning and of the commands."""

SMALL = """\
version: 1
name: small

budget:
  epsilon: 2.0
  delta: 1e-5

private:
  source: {kind: npz, path: secret-records.npz}
  capacity: 1000
  image: {height: 8, width: 8}
  classes: [a, b]
  held_out: {by: hash, fraction: 0.2}

public:
  - {kind: letters, count: 200}

representation: {kind: pca, code: 4}

stages:
  moments: {covariance: class}

sampling: {method: release, count: 20}
"""

TRAINED = (
    SMALL.replace(
        "  moments: {covariance: class}\n",
        "  moments: {weight: 0.2}\n"
        "  train: {weight: 0.65, rate: 0.05, steps: 30, chunk: 20, clip: 0.5}\n",
    )
    + "distillation: {steps: 10}\n"
)


def changed(old: str, new: str, text: str = SMALL) -> str:
    """`text` with one occurrence of `old` replaced; fails when there is none."""
    assert old in text, old
    return text.replace(old, new, 1)


def celled(cells: str = "most: 3, lloyd: 2", *, spares: int = 0) -> str:
    """`SMALL` with a cell release, of these settings."""
    moments = f"{{covariance: class, cells: {{{cells}}}, spares: {spares}}}"
    return changed("{covariance: class}", moments)


TOKENS = (
    changed("{kind: pca, code: 4}", "{kind: tokens}")
    .replace("  moments: {covariance: class}\n", "  train: {rate: 0.05, steps: 30, chunk: 20}\n")
    .replace("{method: release, count: 20}", "{method: tokens, count: 20}")
    + "tokens: {wavelet: haar, levels: 1, tokenizer: {patches: [2, 2]}}\n"
)
"""A plan whose training learns 4 tokens of LL0, of 16; the other 12 come from public data."""
