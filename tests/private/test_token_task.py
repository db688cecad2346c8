"""Training on spectral tokens: who reaches the gradient, by how much, and where noise goes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from token_runs import token_plan
from unitkit import Listed

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.wavelet.autoregressive import Autoregressive
from dpsynth.models.wavelet.tokenizer import Tokenizer
from dpsynth.planning.schema import ImageShape
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.private.coding import TokenCodes
from dpsynth.private.encoding import UnitCodes, encoded
from dpsynth.private.engine import GRID, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import run_chunk
from dpsynth.private.together import require_same_codes
from dpsynth.private.token_task import TokenTask
from dpsynth.private.training_state import TrainingState
from dpsynth.public.tokens import TokenSpace, settings_of, sizes_of
from dpsynth.readers import Record
from dpsynth.vault import Units

IMAGE, CLIP = ImageShape(height=8, width=8), 0.05
UPDATES = ["all", "attention", "lora"]
FREE = """\
private:
  source: {kind: npz, path: private.npz, captions: said}
  captions: {kind: free}
  capacity: 90
  image: {height: 8, width: 8}
  classes: [a, b]
  held_out: {by: hash, fraction: 0.2}"""
# No caption, the longest that a record may have, words in no table, and the same word again.
CAPTIONS = ("", "word " * 199, "zymurgic quokka", "a a a a", "b")


def task_of(folder, update="all", *, spread=0.3, **changes):
    """A task on weights that are random, none of them zero."""
    stages = f"{{train: {{rate: 0.5, steps: 4, chunk: 2, clip: {CLIP}, parameters: {update}}}}}"
    plan = load_plan(token_plan(folder, stages=stages, **changes))
    with seeded_initialisation(3):
        tokenizer = Tokenizer(settings_of(plan)).eval().requires_grad_(False)
        task = TokenTask.of(
            plan, TokenSpace(tokenizer, Autoregressive(sizes_of(plan)), plan.tokens)
        )
        with torch.no_grad():
            for parameter in task.model.parameters():
                parameter.add_(spread * torch.randn_like(parameter))
    return task


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)


def chunks_of(task, shown, labels, classes=10, most=None):
    listed = [Record(image, int(y)) for image, y in zip(shown, labels, strict=True)]
    units = Units(Listed(listed), IMAGE, rows=lambda block: np.ones(len(block), bool))
    return list(encoded(units, task.space, classes))


def ids_of(count, task, seed=1, repeated=False):
    source = np.random.default_rng(seed)
    codes = source.integers(0, 16, (count, task.space.dim)).astype(np.int32)
    return codes * 0 + codes[:, :1] if repeated else codes


def flat(gradients):
    return torch.cat([one.reshape(-1) for one in gradients.values()])


def whole_batch(task, data, rows=None):
    """Every unit, no caption dropped."""
    settings = task.work.settings.model_copy(update={"label_dropout": 0.0})
    work = replace(task.work, settings=settings)
    batch = work.batch(data, rate=1.0, step=0, noise=NoiseSource(), source=generator(0))
    return batch if rows is None else tuple(x[rows] for x in batch)


def summed(task, batch, clip=CLIP):
    with PerExampleClipper(task.model, task.losses, clip) as clipper:
        return clipper.clipped_sum(*batch)


@pytest.mark.parametrize("levels", [1, 0])
def test_a_records_tokens_are_its_own_and_of_private_scales_alone(tmp_path, levels, monkeypatch):
    task = task_of(tmp_path, levels=levels)
    shown, asked = images(7), []
    everything = task.space.space.encode(shown)
    tokenizer = task.space.space.tokenizer
    whole = tokenizer.encode

    def watched(data, upto=None):
        asked.append((len(data), upto))
        return whole(data, upto)

    monkeypatch.setattr(tokenizer, "encode", watched)
    labels = [0, 3, 9, -1, 10, 4, 2]  # two are not declared: they contribute nothing
    *_, chunk = chunks_of(task, shown, labels)
    dim = 4 if levels else 16
    assert task.space.dim == chunk.codes.shape[1] == dim
    assert chunk.labels.tolist() == [0, 3, 9, 4, 2]
    kept = [0, 1, 2, 5, 6]
    assert np.array_equal(chunk.codes, everything[kept, :dim].numpy())
    assert asked == [(1, 0)] * 5  # one by one, up to scale 0
    alone = [chunks_of(task, shown[i : i + 1], [1])[-1].codes[0] for i in kept]
    assert np.array_equal(chunk.codes, np.stack(alone))


class OneOf:
    """What sharding asks of one of several processes."""

    def __init__(self, rank, world):
        self.rank, self.world, self.said = rank, world, []

    def require_same(self, what, value):
        self.said.append((what, value))


def test_processes_share_the_records_and_compare_their_tokens(tmp_path):
    task, shown, labels = task_of(tmp_path), images(11), np.arange(11) % 10
    listed = [Record(image, int(y)) for image, y in zip(shown, labels, strict=True)]
    whole = {tuple(row) for row in chunks_of(task, shown, labels)[-1].codes.tolist()}
    found, said = [], []
    for rank in range(3):
        ranks = OneOf(rank, 3)
        units = Units(Listed(listed), IMAGE, rows=lambda block: np.ones(len(block), bool))
        require_same_codes(task.space, ranks)
        data = task.take(encoded(units, task.space, 10, ranks=ranks))
        found += [tuple(row) for row in data.codes.tolist()]
        said.append(ranks.said)
    assert len(found) == 11
    assert set(found) == whole
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 2  # the codes of public images, and what was read


@pytest.mark.parametrize("update", UPDATES)
def test_details_of_a_record_change_no_bit(tmp_path, update):
    task, shown = task_of(tmp_path, update), images(6) // 2 + 40
    other = shown.copy()
    # Every 2 x 2 square keeps its sum, so LL0 does too: the rest of the image is another one.
    other[:, ::2, ::2] += 31
    other[:, 1::2, ::2] -= 17
    other[:, ::2, 1::2] -= 14
    assert (other != shown).any(axis=(1, 2, 3)).all()
    found = []
    for pictures in (shown, other):
        data = task.take(chunks_of(task, pictures, range(6)))
        found.append(summed(task, whole_batch(task, data)))
    assert float(flat(found[0].gradients).norm()) > 0.1 * CLIP
    assert torch.equal(flat(found[0].gradients), flat(found[1].gradients))
    assert torch.equal(found[0].norms, found[1].norms)
    fine = task.space.space.encode(other)[:, task.space.dim :]
    assert not torch.equal(task.space.space.encode(shown)[:, task.space.dim :], fine)


def test_a_record_with_an_id_outside_the_codebook_contributes_nothing(tmp_path, monkeypatch):
    task = task_of(tmp_path)
    bad = np.array([[0, 1, 2, 3], [0, 16, 2, 3], [-1, 0, 0, 0], [15, 15, 15, 15]])
    monkeypatch.setattr(TokenSpace, "encode_exact", lambda _, images: bad[: len(images)])
    data = task.take(chunks_of(task, images(4), range(4)))
    assert data.codes.tolist() == [[0, 1, 2, 3], [15, 15, 15, 15]]
    assert data.labels.tolist() == [0, 3]
    # Past this guard the model itself refuses: there is no row for such a token.
    with pytest.raises(IndexError):
        summed(task, (torch.from_numpy(bad), task.work.table[:4]))


@pytest.mark.parametrize("update", UPDATES)
def test_clipped_sums_are_those_of_autograd_one_unit_at_a_time(tmp_path, update):
    task = task_of(tmp_path, update)
    task.model.double()
    units = UnitCodes(ids_of(10, task), np.arange(10) % 3, np.array([1, 4, 2, 3]))
    work = task.work = replace(
        task.work, settings=task.work.settings.model_copy(update={"multiplicity": 2})
    )
    ids, text = whole_batch(task, task.take([units]))
    assert ids.shape == (4, 2, 4)
    assert text.shape == (4, 2, 2)
    expected = torch.zeros(0)
    for one, said in zip(ids, text, strict=True):
        task.model.zero_grad()
        logits = task.model(one, said)[:, :4]
        picked = logits.log_softmax(-1).gather(2, one[..., None])
        (-picked.mean()).backward()
        grads = [p.grad for p in task.model.parameters() if p.requires_grad]
        grad = torch.cat([g.reshape(-1) for g in grads])
        grad = grad * min(1.0, CLIP * (1 - 2**-10) / float(grad.norm()))
        expected = grad if not len(expected) else expected + grad
    found = summed(task, (ids, text))
    off = float((flat(found.gradients) - expected).norm())
    assert off < 1e-8 * float(expected.norm()) + CLIP * GRID * len(expected) ** 0.5
    # The fine part is no part of the sum at all: it took no gradient, not one of zero.
    assert all(name.startswith("coarse.") for name in found.gradients)
    assert all(p.grad is None for p in task.model.fine.parameters())
    assert work.capacity == 1800


@pytest.mark.parametrize(
    ("update", "repeated"), [("all", True), ("attention", False), ("lora", True)]
)
def test_one_unit_moves_the_sum_by_at_most_the_clip(tmp_path, update, repeated):
    """Add or remove one unit, whatever it says of itself."""
    task = task_of(tmp_path, update, private=FREE, spread=0.6, sampling=SAMPLED)
    (tmp_path / "public.txt").write_text("a\nb\n")
    codes = ids_of(len(CAPTIONS), task, repeated=repeated)
    data = task.take([UnitCodes(codes, np.zeros(5, np.int64), captions=CAPTIONS)])
    assert task.work.table.shape == (5, 2)
    whole = flat(summed(task, whole_batch(task, data)).gradients)
    for out in range(5):
        kept = [i for i in range(5) if i != out]
        rest = flat(summed(task, whole_batch(task, data, kept)).gradients)
        assert 0.5 * CLIP < float((whole - rest).norm()) <= CLIP
        # Its own caption alone decides what a unit adds: the others' may as well not be there.
        alone = task_alone(task, codes[out : out + 1], CAPTIONS[out])
        torch.testing.assert_close(whole - rest, alone, rtol=0, atol=CLIP * 2e-6)


SAMPLED = "{method: tokens, count: 20, captions: public.txt}"


def task_alone(task, codes, caption):
    before = task.work
    data = task.take([UnitCodes(codes, np.zeros(1, np.int64), captions=(caption,))])
    found = flat(summed(task, whole_batch(task, data)).gradients)
    task.work = before
    return found


def test_weights_that_are_no_numbers_give_zero(tmp_path):
    task = task_of(tmp_path)
    with torch.no_grad():
        task.model.coarse.layers[0].up.weight[0, 0] = torch.nan
    data = task.take([UnitCodes(ids_of(3, task), np.arange(3))])
    found = summed(task, whole_batch(task, data))
    assert not flat(found.gradients).any()
    assert not found.norms.isfinite().any()


class Watched(TrainingState):
    def apply(self, gradients):
        self.seen = [*getattr(self, "seen", []), {n: g.clone() for n, g in gradients.items()}]
        super().apply(gradients)


def slot_of(rate=0.5, steps=2):
    return Slot(1, "train", "train-0001", ClippedGradientSum(CLIP), 2.0, rate, steps, False)


def chunk(task, data, slot, noise=None):
    before = {n: p.detach().clone() for n, p in task.model.named_parameters()}
    state = Watched(task.model, task.work.settings, 0.1, task.facts)
    with PerExampleClipper(task.model, task.losses, CLIP) as clipper:
        log = run_chunk(slot, data, task.work, state, clipper=clipper, noise=noise or NoiseSource())
    return state, log, before


@pytest.mark.parametrize("update", UPDATES)
def test_every_trainable_entry_gets_fresh_noise_and_nothing_else_moves(tmp_path, update):
    """On no records at all a noisy gradient is noise, of the slot's size over q N, by entry."""
    task = task_of(tmp_path, update)
    data = task.take([UnitCodes(np.zeros((0, 4), np.int32), np.zeros(0, np.int64))])
    state, log, before = chunk(task, data, slot_of(steps=3))
    names = {n for n, p in task.model.named_parameters() if p.requires_grad}
    assert [line["batch"] for line in log] == [0, 0, 0]  # each step is taken
    first, second, third = (flat(one) for one in state.seen)
    assert all({*one} == names for one in state.seen)
    for one in (first, second, third):
        assert (one != 0).all()
        assert float(one.std()) == pytest.approx(2.0 / (0.5 * 1800), rel=0.15)
        assert len(one.unique()) > 0.99 * len(one)  # float32 alone makes a few alike
    assert not (first == second).any()
    assert not (second == third).any()
    for name, parameter in task.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in names)


def test_batches_follow_the_noise_sources_coins(tmp_path):
    task = task_of(tmp_path)
    codes = ids_of(400, task)
    data = task.take([UnitCodes(codes, np.arange(400) % 10)])
    coins = NoiseSource.unsafe(7).coins(400, 0.3)
    ids, text = task.work.batch(
        data, rate=0.3, step=0, noise=NoiseSource.unsafe(7), source=generator(0)
    )
    assert np.array_equal(ids.numpy(), codes[coins])
    null, kept = task.work.null, task.work.table[torch.from_numpy(np.flatnonzero(coins) % 10)]
    dropped = (text == null).all(1)
    assert 1 <= int(dropped.sum()) < 30  # about a tenth of 120
    assert torch.equal(text[~dropped], kept[~dropped])


def test_captions_of_a_units_images_are_dropped_one_by_one(tmp_path):
    task = task_of(tmp_path)
    settings = task.work.settings.model_copy(update={"multiplicity": 4, "label_dropout": 0.5})
    task.work = replace(task.work, settings=settings)
    sizes = np.full(60, 5)
    data = task.take([UnitCodes(ids_of(300, task), np.repeat(np.arange(60) % 9, 5), sizes)])
    _, text = task.work.batch(data, rate=1.0, step=0, noise=NoiseSource(), source=generator(1))
    gone = (text == task.work.null).all(-1).sum(1)
    assert set(Counter(gone.tolist())) == {0, 1, 2, 3, 4}


def test_the_plan_says_what_moves(tmp_path):
    plan = task_of(tmp_path).plan
    last = plan.stages.train.model_copy(update={"parameters": "last"})
    stages = plan.stages.model_copy(update={"train": last})
    space = task_of(tmp_path / "2").space.space
    with pytest.raises(PlanError, match="last is nothing that tokens have"):
        TokenTask.of(plan.model_copy(update={"stages": stages}), space)
    coarser = replace(space, tokens=plan.tokens.model_copy(update={"levels": 2, "private": 1}))
    with pytest.raises(UsageError, match="16 tokens are private"):
        TokenTask.of(plan, coarser)
    assert task_of(tmp_path / "3", "lora").facts == {"lora": "1.0"}
    assert TokenCodes(space).shape == (8, 8, 1)
