"""The card of a release in rounds: each round with its noise, each file by name."""

from spendkit import BUDGET, make_plan, make_slots

from dpsynth.artifacts.cells import MOST_LLOYD, NAME, lloyd_name
from dpsynth.artifacts.transcript import Transcript, seal
from dpsynth.planning.release import Cells, Moments
from dpsynth.planning.stages import Stages
from dpsynth.planning.verify import verify
from dpsynth.released.card import build_card
from dpsynth.released.card_contents import FILES


def card_of(moments: Moments, charged: int) -> list[str]:
    plan = make_plan(make_slots(), BUDGET)
    lock = verify(plan.model_copy(update={"stages": Stages(moments=moments)}))
    lines = tuple(
        seal(number, "charge", {"slot": number}, "0" * 64) for number in range(1, charged + 1)
    )
    files = [NAME, lloyd_name(1), lloyd_name(2), "moments.safetensors"]
    return build_card(lock, Transcript(lines, 0), {}, files).splitlines()


def test_each_round_is_a_row_and_a_file() -> None:
    card = card_of(Moments(cells=Cells(most=3, lloyd=2)), charged=4)
    rows = [line for line in card if line.startswith("| ")][2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| moments", "4"],
        ["| - moments", "1"],
        ["| - cells-lloyd-1", "1"],
        ["| - cells-lloyd-2", "1"],
        ["| - cells", "1"],
    ]
    first, one, two, last = (float(row.split(" | ")[2]) for row in rows[1:])
    assert last < first < one == two  # the larger its share, the less noise
    listed = [line for line in card if line.startswith("- `")]
    assert [line.split("`")[1] for line in listed] == [
        "moments.safetensors",
        "cells-lloyd-1.safetensors",
        "cells-lloyd-2.safetensors",
        "cells.safetensors",
    ]


def test_one_release_stays_one_row() -> None:
    rows = [line for line in card_of(Moments(), charged=1) if line.startswith("| ")]
    assert len(rows) == 3


def test_every_round_that_a_plan_may_declare_is_listed() -> None:
    assert {lloyd_name(number) for number in range(1, MOST_LLOYD + 1)} < set(FILES)
