"""A central stage and the training that starts from it: charged, resumed, nothing un-noised."""

import json

import methodkit
import numpy as np
import pytest

from dpsynth.artifacts import spending
from dpsynth.artifacts.central import load_central
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.spending import close_run, read_state
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.artifacts.trained import start_path
from dpsynth.errors import BudgetError, DpsynthError, MissingError, ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.verify import load_verified
from dpsynth.private import central as mechanism
from dpsynth.private import central_stage, dpsgd
from dpsynth.private.central_stage import release_central_images
from dpsynth.private.dpsgd import train
from dpsynth.private.noise import NoiseSource
from dpsynth.released.sampling import sample
from dpsynth.released.warm import warm_start

STAGES = """\
stages:
  central: {images: 4, rate: 0.5, spares: 1, warm_up: {steps: 4, batch: 8}}
  train: {rate: 0.5, steps: 4, chunk: 2, parameters: last, ema: 0.0}
sampling: {method: flow, count: 20, steps: 2}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("central")
    methodkit.prepared(folder, STAGES)
    return folder


@pytest.fixture
def run(prepared, tmp_path):
    return methodkit.copied(prepared, tmp_path / "run")


@pytest.fixture
def exact(monkeypatch):
    """The exact sums over the subsets, as the mechanism had them in memory."""
    seen, inner = [], mechanism.subset_sums

    def subset_sums(chunks, slot, noise):
        sums, bits = inner(chunks, slot, noise)
        seen.append((np.array(sums, np.float64), bits))
        return sums, bits

    monkeypatch.setattr(mechanism, "subset_sums", subset_sums)
    return seen


def central_of(run):
    return load_central(run.run.released / "central.safetensors")


def test_records_are_read_after_the_charge_which_pays_for_all_steps(run, capsys):
    found, seen = methodkit.watched(run, release_central_images)
    assert set(seen) == {("charge", "central")}
    assert (found["slots"], found["images"], found["classes"]) == (["central"], 4, 3)
    assert capsys.readouterr().err.splitlines() == [
        "releasing central images ...",
        "releasing central images: done",
    ]
    slot = run.lock.slots[0]
    assert (slot.rate, slot.steps) == (0.5, 4)
    central = central_of(run)
    assert central.divisor == pytest.approx(0.5 * 100 / 3), "declared numbers alone"
    assert central.std == pytest.approx(slot.noise_std * central.radius, rel=1e-6)
    with pytest.raises(BudgetError, match="only once"):
        release_central_images(run)


@pytest.mark.parametrize(
    ("point", "settled", "lost"),
    [
        ("charge:before", 0, 0),
        ("charge:written", 0, 1),
        ("mechanism:done", 0, 1),
        ("settle:before", 0, 1),
        ("settle:written", 1, 0),
    ],
)
def test_a_crash_forfeits_the_release_and_its_spare_pays(run, monkeypatch, point, settled, lost):
    with monkeypatch.context() as patched:
        methodkit.crashing(patched, point, spending, central_stage)
        with pytest.raises(methodkit.Crash):
            release_central_images(run)
    assert methodkit.counts(run) == (settled, lost)
    again = load_verified(run.run.root)
    if settled:
        with pytest.raises(BudgetError, match="only once"):
            release_central_images(again)
    else:
        if point == "settle:before":  # a file that nothing settled starts no training
            with pytest.raises(ReplayError, match="never settled"):
                warm_start(again)
        name = "central-spare-1" if lost else "central"
        assert release_central_images(again)["slots"] == [name]
    assert methodkit.counts(run) == (1, lost)
    assert replay(run.run.root, partial=True).epsilon <= 3.0
    warm_start(again)


def test_exact_sums_and_coins_are_in_no_file_and_in_no_word(run, exact, monkeypatch, capsys):
    thrown, inner = [], NoiseSource.coins

    def coins(self, count, rate):
        thrown.append(inner(self, count, rate))
        return thrown[-1]

    monkeypatch.setattr(NoiseSource, "coins", coins)
    told = json.dumps(release_central_images(run))
    warm_start(run)
    ((sums, bits),) = exact
    assert bits == 0
    whole = sums.astype(np.int64)
    for subset in whole:
        assert not methodkit.holds(run.run.root, subset[:2])
    radius = central_of(run).radius
    assert not methodkit.holds(run.run.root, whole[0, :2] * radius / 2**16)
    shown = capsys.readouterr()
    counts = {str(int(coin.sum())) for coin in thrown if len(coin)}
    assert not counts & set((told + shown.out + shown.err).split())
    leak = run.run.curator / "leak"
    leak.write_bytes(whole[0, :2].tobytes())
    assert methodkit.holds(run.run.root, whole[0, :2]) == [leak], "a leak would have been seen"


def test_each_subset_has_coins_and_noise_of_its_own(prepared, tmp_path, exact):
    noises = []
    for name in ("one", "two"):
        run = methodkit.copied(prepared, tmp_path / name)
        release_central_images(run)
        central, (sums, _) = central_of(run), exact[-1]
        noises.append((central.sums - sums * central.radius / 2**16) / central.std)
    subsets = [*exact[0][0], *exact[1][0]]
    assert len({one.tobytes() for one in subsets}) == 8
    numbers = np.concatenate([one.reshape(-1) for one in noises])
    assert len(np.unique(numbers)) == len(numbers)
    assert 0.6 < numbers.std() < 1.5
    assert not exact[0][0][:, 2].any(), "the class without records is noise alone"
    assert np.abs(noises[0][:, 2]).min() > 0


def test_a_unit_throws_one_coin_for_all_its_images(tmp_path, exact, monkeypatch):
    run = methodkit.prepared(tmp_path, STAGES, unit=5)
    asked, inner = [], NoiseSource.coins

    def coins(self, count, rate):
        asked.append(count)
        return inner(self, count, rate)

    monkeypatch.setattr(NoiseSource, "coins", coins)
    release_central_images(run)
    units = max(asked)
    assert units <= 10, "patients, not their fifty images"
    assert sum(count == units for count in asked) == 4, "one for each subset"
    ((sums, bits),) = exact
    norms = np.sqrt(np.square(sums / 2.0 ** (16 + bits)).sum(axis=(1, 2)))
    assert (norms <= units).all()


def test_training_starts_from_the_central_images_and_so_does_its_end(run, monkeypatch):
    with pytest.raises(MissingError, match="the central images come first"):
        train(run)
    release_central_images(run)
    with pytest.raises(MissingError, match=r"warm\.safetensors") as refused:
        train(run)
    assert refused.value.hint.startswith("dpsynth train")
    told, seen = methodkit.watched(run, warm_start)
    assert seen == [], "post-processing opens no private file"
    assert told == {**warm_start(run)}, "made once"
    warm, facts = load_tensors(start_path(run.run, run.lock))
    assert facts["central_sha256"] == sha256_file(run.run.released / "central.safetensors")
    prior, _ = load_tensors(run.run.public / "prior.safetensors")
    moved = [name for name in warm if not np.array_equal(warm[name], prior[name])]
    assert moved
    with monkeypatch.context() as patched:
        methodkit.crashing(patched, "settle:written", spending, dpsgd)
        with pytest.raises(methodkit.Crash):
            train(run)
    close_run(run.run, run.lock)  # without torch: the model is made of the settled steps
    model, _ = load_tensors(run.run.released / "model.safetensors")
    kept = [name for name in model if np.array_equal(model[name], warm[name])]
    assert set(model) == set(warm)
    assert set(moved) & set(kept), "what stayed is the warm start's, not the prior's"
    assert any(name not in kept for name in model), "and the last layer has moved"
    assert methodkit.watched(run, sample)[1] == []
    assert replay(run.run.released).ok
    assert read_state(run.run, run.lock).closed


def test_another_central_file_is_not_learned(run):
    release_central_images(run)
    path = run.run.released / "central.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ReplayError, match="not what the transcript settled"):
        warm_start(run)


def test_unchecked_records_are_not_read(run):
    (run.run.curator / "check.json").unlink()
    with pytest.raises(DpsynthError, match="check"):
        release_central_images(run)
    assert methodkit.counts(run) == (0, 0)
