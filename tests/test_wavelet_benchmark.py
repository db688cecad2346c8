"""`benchmarks.wavelet`: its plans, its distances, its arithmetic."""

import csv
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import token_runs
import torch

from dpsynth.models.lenet import LeNet
from dpsynth.planning.schema import Plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it is no part of the package

from benchmarks.wavelet import plans, report, scales, steps
from benchmarks.wavelet.judge import Captioned, Distance, Judge
from benchmarks.wavelet.plans import Cell
from benchmarks.wavelet.runs import require_same


def shipped(method, budget="10"):
    return Plan.model_validate(plans.plan_of(method, budget, Path("/captions.csv"), 7))


def numbers(seed=0, n=120, shift=0.0):
    """Images uint8 (n, 16, 16, 3) of noise around a level, a caption and a label of each."""
    drawn = np.random.default_rng(seed).normal(120 + shift, 40, size=(n, 16, 16, 3))
    texts = tuple(f"picture {i}" for i in range(n))
    return Captioned(drawn.clip(0, 255).astype(np.uint8), texts, np.arange(n) % 2)


def judge(private):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = LeNet(2, 3).eval()
    from dpsynth.models.lenet import features

    return Judge(net, private, features(net, private.images))


@pytest.mark.parametrize("method", plans.METHODS)
def test_a_cell_changes_of_the_shipped_plan_only_budget_count_and_captions(method):
    from dpsynth.planning.yaml_plan import load_plan

    own = shipped(method, "1").facts()
    known = load_plan(plans.PLANS / f"{plans.METHODS[method]}.yaml").facts()
    assert own["budget"].pop("epsilon") == 1.0
    known["budget"].pop("epsilon")
    assert own["sampling"].pop("count") == 7
    for facts in (own, known):
        facts["sampling"].pop("count", None)
        facts["sampling"].pop("captions", None)
    assert own == known


def test_the_methods_have_public_data_and_private_records_in_common():
    facts = [shipped(method).facts() for method in plans.METHODS]
    for key in ("public", "private"):
        assert facts[0][key] == facts[1][key] == facts[2][key]


def test_the_methods_models_are_equally_large_within_a_tenth():
    from dpsynth.models.velocity import build_for
    from dpsynth.models.wavelet.autoregressive import Autoregressive

    counts = {}
    for method, name in plans.METHODS.items():
        if method == "ldm":
            model = build_for(shipped(method))
        else:
            model = Autoregressive(steps.sizes_in(plans.PLANS / f"{name}.yaml"))
        counts[method] = sum(parameter.numel() for parameter in model.parameters())
    assert max(counts.values()) <= 1.1 * min(counts.values()), counts


def test_captions_are_drawn_once_each_with_their_labels_and_the_same_ones_again(tmp_path):
    archive = tmp_path / "emoji.zip"
    rows = "".join(f"{i}.png,face {i % 30},group {i % 30 % 3}\n" for i in range(60))
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("metadata.csv", "file_name,text,label\n" + rows)
    path = plans.captions_file(tmp_path / "a.csv", 20, archive)
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len({row["text"] for row in found}) == len(found) == 20
    assert all(int(row["text"].split()[1]) % 3 == int(row["label"].split()[1]) for row in found)
    more = plans.captions_file(tmp_path / "b.csv", 30, archive).read_text()
    assert more.startswith(path.read_text())


def test_every_cell_has_a_folder_of_its_own_and_three_runs_at_epsilon_10():
    cells = plans.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    numbers = [cell.number for cell in cells if (cell.method, cell.budget) == ("wavelet", "10")]
    assert numbers == [0, 1, 2]
    assert {cell.name for cell in plans.cells(full=True)} > {cell.name for cell in cells}


def test_the_distance_is_that_of_the_formula_and_blind_to_an_images_own_partner():
    one, other = numbers(0, 6), numbers(1, 6)
    distance = Distance(judge(one).net)
    first, second = (
        torch.from_numpy(own.images).permute(0, 3, 1, 2).float() / 127.5 - 1 for own in (one, other)
    )
    assert distance(first, first).abs().max() < 1e-6
    found, expected = distance(first, second), np.zeros(6)
    for ours, theirs in zip(
        *(distance.net.maps((x + 1) / 2) for x in (first, second)), strict=True
    ):
        a, b = (maps.double().detach().numpy() for maps in (ours, theirs))
        for row in range(6):
            for y, x in np.ndindex(a.shape[2:]):
                u, v = a[row, :, y, x], b[row, :, y, x]
                u, v = (w / (np.linalg.norm(w) + 1e-10) for w in (u, v))
                expected[row] += np.sum((u - v) ** 2) / (a.shape[2] * a.shape[3])
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4)


def test_the_judge_puts_the_same_images_nearest_and_pairs_by_caption():
    private = numbers(0)
    own = judge(private)
    same, alike, far = (own.score(images) for images in (private, numbers(2), numbers(1, shift=60)))
    assert same["fd"] == pytest.approx(0.0, abs=1e-6)
    assert same["distance"] == pytest.approx(0.0, abs=1e-6)
    assert far["fd"] > 3 * alike["fd"] > 0  # other draws of one distribution, and of another
    assert far["distance"] > 0.01
    turned = Captioned(np.roll(private.images, 1, axis=0), private.texts, private.labels)
    assert own.score(turned)["fd"] == pytest.approx(0.0, abs=1e-6)  # the same set of images
    assert own.score(turned)["distance"] > 0.001  # of other captions


def test_the_table_says_in_how_many_runs_a_method_won(capsys):
    def run(method, number, fd):
        scores = {"fd": fd, "distance": 0.1, "agreement": 0.5}
        return {"method": method, "budget": "10", "number": number, "scores": scores}

    runs = [run("wavelet", n, fd) for n, fd in enumerate((1.0, 5.0, 2.0))]
    runs += [run("ldm", n, fd) for n, fd in enumerate((2.0, 4.0, 3.0))]
    assert any("latent diffusion" in line and "2 of 3" in line for line in report.pairs(runs))
    report.show(runs, {"floor": {"fd": 9.0}})
    assert "floor 9.00" in capsys.readouterr().out


def test_scales_are_read_from_a_public_room(tmp_path):
    use = {"share": 1.0, "perplexity": 2.0}
    facts = {"tokens": {"counts": [4], "energy": [1.0], "kept": [0.0], "decoded": [0.5],
                        "use_by_scale": [use], "losses": {"scales": [1.0]}}}  # fmt: skip
    (tmp_path / "public").mkdir()
    (tmp_path / "public/calibration.json").write_text(json.dumps(facts))
    assert scales.lines(scales.facts_of(tmp_path))[0][:2] == ("0", "4")


def test_coarse_tokens_alone_are_cheaper_than_all_in_raster_order():
    found = steps.ratio(rounds=2, batch=8)
    assert found["weights"]["wavelet"] < found["weights"]["raster"]
    assert found["ratio"] < 1.0


def test_a_cells_name_says_what_it_is():
    assert Cell("ldm", "1").name == "ldm-1-0"
    assert Cell("ldm", "1").private and not Cell("ldm", "none").private


def test_a_run_of_another_plan_is_refused(tmp_path):
    run = token_runs.planned(tmp_path).run.root
    require_same(tmp_path / "plan.yaml", run)
    changed = token_runs.token_plan(tmp_path / "other", stages="{train: {rate: 0.2, steps: 4}}")
    with pytest.raises(SystemExit, match="another plan"):
        require_same(changed, run)
    require_same(changed, tmp_path / "nothing")
