"""The public profile of time buckets: its numbers against direct integrals, what it depends on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.linalg import eigvalsh

from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_for, build_velocity, save_velocity
from dpsynth.planning.allocation import LATEST, Profile
from dpsynth.planning.schema import Plan
from dpsynth.planning.yaml_plan import parse_plan
from dpsynth.public.profile import PROFILE_PLOT, class_spectra, profile_facts, profile_recipe

DIM, CLASSES = 4, 3
TEXT = """\
version: 1
name: bucketed
budget: {{epsilon: 2.0, delta: 1e-5}}
private:
  source: {{kind: npz, path: secret.npz}}
  capacity: 1000
  image: {{height: 8, width: 8}}
  classes: [a, b]
  held_out: {{by: hash, fraction: 0.2}}
public:
  - {{kind: letters, count: 200}}
representation: {{kind: pca, code: 4}}
stages:
  moments: {{covariance: {covariance}}}
  train: {{rate: 0.1, steps: 9, chunk: 3, buckets: 3, {more}}}
velocity: {{width: 8, depth: 1}}
distillation: {{steps: 2, cap: 0.5}}
sampling: {{method: flow}}
"""


def plan_of(more: str = "allocation: {}", covariance: str = "class") -> Plan:
    return parse_plan(TEXT.format(more=more, covariance=covariance))


def public(n: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    source = generator(4)
    labels = torch.arange(n) % CLASSES
    spread = torch.tensor([1.0, 0.5, 0.1, 0.01])
    return torch.randn(n, DIM, generator=source) * spread * (1 + labels[:, None]), labels


@pytest.fixture
def prior(tmp_path: Path) -> Path:
    plan = plan_of()
    with seeded_initialisation(0):
        model = build_velocity(plan.velocity, DIM, plan.private.conditions)
    path = tmp_path / "prior.safetensors"
    save_velocity(model, path, plan.velocity, room="public")
    return path


def facts(plan: Plan, prior: Path) -> Profile:
    made = profile_facts(plan, *public(), 0.7, prior=prior, room=prior.parent)
    assert (prior.parent / PROFILE_PLOT).read_bytes().startswith(b"\x89PNG")
    return Profile.from_json(made)


@pytest.mark.parametrize("shared", [False, True])
def test_spectra_are_those_of_each_classs_covariance(shared: bool) -> None:
    codes, labels = public()
    weights, found = class_spectra(codes, labels * 2, shared=shared)  # labels 1 and 3 are not there
    assert weights == pytest.approx(np.full(3, 1 / 3))
    dense = [np.cov(codes[labels == y].double().numpy().T, bias=True) for y in range(CLASSES)]
    if shared:
        dense = [np.mean(dense, axis=0)]
    np.testing.assert_allclose(found, [eigvalsh(one) for one in dense], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("covariance", ["class", "shared"])
def test_buckets_hold_averages_of_the_dense_formula(covariance: str, prior: Path) -> None:
    profile = facts(plan_of(covariance=covariance), prior)
    assert profile.edges[0] == 0.5 and profile.edges[-1] == pytest.approx(LATEST)
    assert profile.weight == (1.0, 1.0, 1.0) and profile.tau == 0.7
    codes, labels = public()
    dense = [np.cov(codes[labels == y].double().numpy().T, bias=True) for y in range(CLASSES)]
    if covariance == "shared":
        dense = [np.mean(dense, axis=0)]
    for k in range(3):
        variance, importance = [], []
        for t in np.linspace(profile.edges[k], profile.edges[k + 1], 401):
            a = [(1 - t) ** 2 * np.eye(DIM) + t**2 * one for one in dense]
            left = [one - t**2 * one @ np.linalg.solve(b, one) for one, b in zip(dense, a)]  # noqa: B905
            variance.append(np.mean([np.trace(one) for one in left]))
            importance.append(variance[-1] / (1 - t) ** 2)
        assert profile.variance[k] == pytest.approx(np.mean(variance), rel=5e-3)
        assert profile.importance[k] == pytest.approx(np.mean(importance), rel=5e-3)


def test_only_trained_weights_are_counted(prior: Path) -> None:
    whole = facts(plan_of(), prior).weights
    last = facts(plan_of("parameters: last, allocation: {}"), prior).weights
    model = build_velocity(plan_of().velocity, DIM, 2)
    assert whole == sum(p.numel() for p in model.parameters())
    assert 0 < last < whole


def test_the_backbone_of_pixels_is_counted_whatever_its_captions(tmp_path: Path) -> None:
    text = TEXT.format(more="allocation: {}", covariance="shared")
    text = text.replace("height: 8, width: 8", "height: 2, width: 2")
    text = text.replace("{kind: pca, code: 4}", "{kind: pixels}")
    text = text.replace("{width: 8, depth: 1}", "{kind: mmdit, width: 8, depth: 1}")
    plan = parse_plan(text)
    model = build_for(plan)
    save_velocity(model, tmp_path / "prior.safetensors", plan.velocity, room="public")
    found = facts(plan, tmp_path / "prior.safetensors")
    assert found.weights == sum(p.numel() for p in model.parameters())


def test_what_the_profile_rests_on_is_in_the_recipe() -> None:
    recipes = [
        profile_recipe(plan_of(more))
        for more in (
            "clip: 1.0",
            "allocation: {}",
            "allocation: {shapes: [0.5]}",
            "parameters: last, allocation: {}",
        )
    ]
    assert recipes[0] == []
    assert len({str(recipe) for recipe in recipes}) == 4
    assert profile_recipe(plan_of("clip: 2.0, allocation: {}")) == recipes[1]
