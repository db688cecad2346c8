"""Per-example gradients of LoRA factors in a frozen transformer, against one backward a record."""

import copy

import pytest
import torch
from factorkit import KINDS, batch, flat, frozen

from dpsynth.errors import UsageError
from dpsynth.models.frozen.adapters import start_factors
from dpsynth.models.frozen.velocity import FrozenVelocity
from dpsynth.private.engine import GRID, MARGIN, EngineSettings, PerExampleClipper
from dpsynth.private.steps import flow_losses

pytest.importorskip("diffusers")
pytest.importorskip("peft")


def one_by_one(model, records):
    """Each record's gradient as one vector (B, P) float64, by a backward pass of its own."""
    named = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for at in range(len(records[0])):
        loss = flow_losses(model, *(x[at : at + 1] for x in records))
        found = torch.autograd.grad(loss.sum(), named)
        rows.append(torch.cat([g.flatten() for g in found]).double())
    return torch.stack(rows)


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "flux"])
def test_norms_and_clipped_sum_are_those_of_a_backward_pass_a_record(kind, draws):
    model, records = frozen(kind, padding=3), batch(5, draws)
    rows = one_by_one(model, records)
    norms = rows.norm(dim=1)
    clip = float(norms.median())
    with PerExampleClipper(model, flow_losses, clip) as clipper:
        found = clipper.clipped_sum(*records)
    torch.testing.assert_close(found.norms, norms, rtol=1e-5, atol=0)
    scaled = rows * (clip * (1 - MARGIN) / norms).clamp(max=1)[:, None]
    torch.testing.assert_close(flat(found), scaled.sum(0), rtol=1e-3, atol=1e-5 * clip)
    assert all(bool(g.any()) for g in found.gradients.values())  # no factor is of no use


def test_one_record_adds_at_most_the_clip():
    model, (z, y, t, xi) = frozen("qk-norm"), batch(3, 2)
    z[1] *= 1e3
    with PerExampleClipper(model, flow_losses, 1e-3) as clipper:
        whole = flat(clipper.clipped_sum(z, y, t, xi))
        keep = torch.tensor([0, 2])
        without = flat(clipper.clipped_sum(z[keep], y[keep], t[keep], xi[keep]))
        nothing = clipper.clipped_sum(z[:0], y[:0], t[:0], xi[:0])
    assert float((whole - without).norm()) <= 1e-3
    assert not flat(nothing).any()


def test_physical_batches_change_rounding_alone():
    model, records = frozen(), batch(7, 2)
    sums = []
    for physical in (1, 3, 7):
        engine = EngineSettings(physical=physical)
        with PerExampleClipper(model, flow_losses, 0.05, settings=engine) as clipper:
            sums.append(flat(clipper.clipped_sum(*records)))
    for other in sums[1:]:
        assert float((other - sums[0]).norm()) <= 2e-6 * float(sums[0].norm()) + 1e3 * GRID


def test_exact_sums_agree():
    model, records = frozen("dual"), batch(4, 1)
    sums = []
    for exact in (False, True):
        engine = EngineSettings(exact_sums=exact)
        with PerExampleClipper(model, flow_losses, 0.05, settings=engine) as clipper:
            sums.append(flat(clipper.clipped_sum(*records)))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-3, atol=1e-7)


def test_factors_move_from_their_start_and_frozen_weights_never():
    """B is zero at first: A's gradient is, too, and the engine's rehearsals pass over it."""
    model, records = frozen(moved=0.0), batch(4, 1)
    factors = start_factors(model)
    still = {n: p.detach().clone() for n, p in model.named_parameters() if n not in factors}
    with PerExampleClipper(model, flow_losses, 1.0) as clipper:
        for _ in range(3):
            found = clipper.clipped_sum(*records)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if p.requires_grad:
                        p.sub_(found.gradients[name].float())
    assert all(bool(p.any()) for p in start_factors(model).values())
    assert all(torch.equal(p, still[n]) for n, p in model.named_parameters() if n in still)
    assert all(p.grad is None for p in model.parameters())


def test_what_mixes_records_is_found_in_a_frozen_model_too():
    class Mixing(FrozenVelocity):
        def forward(self, x, t, y):
            return super().forward(x + 0.1 * x.roll(1, 0), t, y)

    model = frozen()
    model.__class__ = Mixing
    with (
        PerExampleClipper(model, flow_losses, 1.0) as clipper,
        pytest.raises(UsageError, match="another example"),
    ):
        clipper.clipped_sum(*batch(6, 2))


def test_copies_share_the_frozen_weights_and_have_factors_of_their_own():
    model = frozen()
    other = copy.deepcopy(model)
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    factors = start_factors(model)
    assert mine.keys() == theirs.keys()
    assert all((mine[n] is theirs[n]) == (n not in factors) for n in mine)
    assert {n for n, p in theirs.items() if p.requires_grad} == set(factors)
