"""Faults that one backward pass does not show: mixtures of values, gradients that are missed."""

import threading

import pytest
import torch
from enginekit import KINDS, WIDTH, build, draw, losses
from torch import nn
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.engine.rehearsal import Schedule


def squares(module, *batch):
    return module(*batch).square().flatten(1).mean(1)


class Two(nn.Module):
    """Two linear layers and a function of them and the tokens."""

    def __init__(self, apply, *, zero=False):
        super().__init__()
        self.a, self.b, self.apply_ = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), apply
        if zero:
            nn.init.zeros_(self.b.weight)
            nn.init.zeros_(self.b.bias)

    def forward(self, x):
        return self.apply_(self, x)


def tokens(size=6):
    return torch.randn(size, 4, WIDTH, generator=torch.Generator().manual_seed(0))


def centred(h):
    return h - h.mean(0)


def pairs(y):
    n = len(y) // 2 * 2
    return y + torch.cat([y[:n].unflatten(0, (-1, 2)).flip(1).flatten(0, 1), 0 * y[n:]])


MIXTURES = {
    "input normalised over the batch": lambda s, x: s.b(s.a(centred(x)).tanh()),
    "detached statistics": lambda s, x: s.b(s.a(x) / s.a(x).detach().std(0)),
    "a parameter times a statistic": lambda s, x: s.b(x + s.a.bias * x.abs().max()),
    "each sees the next": lambda s, x: s.b(s.a(x).flip(0).cumsum(0).flip(0).tanh()),
    "each sees those before": lambda s, x: s.b(s.a(x).cumsum(0).tanh()),
    "pairs, the last alone": lambda s, x: pairs(s.b(s.a(x).tanh())),
}


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("size", [6, 7])
def test_a_mixture_of_values_is_refused(kind, size):
    with (
        PerExampleClipper(Two(MIXTURES[kind]), squares, 1.0) as clipper,
        pytest.raises(UsageError, match="another example"),
    ):
        clipper.clipped_sum(tokens(size))


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x: squares(m, x) / squares(m, x).detach().mean(),
        lambda m, x: (m(x) - centred(x)[..., :3]).square().mean((1, 2)),
    ],
    ids=["scaled", "target"],
)
def test_a_mixture_in_the_losses_is_refused(loss):
    with (
        PerExampleClipper(nn.Linear(WIDTH, 3), loss, 1.0) as clipper,
        pytest.raises(UsageError, match="another example"),
    ):
        clipper.clipped_sum(tokens())


def test_a_mixture_behind_a_layer_that_starts_at_zero_is_refused_later():
    """After it every loss is the same: neither gradients nor losses show it at first."""
    module = Two(lambda s, x: centred(s.b(s.a(x).tanh())), zero=True)
    with PerExampleClipper(module, lambda m, x: (m(x) - 1).square().mean((1, 2)), 1.0) as clipper:
        with torch.no_grad():
            module.b.bias += 1
        clipper._losses = clipper._rehearsal._losses = lambda m, x: m(x).square().mean((1, 2))
        for _ in range(5):  # in vain: every gradient is zero
            clipper.clipped_sum(tokens())
        nn.init.normal_(module.b.weight)
        with pytest.raises(UsageError, match="another example"):
            clipper.clipped_sum(tokens())


def test_a_mixture_at_one_batch_size_alone_is_refused():
    def apply(s, x):
        return s.b(s.a(centred(x) if len(x) == 4 else x))

    with PerExampleClipper(Two(apply), squares, 1.0) as clipper:
        clipper.clipped_sum(tokens())
        with pytest.raises(UsageError, match="another example"):
            clipper.clipped_sum(tokens(4))


def test_rehearsals_cost_a_logarithm():
    schedule, form = Schedule(), ((), True)
    due = []
    for number in range(1, 1025):
        if schedule.due(form, 8):
            due.append(number)
            schedule.done(form, 8, whole=True)
    assert due == [2**k for k in range(11)]
    vain = Schedule()
    count = 0
    for _ in range(1024):
        if vain.due(form, 8):
            count += 1
            vain.done(form, 8, whole=False)
    assert 32 < count < 50
    sizes = Schedule()
    count = 0
    for size in range(2, 1026):
        if sizes.due(form, size):
            count += 1
            sizes.done(form, size, whole=True)
    assert 8 <= count <= 20


@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm_and_the_random_stream_goes_on(kind):
    module = build(kind)
    for size, draws in ((1, 2), (2, 1), (5, 3), (16, 2)):
        torch.manual_seed(3)
        with PerExampleClipper(module, losses, 0.05) as clipper:
            clipper.clipped_sum(draw(size, draws))
        after = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("train", [True, False])
def test_layers_keep_their_mode_and_dropout_is_no_mixture(dropout, train):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=dropout, batch_first=True)
    module = nn.Sequential(layer, nn.Dropout(dropout), nn.Linear(WIDTH, 2))
    module.train(train)
    module[1].train(not train)
    with PerExampleClipper(module, squares, 1.0) as clipper:
        assert clipper.clipped_sum(tokens()).norms.min() > 0
    assert module.training == module[0].training == train
    assert module[1].training != train


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, torch.einsum("...o,...i->oi", g, x)


@torch.jit.script
def scripted(x: torch.Tensor, w: torch.Tensor):
    return x @ w.t()


@pytest.mark.parametrize("product", [Product.apply, scripted], ids=["Function", "script"])
@pytest.mark.parametrize("size", [1, 5])
def test_a_gradient_that_the_tape_misses_is_refused_by_name(product, size):
    module = Two(lambda s, x: s.b(product(x, s.a.weight)))
    with (
        PerExampleClipper(module, squares, 1.0) as clipper,
        pytest.raises(UsageError, match=r"'a\.weight'"),
    ):
        clipper.clipped_sum(tokens(size))


def test_scripted_modules_are_refused():
    for odd in (
        torch.jit.script(nn.Linear(WIDTH, 2)),
        torch.jit.trace(nn.Linear(WIDTH, 2), tokens()),
    ):
        with pytest.raises(UsageError, match=r"layer '0' .*torch\.jit"):
            PerExampleClipper(nn.Sequential(odd), squares, 1.0)


def test_parameters_that_change_between_calls_are_refused():
    def changes(m):
        return [
            lambda: m[0].requires_grad_(True),
            lambda: m[1].requires_grad_(False),
            lambda: m.load_state_dict(
                {k: v.clone() for k, v in m.state_dict().items()}, assign=True
            ),
        ]

    for which in range(3):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
        module[0].requires_grad_(False)
        with PerExampleClipper(module, squares, 1.0) as clipper:
            clipper.clipped_sum(tokens())
            changes(module)[which]()
            with pytest.raises(UsageError, match="changed since"):
                clipper.clipped_sum(tokens())


def test_no_raw_gradient_reaches_a_leaf():
    """A closure from the second pass on, in batches of one, and a leaf that is no parameter."""
    module, count = nn.Linear(WIDTH, 2), [0]
    weight, stray = module.weight, torch.ones((), requires_grad=True)

    def later(m, x):
        count[0] += 1
        return squares(m, x) + (
            squares(lambda x: functional.linear(x, weight), x) if count[0] > 3 else 0
        )

    with (
        PerExampleClipper(module, later, 1.0) as clipper,
        pytest.raises(UsageError, match="'weight'"),
    ):
        for _ in range(2):
            clipper.clipped_sum(tokens(1))
    with (
        PerExampleClipper(module, lambda m, x: squares(m, x) * stray, 1.0) as clipper,
        pytest.raises(UsageError, match="no parameter of the module"),
    ):
        clipper.clipped_sum(tokens())
    assert weight.grad is None
    assert stray.grad is None


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("how", ["copy", "data"])
def test_a_parameter_that_learns_from_examples_is_refused(trainable, how):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.kept = nn.Parameter(torch.zeros(WIDTH), requires_grad=trainable)

        def forward(self, x):
            with torch.no_grad():
                (self.kept if how == "copy" else self.kept.data).copy_(x.mean((0, 1)))
            return self.layer(x)

    with (
        PerExampleClipper(Writes(), squares, 1.0) as clipper,
        pytest.raises(UsageError, match="wrote into"),
    ):
        clipper.clipped_sum(tokens())


@pytest.mark.parametrize("how", ["data", "numpy", "twice"])
def test_a_buffer_written_out_of_sight_is_refused(how):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("kept", torch.zeros(WIDTH))

        def forward(self, x):
            mean = x.mean((0, 1))
            if how == "data":
                self.kept.data.copy_(mean)
            elif how == "numpy":
                self.kept.numpy()[:] = mean.numpy()
            else:
                del self._buffers["kept"]
                self._buffers["kept"] = mean.clone()
            return self.layer(x)

    with (
        PerExampleClipper(Writes(), squares, 1.0) as clipper,
        pytest.raises(UsageError, match="wrote into"),
    ):
        clipper.clipped_sum(tokens())


def test_one_pass_at_a_time():
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    before, start, odd = [id(p) for p in module.parameters()], threading.Barrier(3), []

    def inner(m, x):
        PerExampleClipper(m, squares, 1.0).clipped_sum(x)
        return squares(m, x)

    with PerExampleClipper(module, inner, 1.0) as clipper, pytest.raises(UsageError):
        clipper.clipped_sum(tokens())

    def work():
        clipper = PerExampleClipper(module, squares, 1.0)
        start.wait()
        for _ in range(10):
            try:
                clipper.clipped_sum(tokens())
            except UsageError:
                continue
            except Exception as error:
                odd.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not odd
    assert [id(p) for p in module.parameters()] == before
    assert all(type(p) is nn.Parameter for p in module.parameters())
