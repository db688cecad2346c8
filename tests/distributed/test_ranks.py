"""Several processes: what they exchange is exact, and they end together."""

import pytest
from rankkit import Starter

from dpsynth.distributed.environment import place_in, threads_for
from dpsynth.errors import UsageError

WORLDS = (1, 2, 3)
WHOLE = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module")
def start():
    with Starter() as starter:
        yield starter


@pytest.fixture(scope="module")
def exchanges(start):
    return {world: start("exchange", world) for world in WORLDS}


def main_of(run):
    assert set(run["codes"]) == {0}, run["err"]
    return run["answers"][0]


def test_sums_are_the_same_bits_on_any_number_of_processes(exchanges):
    alone = main_of(exchanges[1])
    for world in (2, 3):
        found = main_of(exchanges[world])
        assert found["total"] == alone["total"]
        assert found["integers"] == alone["integers"]
    total = sum((-1) ** number * ((number + 1) * 2**80 + number) for number in range(13))
    assert alone["integers"] == [[[2], [total, -78]], [[2, 0], []]]


def test_every_process_gets_the_main_ones_bits(exchanges):
    for world, run in exchanges.items():
        for answer in run["answers"]:
            assert answer["everywhere"] == main_of(run)["total"]
            assert answer["told"] == {"slot": 3, "text": "é"}
            assert answer["bytes"] == (bytes(range(256)) * 9).hex()
            assert answer["nothing"] == ""
        assert [a["total"] for a in run["answers"][1:]] == [{}] * (world - 1)
        assert [a["integers"] for a in run["answers"][1:]] == [[]] * (world - 1)
        assert [a["led"] for a in run["answers"]] == ["done"] + [None] * (world - 1)


def test_shards_hold_each_unit_once(exchanges):
    for run in exchanges.values():
        held = [number for answer in run["answers"] for number in answer["mine"]]
        assert sorted(held) == list(range(13))
        assert sorted(main_of(run)["joined"][0]) == list(range(13))


def test_gathering_keeps_the_order_of_ranks_and_lengths(exchanges):
    assert main_of(exchanges[3])["gathered"] == ["", "01", "0202"]
    assert exchanges[3]["answers"][1]["gathered"] == []


def test_the_main_process_alone_speaks(start):
    run = start("speak", 2)
    assert run["codes"] == [0, 0]
    assert run["out"] == ["rank: 0\n", ""]
    assert run["err"] == ["note of 0\n", ""]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_process_ends_the_others_with_one_message(start, victim):
    run = start("dies", 3, victim=victim, whole_exit=True)
    assert run["codes"].pop(victim) == -9
    assert run["codes"] == [8, 8]
    text = "".join(run["err"])
    assert "Traceback" not in text
    assert "one of the 3 processes ended" in text
    assert "torchrun command again" in text
    # Without torchrun's own store, the word of who spoke is gone with process 0.
    assert 1 <= text.count("error:") <= 2


def test_a_death_is_seen_by_those_that_wait_for_the_main_process(start):
    run = start("dies_while_the_main_one_works", 3, victim=2)
    assert run["codes"] == [8, 8, -9]
    assert "one of the 3 processes ended" in run["err"][0]


def test_a_process_that_hangs_is_waited_for_as_long_as_declared(start):
    run = start("stops", 2, joined={"patience": 0.6}, victim=1)
    assert run["codes"] == [8, 8]
    assert "did not come within 0.6 s" in run["err"][0]


def test_a_process_that_never_starts_is_said_to_be_missing(start):
    run = start("exchange", 2, started=1, joined={"meeting": 1.0})
    assert run["codes"] == [8]
    assert "did not meet the other 1" in run["err"][0]
    assert "torchrun" in run["err"][0]


def test_sigterm_ends_all_with_one_message(start):
    run = start("is_terminated", 3, victim=1)
    assert run["codes"] == [8, 8, 8]
    text = "".join(run["err"])
    assert "Traceback" not in text
    assert text.count("error:") >= 1


@pytest.mark.parametrize(
    ("scenario", "code", "message"),
    [("fails", 5, "the records are damaged"), ("crashes", 1, "internal error: ZeroDivisionError")],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_one_process_is_said_by_it_alone(start, scenario, code, message, victim):
    run = start(scenario, 3, victim=victim)
    assert run["codes"][victim] == code
    assert message in run["err"][victim]
    others = {1: 8}.get(code, code)  # an internal error has no code of ours
    mates = [c for rank, c in enumerate(run["codes"]) if rank != victim]
    quiet = [text for rank, text in enumerate(run["err"]) if rank != victim]
    if victim == 1:  # the store is still there
        assert mates == [others, others]
        assert quiet == ["", ""]
    else:
        assert set(mates) <= {others, 8}
    assert "Traceback" not in "".join(run["err"])


def test_what_the_main_process_refuses_is_refused_for_all(start):
    run = start("leads_to_failure", 3)
    assert run["codes"] == [3, 3, 3]
    assert run["err"] == ["error: released already\ntry: plan again\n", "", ""]


def test_processes_that_hold_other_values_do_not_go_on(start):
    run = start("differs", 3)
    assert run["codes"] == [8, 8, 8]
    assert "differ in the seed of the world" in run["err"][0]
    assert run["err"][1:] == ["", ""]


def test_processes_that_read_other_records_do_not_go_on(start):
    run = start("reads_other_records", 2)
    assert run["codes"] == [8, 8]
    assert "private records" in run["err"][0]


@pytest.mark.parametrize("scenario", ["sums_too_much", "sums_no_number"])
def test_a_sum_that_would_not_be_exact_is_refused(start, scenario):
    run = start(scenario, 2)
    assert run["codes"] == [2, 2]
    assert "too large to be exact" in run["err"][1]


def test_the_environment_names_the_place():
    assert place_in({}) is None
    assert place_in({"RANK": ""}) is None
    place = place_in(WHOLE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (place.rank, place.world, place.port) == (1, 3, 29500)
    assert not place.is_main


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_half_set_environment_is_refused(name):
    half = {key: value for key, value in WHOLE.items() if key != name}
    with pytest.raises(UsageError, match=f"but not {name}") as found:
        place_in(half)
    assert "torchrun" in found.value.hint
    assert "unset" in found.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "3"},
        {"RANK": "-1"},
        {"RANK": "x"},
        {"WORLD_SIZE": "0"},
        {"MASTER_PORT": "70000"},
        {"LOCAL_RANK": "5"},
        {"LOCAL_WORLD_SIZE": "4"},
    ],
)
def test_an_impossible_environment_is_refused(change):
    with pytest.raises(UsageError) as found:
        place_in(WHOLE | change)
    assert "torchrun" in found.value.hint


def test_threads_are_shared_out_unless_something_says_otherwise():
    assert threads_for({}, 8) is None
    assert threads_for({"LOCAL_WORLD_SIZE": "3"}, 8) == 2
    assert threads_for({"LOCAL_WORLD_SIZE": "16"}, 8) == 1
    assert threads_for({"LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}, 8) is None
