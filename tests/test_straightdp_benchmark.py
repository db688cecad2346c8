"""`benchmarks.straightdp`: its plans, what runs share, its composed digits, its arithmetic."""

import json
import math
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from dpsynth.models.seeding import generator
from dpsynth.models.text import tokens
from dpsynth.models.velocity import captions_of
from dpsynth.planning.captions import Template
from dpsynth.planning.schema import Plan
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.public.measures import moments_of
from dpsynth.public.profile import profile_recipe
from dpsynth.public.projection import projection_of
from dpsynth.public.representation import Representation
from dpsynth.public.start import uses_plateau
from dpsynth.public.within import uses_within

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it is no part of the package

from benchmarks import mixture
from benchmarks.straightdp import composed, paper, report, rooms, rows, signal, tune
from benchmarks.straightdp.__main__ import TABLES
from benchmarks.straightdp.figures import BY_START
from benchmarks.straightdp.plans import DIGITS, TEMPLATE, plan_of, run_name
from benchmarks.straightdp.runs import Runs
from benchmarks.straightdp.sizes import FULL, SIZES

EVERY = [*rows.every_row().values(), *tune.rows(tune.SPACES), BY_START,
         *rows.sentence_rows("minilm").values()]  # fmt: skip


def plan(row, epsilon=1.0, size="compact"):
    return Plan.model_validate(plan_of(row, epsilon, Path("/work"), size=size))


@pytest.mark.parametrize("size", SIZES)
def test_every_rows_plan_parses_under_a_name_of_its_own(size):
    names = [plan(row, epsilon, size).name for row in EVERY for epsilon in (0.3, 0.5, 1.0, 3.0)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("size", SIZES)
def test_the_backbone_tells_the_captions_of_every_row_apart(size):
    for row in EVERY:
        own = plan(row, size=size)
        text = own.velocity.text
        found = tokens(captions_of(own), text.length, text.vocabulary)
        assert len(found.unique(dim=0)) == own.private.conditions


def test_plans_read_from_the_file_that_a_run_is_given(tmp_path):
    runs = Runs(tmp_path, "tiny")
    file = runs._planned("x", rows.LATENT[3], 0.3)
    assert load_plan(file).facts() == plan(rows.LATENT[3], 0.3, "tiny").facts()


@pytest.mark.parametrize(("name", "row"), [("straightdp", "latent: planned + moments, all t"),
                                           ("pixel", "pixel: planned + moments")])  # fmt: skip
def test_the_shipped_plans_are_rows_of_the_tables(name, row):
    shipped = load_plan(Path(__file__).parents[1] / f"plans/mnist-{name}.yaml").facts()
    own = plan(rows.every_row()[row]).facts()
    keys = ("stages", "velocity", "prior", "distillation", "representation", "split", "budget")
    assert {key: shipped[key] for key in keys} == {key: own[key] for key in keys}


def test_the_full_size_has_the_constants_of_table_9():
    whole = plan(rows.PIXEL[4], size="full")
    assert (whole.velocity.width, whole.velocity.depth, whole.velocity.patch) == (192, 6, 4)
    assert (whole.velocity.text.width, whole.velocity.text.length) == (64, 8)
    assert (whole.velocity.clamp, whole.velocity.late, whole.velocity.spectral) == (16.0, 1, 1.0)
    train, moments = whole.stages.train, whole.stages.moments
    assert (train.rate, train.steps, train.multiplicity) == (0.02, 2000, 4)
    assert (train.learning_rate, train.ema, train.weight) == (5e-5, 0.999, 0.65)
    assert (moments.weight, moments.rank, moments.projection) == (0.2, 32, 64)
    assert (whole.prior.steps, whole.prior.batch) == (20_000, 256)
    assert FULL["latent"].prior[0] == 12_000
    assert whole.distillation.horizon == "knee"


def test_a_row_changes_what_it_names():
    uniform, planned, _, both, constrained = (plan(row) for row in rows.LATENT)
    assert uniform.stages.moments is None
    assert uniform.stages.train.allocation is None
    assert planned.stages.train.allocation is not None
    assert both.distillation is not None
    assert both.split == "epsilon"
    assert constrained.velocity.clamp == 16.0
    assert constrained.stages == both.stages
    guided = plan(rows.every_row()["guided, not distilled"])
    assert (guided.distillation, guided.sampling.method) == (None, "guide")
    bare = plan(rows.TABLE_4["without projection"]).stages.moments
    assert bare.projection is None
    assert bare.captions is not None
    assert plan(rows.every_row()["uniform, the paper's rate"]).stages.train.learning_rate == 5e-5


def test_plans_for_tuning_see_neither_digits_nor_public_letters():
    for row in EVERY:
        if row.data == "letters":
            own = plan(row)
            assert [source.kind for source in own.public] == ["idx"]
            assert "mnist" not in json.dumps(own.private.model_dump(mode="json")).lower()


def test_every_table_has_three_runs_at_epsilon_1_and_one_elsewhere():
    for name in TABLES:
        cells = rows.table(name, full=False)
        assert len({(cell.name, cell.epsilon, cell.number) for cell in cells}) == len(cells)
        for cell in cells:
            count = sum(
                other.name == cell.name and other.epsilon == cell.epsilon for other in cells
            )
            assert count == (cell.row.runs or (3 if cell.epsilon == 1.0 else 1))
    assert {cell.epsilon for cell in rows.table("2", full=False)} == {0.3, 0.5, 1.0, 3.0}
    assert all(cell.number < 3 for cell in rows.table("1", full=True))
    assert len(rows.table("4", full=False, encoder="minilm")) > len(rows.table("4", full=False))


def recipe(own):
    """What decides a public room, as `pretrain` itself has it."""
    facts, moments = own.facts(), own.stages.moments
    captions = None if moments is None else moments.captions
    return (
        repr(facts["public"]), repr(facts["representation"]), repr(facts["velocity"]),
        repr(facts["prior"]), own.private.conditions, repr(own.private.captions),
        repr(moments_of(own).model_dump(include={"covariance", "rank", "floor"})),
        uses_plateau(own), uses_within(own), projection_of(own), repr(profile_recipe(own)),
        repr(captions),
    )  # fmt: skip


@pytest.mark.parametrize("size", ["compact", "full"])
def test_plans_share_a_room_only_where_pretrain_would_make_the_same(size):
    plain = [plan_of(row, 1.0, Path("/work"), size=size) for row in EVERY]
    known = [(rooms.key_of(one), recipe(Plan.model_validate(one))) for one in plain]
    for (key, own), (other_key, other) in combinations(known, 2):
        assert key != other_key or own == other
    assert len({key for key, _ in known}) < len(known)


def test_a_room_is_shared_across_budgets_and_learning_rates():
    slow = replace(rows.LATENT[3], name="slow", rate=5e-5)
    plans = [plan_of(row, e, Path("/w")) for row in (rows.LATENT[3], slow) for e in (0.3, 3.0)]
    assert len({rooms.key_of(one) for one in plans}) == 1


def test_rows_of_one_base_have_public_images_and_codes_in_common():
    by_base = {}
    for row in EVERY:
        own = plan_of(row, 1.0, Path("/work"))
        shared = json.dumps([own["public"], own["representation"]])
        assert by_base.setdefault(row.base, shared) == shared


def test_what_was_made_once_is_not_made_again():
    asked = []
    known = rooms.once(lambda x, y: asked.append((x, y)) or x + y, lambda x, _: x)
    assert [known(1, 2), known(1, 5), known(2, 5)] == [3, 3, 7]
    assert asked == [(1, 2), (2, 5)]


def test_a_run_takes_a_room_over_with_or_without_its_prior(tmp_path):
    room = tmp_path / "room"
    (room / "public").mkdir(parents=True)
    for name in ("prior.safetensors", "calibration.json"):
        (room / "public" / name).write_text("x")
    rooms.take(room, tmp_path / "a")
    rooms.take(room, tmp_path / "b", prior=False)
    assert (tmp_path / "a/public/prior.safetensors").exists()
    assert [path.name for path in (tmp_path / "b/public").iterdir()] == ["calibration.json"]


class Told(Runs):
    """Runs whose jobs are told and not carried out."""

    def _prepare(self, rows):
        pass

    def _carry_out(self, name, job):
        self.jobs = [*getattr(self, "jobs", []), job]
        if job["what"] == "rooms":
            for entry in job["entries"]:
                run = Path(entry["run"])
                run.mkdir(parents=True, exist_ok=True)
                (run / "done").touch()
        else:
            run = Path(job["run"])
            run.mkdir()
            facts = {"seconds": 1.0, "scores": {"": {"accuracy": 0.5}}}
            (run / "score.json").write_text(json.dumps(facts))


def test_shared_runs_and_rooms_are_made_once(tmp_path):
    runs = Told(tmp_path, "tiny", 1)
    first = runs.made(rows.table("2", full=False))
    made = [job for job in runs.jobs if job["what"] == "run"]
    assert len({job["run"] for job in made}) == len(made) == len(first)
    assert len(next(job for job in runs.jobs if job["what"] == "rooms")["entries"]) == 4
    runs.jobs = []
    found = runs.made(rows.table("4", full=False))
    shared = run_name(rows.PIXEL[3], 1.0)  # the one-hot reference is a row of Table 1
    assert not any(shared in job.get("run", "") for job in runs.jobs)
    assert "one-hot class (reference)" in {score["row"] for score in found}
    runs.jobs = []
    assert runs.made(rows.table("2", full=False)) == first
    assert runs.jobs == []


def test_runs_ask_for_their_own_room(tmp_path):
    runs = Told(tmp_path, "tiny", 2)
    runs.made(rows.table("gradient", full=False))
    for job in runs.jobs:
        if job["what"] == "run":
            whole = json.loads(Path(job["plan"]).read_text())
            assert Path(job["room"]).name == f"latent-{rooms.key_of(whole)[:12]}"


# Composed digits.


def test_captions_of_composed_digits_parse_by_the_template():
    form = Template.model_validate(TEMPLATE)
    for names in (DIGITS, list(composed.ARTICLES)):
        for place, filling in enumerate(form.fillings(names)):
            values = dict(zip(form.names, filling, strict=True))
            text = composed.caption(names[values["class"]], values["stroke"], values["quadrant"])
            assert form.condition(text, names) == place


def test_dots_and_strokes_are_where_they_should_be():
    images = np.zeros((64, 28, 28), np.uint8)
    images[:, 9:19, 12:16] = 200
    made, strokes, quadrants = composed.compose(images, seed=3)
    assert set(strokes.tolist()) == {0, 1}
    assert set(quadrants.tolist()) == {0, 1, 2, 3}
    for image, stroke, quadrant in zip(made, strokes, quadrants, strict=True):
        dots = [image[:4, :4], image[:4, 24:], image[24:, :4], image[24:, 24:]]
        assert [dot.min() == 255 for dot in dots] == [place == quadrant for place in range(4)]
        assert sum(int(dot.max() > 0) for dot in dots) == 1
        inside = int((image[5:23, 5:23] > 0).sum())
        assert inside == (9 * 3 if stroke == 0 else 11 * 5)


def test_archives_are_whole_or_not_there(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    data = draw.integers(0, 256, (12, 28, 28), dtype=np.uint8), np.arange(12) % 10
    monkeypatch.setattr(composed, "read", lambda folder, side: data)
    composed.prepare(tmp_path)
    with np.load(tmp_path / "captioned/mnist-train.npz") as kept:
        assert kept["captions"][7] == "the digit 7"
        assert np.array_equal(kept["images"], data[0])
    with np.load(tmp_path / "composed/fashion-train.npz") as kept:
        assert str(kept["captions"][8]).split()[2] == "bag"
    assert not list(tmp_path.glob("*/*.part.npz"))


def test_the_paper_has_a_value_for_each_of_its_rows():
    for cell in rows.table("1", full=False):
        assert len(paper.values("1", cell.name, cell.epsilon)) == 2
    for name in rows.TABLE_2:
        assert len(paper.values("2", name, 0.3)) == 2
    for epsilon in (0.5, 1.0, 3.0):
        for name in ("unconstrained", "full backbone"):
            assert len(paper.values("2", name, epsilon)) == 1
    for name in [*rows.TABLE_4, *rows.sentence_rows("minilm")]:
        assert len(paper.values("4", name, 1.0)) == (3 if name.startswith("composed") else 1)
    assert len(paper.values("5", "release sampled", 1.0)) == 3
    assert paper.values("7", "pixel: + low B0", 3.0) == (0.233, 0.459)
    known = set(paper.TABLE_1) | set(paper.TABLE_5) | set(paper.TABLE_7)
    assert known <= set(rows.every_row())
    assert not any(math.isnan(value) for part in paper.TABLE_1.values() for value in sum(part, ()))


def run(row, epsilon, accuracy, fd):
    scores = {"": {"accuracy": accuracy, "fd": fd}}
    return {"row": row, "epsilon": epsilon, "seconds": 30.0, "scores": scores}


def test_reports_gather_means_and_spreads(capsys, tmp_path):
    name = "latent: planned + moments"
    runs = [run(name, 1.0, 0.5, 20.0), run(name, 1.0, 0.7, 30.0), run(name, 3.0, 0.9, 5.0)]
    found = report.gathered(runs)
    assert found[name, 1.0] == {"accuracy": [0.5, 0.7], "fd": [20.0, 30.0]}
    assert report.spread([20.0, 30.0]) == "25.0 ± 7.1"
    report.show("1", runs, {"ceiling": {"accuracy": 0.98, "fd": 1.0}})
    shown = capsys.readouterr().out
    assert "0.600 ± 0.141" in shown
    assert "0.811 / 56.5" in shown
    assert "2 process minutes" in shown
    report.keep({"1": runs}, {}, tmp_path / "tables.json")
    report.keep({"2": []}, {}, tmp_path / "tables.json")
    assert set(json.loads((tmp_path / "tables.json").read_text())["tables"]) == {"1", "2"}


def test_what_is_left_out_is_said():
    said = "\n".join(report.notes({"4": [run("per-slot indicators", 1.0, 0.6, 9.0)]}, "compact"))
    assert "--encoder" in said
    assert "FID" in said
    assert "tune" in said
    assert "the paper, Table 9" in "\n".join(report.notes({}, "full"))


def test_tuning_picks_the_best_rate_of_each_kind():
    made = [
        {"space": space, "kind": kind, "rate": rate, "accuracy": 1.0 - abs(rate - best)}
        for space, kind, best in (("latent", "uniform", 1e-3), ("pixel", "moments", 3e-4))
        for rate in tune.RATES
    ]
    assert tune.best(made) == {"latent": {"uniform": 1e-3}, "pixel": {"moments": 3e-4}}


# The signal.


def test_the_sampling_error_is_removed_from_a_means_length():
    source, truth = np.random.default_rng(0), np.zeros(50)
    truth[0] = 0.3
    squares = []
    for _ in range(400):
        drawn = truth + source.standard_normal((40, 50)) / math.sqrt(50)
        mean = float(np.linalg.norm(drawn.mean(0)))
        squares.append(signal.agreed(mean, float((drawn**2).sum(1).mean()), 40) ** 2)
    assert np.mean(squares) == pytest.approx(0.09, rel=0.1)


def test_class_gaussians_are_those_of_the_codes():
    labels = torch.arange(4000) % 10
    codes = torch.randn(4000, 3, generator=generator(0)) + labels[:, None]
    made = signal.gaussians(codes, labels)
    assert torch.allclose(made.class_means[4], codes[labels == 4].mean(0), atol=1e-5)
    drawn = made.draw(torch.full((20_000,), 2), generator(1))
    assert torch.allclose(torch.cov(drawn.T), torch.cov(codes[labels == 2].T), atol=0.06)


def test_noise_of_a_run_grows_with_the_weights_and_falls_with_epsilon():
    few, many = (signal.noise_of(weights, 1.0, "compact") for weights in (100, 400))
    assert many == pytest.approx(2 * few)
    assert signal.noise_of(100, 3.0, "compact") < few
    own = SIZES["compact"]["latent"]  # sums of sigma N(0, 1) over T steps, each over q N records
    steps = signal.multiplier(1.0, "compact") * torch.randn(20_000, own.steps)
    shown = (steps / (own.rate * 60_000)).mean(1).std() * 10
    assert float(shown) == pytest.approx(few, rel=0.03)


# The mixture.


def test_every_kind_of_the_mixture_is_a_plan():
    for kind, changes in (mixture.KINDS | mixture.TRAINED).items():
        folder = mixture.run_folder(Path("/work"), kind, 0.3, 0)
        made = mixture.base(Path("/work"), folder.name, 0.3, 0) | changes
        assert Plan.model_validate(made).sampling.count == mixture.A_CLASS * mixture.CLASSES
    names = {
        mixture.run_folder(Path("/w"), kind, 1.0, 0) for kind in mixture.KINDS | mixture.TRAINED
    }
    assert len(names) == 4


def test_kept_codes_are_those_that_would_have_been_computed(tmp_path):
    class Codec:
        elementwise = False
        calls = 0

        def encode_rows(self, images):
            self.calls += 1
            return images.reshape(len(images), -1).astype(np.float64) ** 2

        def arrays(self):
            return {"weight": np.arange(3)}

    def made(mean):
        return Representation(Codec(), (2, 2, 1), np.full(4, mean), 2.0, 1.0)

    images = np.random.default_rng(0).integers(0, 256, (5, 2, 2, 1), dtype=np.uint8)
    one, other = made(0.5), made(1.5)
    bare = one.encode_exact_many(images), other.encode_exact_many(images)
    with rooms.kept_codes(tmp_path):
        for representation, wanted in zip((one, other, one), (*bare, bare[0]), strict=True):
            assert np.array_equal(representation.encode_exact_many(images), wanted)
        assert np.array_equal(one.encode_exact_many(images[:3]), bare[0][:3])
    assert (one.codec.calls, other.codec.calls) == (3, 2)
    assert np.array_equal(one.encode_exact_many(images), bare[0])
    assert one.codec.calls == 4
