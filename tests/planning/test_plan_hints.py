"""Mistakes between keys and bare words: the line to blame, and what to type."""

from pathlib import Path

import pytest
from clikit import dpsynth
from plan_texts import SMALL, TRAINED, changed

from dpsynth.errors import PlanError
from dpsynth.planning.yaml_plan import parse_plan

SPREAD = """\
version: 1
name: spread
budget:
  epsilon: 2.0
  delta: 1e-5
  unit:
    column: patient
    most: 3
private:
  source:
    kind: npz
    path: secret-records.npz
  capacity: 1000
  image: {height: 8, width: 8}
  classes: [a, b]
  held_out: {by: hash, fraction: 0.2}
public:
  - kind: letters
representation:
  kind: pca
  code: 4
stages:
  moments:
    covariance: class
  train:
    rate: 0.05
    steps: 30
    optimizer: {kind: adam}
    schedule:
      kind: cosine
      warmup: 3
sampling:
  method: release
"""

# old, new, part of the message, the hint; the message names the line of `new`'s last line.
HINTS = [
    (
        "optimizer: {kind: adam}",
        "optimizer: adamw",
        'got "adamw"',
        "write `optimizer: {kind: adamw}`",
    ),
    (
        "optimizer: {kind: adam}",
        "optimizer: adamww",
        'got "adamww"',
        "write `optimizer: {kind: adamw}`",
    ),
    ("optimizer: {kind: adam}", "optimizer: {kind: sdg}", 'got "sdg"', "did you mean `kind: sgd`?"),
    (
        "    schedule:\n      kind: cosine\n      warmup: 3",
        "    schedule: cosine",
        'got "cosine"',
        "write `schedule: {kind: cosine}`",
    ),
    ("      kind: cosine", "      kind: cosin", 'got "cosin"', "did you mean `kind: cosine`?"),
    ("  kind: pca\n  code: 4", "  kind: token", 'got "token"', "did you mean `kind: tokens`?"),
    ("  kind: pca", "  kind: autoencodr", 'got "autoencodr"', "did you mean `kind: autoencoder`?"),
    (
        "representation:\n  kind: pca\n  code: 4",
        "representation: pca",
        'got "pca"',
        "write `representation: {kind: pca, code: ...}`",
    ),
    (
        "  - kind: letters",
        "  - letters",
        'got "letters"',
        "write `{kind: letters}` in the list `public`",
    ),
    (
        "{by: hash, fraction: 0.2}",
        "hash",
        'got "hash"',
        "write `held_out: {by: hash, fraction: ...}`",
    ),
    ("optimizer: {kind: adam}", "optimizer: lion", 'got "lion"', "write `optimizer: `, a section"),
    # Keys that do not fit together: the line of the one to blame.
    (
        "      warmup: 3",
        "      warmup: 30",
        "must end before the last step, and steps is 30",
        "change",
    ),
    ("  code: 4", "  code: 65", "PCA of 64 pixels", "write `code: 64` or less"),
    (
        "  kind: pca\n  code: 4",
        "  kind: pixels\n  code: 65",
        "kind: pixels has 64 numbers",
        "without `code`",
    ),
    (
        "    column: patient",
        "    column: label",
        "says what an image shows",
        "unit: {column: patient, most: 8}",
    ),
    ("    column: patient", "    column: labels", "says what an image shows", "`unit: record`"),
    ("    column: patient", "    column: images", "says what an image shows", "`unit: record`"),
    ("  classes: [a, b]", "  classes: [a, a]", "class names must be distinct", "change"),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), HINTS, ids=[h[1] for h in HINTS])
def test_the_line_to_blame_and_what_to_type(old: str, new: str, message: str, hint: str) -> None:
    text = changed(old, new, SPREAD)
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert message in caught.value.message
    assert hint in caught.value.hint
    line = text[: text.index(new) + len(new)].count("\n") + 1
    assert caught.value.message.startswith(f"plan.yaml:{line}: "), caught.value.message


def test_the_plan_that_the_mistakes_are_made_in_is_sound() -> None:
    assert parse_plan(SPREAD).name == "spread"
    assert parse_plan(changed("  code: 4", "  code: 64", SPREAD)).representation.code == 64


@pytest.mark.parametrize(
    ("text", "part", "message"),
    [
        (
            changed("kind: npz", "kind: idx", SPREAD).replace(
                "    path: secret-records.npz", "    images: i\n    labels: l"
            ),
            "  unit:",
            "has none",
        ),
        (
            changed("  moments:\n    covariance: class\n", "", SPREAD),
            "  method:",
            "needs stages.moments",
        ),
        (
            changed("  moments:\n    covariance: class\n", "", SPREAD).replace(
                "sampling:\n  method: release\n", ""
            ),
            "stages:",
            "needs stages.moments",
        ),
        (
            changed(
                "covariance: class",
                "covariance: class\n    cells: {}\n    sensitivity: paper",
                SPREAD,
            ),
            "  moments:",
            "sensitivity: paper needs covariance: shared",
        ),
        (
            changed("  moments: {weight: 0.2}\n", "", TRAINED).replace(
                "method: release", "method: flow"
            ),
            "distillation:",
            "distillation needs stages.moments",
        ),
    ],
    ids=["unit of idx", "sampling", "no sampling", "moments", "distillation"],
)
def test_sections_that_do_not_fit_are_shown_at_their_line(
    text: str, part: str, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert message in caught.value.message
    line = next(i for i, shown in enumerate(text.splitlines(), 1) if shown.startswith(part))
    assert caught.value.message.startswith(f"plan.yaml:{line}: "), caught.value.message


def test_a_class_column_of_a_folder_is_refused_and_another_is_not() -> None:
    folder = changed("kind: npz", "kind: folder").replace(
        "epsilon: 2.0", "epsilon: 2.0\n  unit: {U}"
    )
    with pytest.raises(PlanError, match=r"column is label"):
        parse_plan(folder.replace("{U}", "{column: label, most: 4}"))
    assert parse_plan(folder.replace("{U}", "{column: labels, most: 4}")).budget.column is not None


def test_plan_refuses_them_with_exit_2_and_makes_no_run(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(changed("code: 4", "code: 65", SMALL))
    done = dpsynth(tmp_path, "plan")
    assert done.returncode == 2
    assert "try: write `code: 64` or less" in done.stderr
    assert not (tmp_path / "runs").exists()
