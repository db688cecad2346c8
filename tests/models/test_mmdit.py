"""The backbone: axes, captions and their padding, files; its constraints are in another file."""

import copy

import pytest
import torch
from dualkit import CAPTIONS, CLASSES, CONSTRAINTS, IMAGE, SPACES, TEXT, inputs, model, settings
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.errors import UsageError
from dpsynth.models.joint_attention import clamped
from dpsynth.models.mmdit import DualStreamVelocity
from dpsynth.models.patches import CodePatches, ImagePatches
from dpsynth.models.text import tokens
from dpsynth.models.trainable import train_last
from dpsynth.models.velocity import (
    DUAL,
    build_for,
    build_velocity,
    captions_of,
    describe,
    image_of,
    load_for,
    load_velocity,
    save_velocity,
)
from dpsynth.planning.schema import ImageShape, Plan
from dpsynth.planning.velocity import Velocity

constraints = pytest.mark.parametrize("constraint", CONSTRAINTS)
spaces = pytest.mark.parametrize("space", SPACES)


@constraints
@spaces
def test_draws_and_examples_are_alone(constraint, space):
    net = model(constraint, space)
    x, t, y = inputs(space)
    together = net(x, t, y)
    assert together.shape == x.shape
    apart = torch.stack([net(x[:, k], t[:, k], y) for k in range(3)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-10)
    alone = torch.cat([net(x[i : i + 1], t[i : i + 1], y[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    each = y[:, None].expand(-1, 3)
    torch.testing.assert_close(together, net(x, t, each), rtol=1e-10, atol=1e-10)
    assert net(x[:0], t[:0], y[:0]).shape == (0, *x.shape[1:])


@constraints
def test_every_weight_has_a_gradient_and_every_caption_a_velocity(constraint):
    net = model(constraint)
    x, t, y = inputs()
    net(x, t, y).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())
    point, time = x[:1, 0].expand(CLASSES + 1, -1), t[:1, 0].expand(CLASSES + 1)
    found = net(point, time, torch.arange(CLASSES + 1)).detach()
    assert float(torch.pdist(found).min()) > 1e-6


@spaces
def test_starts_at_the_field_of_a_unit_gaussian(space):
    dim, image = SPACES[space]
    net = build_velocity(settings("all"), dim, CLASSES, captions=CAPTIONS, image=image)
    x, t, y = inputs(space)
    x, t = x.float()[:, 0], t.float()[:, 0]
    expected = ((2 * t - 1) / ((1 - t).square() + t.square()))[:, None] * x
    torch.testing.assert_close(net(x, t, y), expected)


@constraints
def test_padding_never_matters(constraint):
    """Captions at their own length, at full length, and beside a longer one: the same velocity."""
    net = model(constraint)
    x, t, y = inputs()
    trimmed = net(x, t, y)
    assert net.ids.shape[1] == 1 + 3
    full = copy.deepcopy(net)
    describe(full, CAPTIONS)
    assert full.ids.shape[1] == 1 + TEXT.length
    torch.testing.assert_close(full(x, t, y), trimmed, rtol=1e-10, atol=1e-10)
    describe(full, [*CAPTIONS[:2], "one", "a very long caption with many words"])
    moved = torch.where(y == CLASSES, CLASSES + 1, y)
    torch.testing.assert_close(full(x, t, moved), trimmed, rtol=1e-10, atol=1e-10)
    # Control: words do matter, and so does what the table holds in a row that is in use.
    describe(full, [*CAPTIONS[:2], "one more"])
    assert float((full(x, t, y) - trimmed)[y == 2].detach().abs().max()) > 1e-6
    full.table[0] += 1e3  # the padding's row
    describe(full, CAPTIONS)
    torch.testing.assert_close(full(x, t, y), trimmed, rtol=1e-10, atol=1e-10)


def test_captions_can_be_changed_and_put_back_but_are_never_saved():
    net = model("all-2")
    x, t, y = inputs()
    before, weights = net(x, t, y), set(net.state_dict())
    describe(net, ["bold seven", "one"])
    swapped = net(x, t, torch.where(y == CLASSES, 2, (y + 2) % 3))
    describe(net, None)
    assert torch.equal(net(x, t, y), before)
    torch.testing.assert_close(swapped[y == CLASSES], before[y == CLASSES])
    assert set(net.state_dict()) == weights
    assert not any("ids" in name or "table" in name for name in weights)
    null = model("all-2", space="code")
    null.set_captions(torch.zeros(0, TEXT.length, dtype=torch.int64))
    torch.testing.assert_close(null(x, t, y * 0)[y == CLASSES], before[y == CLASSES])


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(2, TEXT.length),
        torch.zeros(2, TEXT.length + 1, dtype=torch.int64),
        torch.full((2, TEXT.length), TEXT.vocabulary),
        torch.full((2, TEXT.length), -1),
    ],
    ids=["float", "long", "beyond", "negative"],
)
def test_captions_that_are_no_rows_of_the_table_are_refused(ids):
    with pytest.raises(UsageError, match="captions"):
        model().set_captions(ids)


def test_labels_without_a_caption_of_their_own_are_refused():
    with pytest.raises(UsageError, match="one each"):
        DualStreamVelocity(4, 3, settings(), captions=["a", "b"])
    with pytest.raises(UsageError, match="same tokens"):
        DualStreamVelocity(4, 2, settings(), captions=["b", "B "])
    with pytest.raises(UsageError, match="expected 21 numbers"):
        DualStreamVelocity(21, 2, settings(), image=IMAGE)
    with pytest.raises(UsageError, match="no caption stream"):
        describe(build_velocity(Velocity(), 4, 2), ["a", "b"])


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1, 3]),
    st.one_of(st.none(), st.integers(1, 10)),
    st.integers(1, 3),
)
def test_squares_join_to_the_image_that_they_were_cut_from(height, width, channels, patch, draws):
    cut = ImagePatches(ImageShape(height=height, width=width, channels=channels), patch)
    x = torch.arange(2.0 * draws * height * width * channels).view(2, draws, -1)
    parts = cut.split(x)
    assert parts.shape == (2, draws * cut.tokens, cut.size)
    assert torch.equal(cut.join(parts, draws), x)
    side, image = cut.side, x.view(2, draws, height, width, channels)
    first = image[:, :, :side, :side].flatten(2)
    if min(height, width) >= side:
        assert torch.equal(parts.view(2, draws, cut.tokens, -1)[:, :, 0], first)


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 3))
def test_stretches_join_to_the_code_that_they_were_cut_from(dim, patch, draws):
    cut = CodePatches(dim, patch)
    x = torch.randn(2, draws, dim)
    assert torch.equal(cut.join(cut.split(x), draws), x)


@spaces
def test_file_round_trip(space, tmp_path):
    dim, image = SPACES[space]
    path, keys = tmp_path / "model.safetensors", settings("all")
    net = model("all", space).float()
    save_velocity(net, path, keys, room="released")
    loaded, metadata = load_velocity(path, keys, dim, CLASSES, captions=CAPTIONS, image=image)
    x, t, y = inputs(space)
    assert torch.equal(loaded(x.float(), t, y), net(x.float(), t, y))
    assert '"late": 1' in metadata[DUAL]
    changes = {"clamp": 3.0, "late": 2, "decoupled": False, "spectral": None, "heads": 1}
    for key, value in changes.items():
        with pytest.raises(UsageError, match="plan expects"):
            load_velocity(path, settings("all", **{key: value}), dim, CLASSES, image=image)
    with pytest.raises(UsageError, match="plan expects"):
        load_velocity(path, keys, 20, CLASSES, image=None if image else IMAGE)


def test_files_of_other_kinds_say_what_they_always_said(tmp_path):
    keys = Velocity(kind="transformer", width=32, depth=1)
    save_velocity(build_velocity(keys, 9, 2), tmp_path / "old.safetensors", keys, room="public")
    _, metadata = load_velocity(tmp_path / "old.safetensors", keys, 9, 2)
    assert set(metadata) == {"format", "kind", "width", "depth", "dim", "classes", "room"}


@pytest.mark.parametrize("kind", ["mlp", "transformer", "mmdit"])
def test_the_last_layer_alone_is_trained(kind):
    net = build_velocity(Velocity(kind=kind, width=32, depth=2), 9, 2)
    train_last(net)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    last = {"leave.weight", "leave.bias"}
    assert trained == (last if kind == "mlp" else {*last, "norm.weight", "norm.bias"})


def test_a_clamp_is_the_projection_onto_a_ball():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(50, 6, dtype=torch.float64, generator=generator) * 2
    h[0] = 0
    h.requires_grad_()
    found = clamped(h, 3.0)
    inside = h.norm(dim=-1) <= 3
    assert 0 < int(inside.sum()) < 50
    assert torch.equal(found[inside], h[inside])
    torch.testing.assert_close(found[~inside], 3 * h[~inside] / h[~inside].norm(dim=-1)[:, None])
    assert clamped(h, None) is h
    found.sum().backward()
    assert bool(h.grad.isfinite().all())
    assert torch.equal(h.grad[0], torch.ones(6, dtype=torch.float64))


def test_tokens_of_a_plans_captions_reach_the_model_as_they_are():
    net = model()
    assert torch.equal(net.ids[:-1, 1:], tokens(CAPTIONS, TEXT.length, TEXT.vocabulary)[:, :3])


def plan(captions=None, space="pixels", **velocity):
    source = {"kind": "npz", "path": "none.npz"} | ({"captions": "said"} if captions else {})
    return Plan.model_validate(
        {
            "name": "tiny",
            "budget": {"epsilon": 1, "delta": 1e-5},
            "private": {
                "source": source,
                "capacity": 100,
                "image": {"height": 5, "width": 4},
                "classes": ["cat", "dog"],
                "held_out": {"by": "hash", "fraction": 0.1},
                "captions": captions,
            },
            "public": [source],
            "representation": {"kind": space, "code": 20},
            "stages": {"train": {"rate": 0.1, "steps": 10}},
            "sampling": {"method": "flow"},
            "velocity": {"kind": "mmdit", "width": 8, "depth": 2, **velocity},
        }
    )


def test_a_plan_says_all_that_its_model_needs(tmp_path):
    template = {
        "kind": "template",
        "template": "a {size} {class}",
        "slots": {"size": ["big", "small"]},
    }
    path, own = tmp_path / "model.safetensors", plan(template)
    net = build_for(own)
    assert isinstance(net, DualStreamVelocity)
    assert (net.classes, net.dim) == (4, 20)
    assert list(net.captions) == captions_of(own)
    assert captions_of(own) == ["a big cat", "a big dog", "a small cat", "a small dog"]
    assert image_of(own) == net.image == IMAGE
    save_velocity(net, path, own.velocity, room="public")
    found, _ = load_for(path, own)
    assert all(torch.equal(v, found.state_dict()[n]) for n, v in net.state_dict().items())
    assert torch.equal(found.ids, net.ids)
    classes = plan(space="pca")
    assert image_of(classes) is None
    assert captions_of(classes) == ["cat", "dog"]
    for other in (classes, plan(template, late=1), plan(template, text={"length": 9})):
        with pytest.raises(UsageError, match="plan expects"):
            load_for(path, other)
