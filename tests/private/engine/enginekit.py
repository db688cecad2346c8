"""Small modules of every layer kind, and per-example gradients by torch.func to hold against."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

WIDTH = 6


class Folded(nn.Module):
    """Runs `inner` with an example's draws on the first axis, side by side: (B K, ...)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Bare(nn.Module):
    """Parameters of its own: positions, scales, a class token, a null token, a plain product."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(()))
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.null = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, 3))

    def forward(self, x):
        x = (x + self.position[: x.shape[1]]) * (1 + self.scale) - self.shift
        x = torch.where(x[..., :1] > 0, x, self.null) / (2 + self.scale.square())
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return x @ self.weight


class Tied(nn.Module):
    """One linear layer twice, its weight once more as a table, and one parameter in two layers."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.bias = self.twice.bias

    def forward(self, x):
        x = self.other(self.twice(functional.silu(self.twice(x))))
        return x + functional.embedding((x > 0).sum(-1) % WIDTH, self.twice.weight)


class Adapted(nn.Module):
    """A frozen linear map with LoRA factors, as layers and merged into the weight."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.a, self.b = (nn.Parameter(torch.randn(*s)) for s in ((2, WIDTH), (WIDTH, 2)))

    def forward(self, x):
        x = self.base(x) + 0.5 * self.up(self.down(x))
        return functional.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


class Rows(nn.Module):
    """Embeddings of ids that repeat within an example."""

    def __init__(self, padding=None):
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, padding_idx=padding)

    def forward(self, x):
        return x * self.table((x.sum(-1).abs() * 3).long() % 4)


class Attends(nn.Module):
    """`nn.MultiheadAttention` on its own tokens or across, tokens first or examples first."""

    def __init__(self, *, first=True, cross=False, weights=False):
        super().__init__()
        self.first, self.cross, self.weights = first, cross, weights
        size = {"kdim": 4, "vdim": 3} if cross else {}
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=first, **size)

    def forward(self, x):
        q = x if self.first else x.transpose(0, 1)
        k, v = (q[..., :4], q[..., 1:4]) if self.cross else (q, q)
        out, weights = self.mix(q, k, v, need_weights=self.weights)
        out = out if self.first else out.transpose(0, 1)
        return out if weights is None else out * weights.mean((1, 2))[:, None, None]


class Images(nn.Module):
    """Runs a convolution on the tokens as a signal or as an image of 4 x 6."""

    def __init__(self, convolution):
        super().__init__()
        self.inner, self.axes = convolution, convolution.weight.ndim - 2

    def forward(self, x):
        return self.inner(x.mT if self.axes == 1 else x.unflatten(1, (2, 2)))


class InPlace(nn.Module):
    """Outputs of layers changed in place, whole and in part."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.act(self.one(x))
        x = self.two(x)
        x[..., 0].mul_(2)
        x += 1
        return x


def only(layer, name):
    layer.requires_grad_(False)
    getattr(layer, name).requires_grad_(True)
    return layer


# Each takes (N, 4, WIDTH); `4-D` and `2-D` reshape around their layer.
KINDS = {
    "linear": lambda: nn.Linear(WIDTH, 3),
    "linear without bias": lambda: nn.Linear(WIDTH, 3, bias=False),
    "bias alone": lambda: only(nn.Linear(WIDTH, 3), "bias"),
    "weight alone": lambda: only(nn.Linear(WIDTH, 3), "weight"),
    "linear 2-D": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4 * WIDTH, 40)),
    "linear 4-D": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(WIDTH, 3)),
    "outputs changed in place": InPlace,
    "conv1d": lambda: Images(nn.Conv1d(6, 4, 3, stride=2, padding=2, dilation=2)),
    "conv1d groups": lambda: Images(nn.Conv1d(6, 4, 2, groups=2, padding="same")),
    "conv2d": lambda: Images(nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(1, 0), dilation=1)),
    "conv2d same": lambda: Images(nn.Conv2d(2, 3, (2, 4), padding="same", bias=False)),
    "conv2d circular": lambda: Images(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")),
    "conv2d depthwise": lambda: Images(nn.Conv2d(2, 4, 2, groups=2, dilation=(1, 2))),
    "embedding": Rows,
    "embedding with padding": lambda: Rows(padding=1),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm of two axes": lambda: nn.LayerNorm((4, WIDTH)),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "bare parameters": Bare,
    "tied": Tied,
    "adapted": Adapted,
    "attention": Attends,
    "attention, tokens first": lambda: Attends(first=False, weights=True),
    "attention across": lambda: Attends(cross=True),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)),
}


def build(kind, dtype=torch.float32, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Folded(KINDS[kind]()).to(dtype)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return module


def draw(size, draws, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(size, draws, 4, WIDTH, generator=source).to(dtype)


def losses(module, x):
    """One loss an example, averaged over its draws and numbers."""
    return (module(x) - 0.3).square().flatten(1).mean(1)


def by_func(module, x):
    """Per-example gradients (B, P) by `torch.func`, in float64."""
    module = module.double()
    named = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}

    def loss(parameters, one):
        return losses(lambda y: functional_call(module, parameters, y), one[None]).sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = vmap(grad(loss), (None, 0))(named, x.double())
    return torch.cat([found[n].reshape(len(x), -1) for n in named], dim=1)


def flat(gradients):
    return torch.cat([g.reshape(-1) for g in gradients.values()])
