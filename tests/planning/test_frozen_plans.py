"""Plans with a frozen prior: what they are, what is refused; older plans stay as they are."""

from pathlib import Path

import pytest

from dpsynth.errors import PlanError
from dpsynth.planning.frozen import FrozenPrior
from dpsynth.planning.schema import Plan
from dpsynth.planning.source_kinds import PriorSource
from dpsynth.planning.training import Prior
from dpsynth.planning.yaml_plan import load_plan, parse_plan, plan_hash

HUB = "stabilityai/stable-diffusion-3-medium-diffusers"
PLAN = f"""\
version: 1
name: frozen
budget: {{epsilon: 2.0, delta: 1e-5}}
private:
  source: {{kind: folder, path: flowers}}
  capacity: 2040
  image: {{height: 64, width: 64, channels: 3}}
  classes: [rose, lotus]
  held_out: {{by: hash, fraction: 0.2}}
public: [{{kind: prior, count: 80}}]
representation: {{kind: latent}}
prior:
  kind: diffusers
  model: {HUB}
  latent: {{channels: 16, height: 8, width: 8}}
  prompt: "a photo of a {{label}}"
stages:
  moments: {{covariance: public, groups: auto, projection: 16}}
  train: {{parameters: lora, rate: 0.02, steps: 10, times: logit-normal, buckets: 1}}
sampling: {{method: guide, start: 0.05, count: 10}}
"""
SHIPPED = Path(__file__).parents[2] / "plans"


def changed(old: str, new: str, text: str = PLAN) -> str:
    assert old in text, old
    return text.replace(old, new)


def test_a_frozen_prior_decides_the_code_and_its_prompts() -> None:
    plan = parse_plan(PLAN)
    assert isinstance(plan.frozen, FrozenPrior)
    assert plan.frozen.hub_id == HUB
    assert plan.representation.code == plan.frozen.latent.dim == 16 * 8 * 8
    assert plan.frozen.prompt_of("rose") == "a photo of a rose"
    assert isinstance(plan.public[0], PriorSource)
    with pytest.raises(PlanError, match="frozen"):
        _ = plan.pretraining


def test_facts_make_the_same_plan_and_hold_no_folder(tmp_path: Path) -> None:
    for text in (PLAN, changed(HUB, "./sd3"), changed(HUB, str(tmp_path))):
        plan = parse_plan(text)
        assert Plan.of_facts(plan.facts()).facts() == plan.facts()
    assert "model" not in parse_plan(changed(HUB, "./sd3")).facts()["prior"]
    assert parse_plan(PLAN).facts()["prior"]["model"] == HUB


def test_a_folder_is_taken_from_the_plans_own_and_moves_without_a_new_hash(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(changed(HUB, "./sd3"))
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.frozen is not None
    assert plan.frozen.model == tmp_path / "sd3"
    assert plan_hash(plan) == plan_hash(parse_plan(changed(HUB, "../elsewhere")))
    assert plan_hash(plan) != plan_hash(parse_plan(PLAN))
    assert plan_hash(parse_plan(PLAN)) != plan_hash(parse_plan(changed("medium", "large")))


def test_a_hub_id_is_one_also_where_a_folder_of_that_name_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies on a machine never decides a plan's hash."""
    before = plan_hash(parse_plan(PLAN))
    (tmp_path / HUB).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert plan_hash(parse_plan(PLAN)) == before
    frozen = parse_plan(PLAN).frozen
    assert frozen is not None
    assert frozen.hub_id == HUB


REFUSED = [
    ("kind: diffusers", "kind: difusers", "`prior.kind`: got"),
    ("  kind: diffusers\n", "", "lacks the key `kind`"),
    (f"model: {HUB}", "model: sd3", "neither a hub id"),
    (f"model: {HUB}", "model: a/b/c", "neither a hub id"),
    (f"model: {HUB}", "model: ./sd3\n  revision: abc", "commit of a hub id"),
    ("height: 8, width: 8}", "height: 8, width: 4}", "one whole factor"),
    ("height: 8, width: 8}", "height: 7, width: 7}", "one whole factor"),
    ("channels: 16, ", "", "lacks the key `channels`"),
    ("channels: 3", "channels: 1", "draws in colour"),
    ("count: 80", "count: 16", "more than as many public images"),
    ("a photo of a {label}", "a flower", "all conditions would be one"),
    ("{kind: latent}", "{kind: pixels}", "has codes of its own"),
    ("{kind: latent}", "{kind: latent, code: 7}", "prior.latent has 1024 numbers"),
    ("start: 0.05, ", "", "plateau"),
    ("parameters: lora, ", "", "weights never move"),
    ("parameters: lora", "parameters: attention", "weights never move"),
    ("covariance: public, groups: auto, projection: 16", "covariance: shared", "no projection"),
    ("covariance: public, groups: auto", "covariance: class, cells: {}", "steered by means"),
    ("covariance: public", "covariance: shared", "releases no second moments"),
    ("[{kind: prior, count: 80}]", "[{kind: prior}, {kind: prior}]", "two sources of kind prior"),
    ("count: 10}", "count: 10, sharpen: public}", "soft codecs"),
    ("buckets: 1", "buckets: 2", "buckets is 2"),
    ("buckets: 1", "buckets: 1, allocation: {}", "allocation"),
    ("{kind: folder, path: flowers}", "{kind: prior}", "private.source.kind"),
    ("representation:", "velocity: {width: 8}\nrepresentation:", "leave `velocity` out"),
    ("representation:", "distillation: {horizon: 0.3}\nrepresentation:", "times"),
]


@pytest.mark.parametrize(("old", "new", "said"), REFUSED)
def test_what_does_not_fit_is_refused_with_its_line(old: str, new: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(changed(old, new))
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint


def test_distillation_needs_a_number_and_factors_to_teach() -> None:
    uniform = changed("times: logit-normal", "times: uniform")
    section = "distillation: {{horizon: {}}}\nrepresentation:"
    assert parse_plan(changed("representation:", section.format(0.35), uniform)).distillation
    for horizon in ("knee", "0.9", "1.0"):
        with pytest.raises(PlanError, match="does not have"):
            parse_plan(changed("representation:", section.format(horizon), uniform))
    alone = "\n".join(line for line in uniform.splitlines() if "train:" not in line)
    with pytest.raises(PlanError, match="LoRA factors"):
        parse_plan(changed("representation:", section.format(0.35), alone))


def test_only_a_frozen_prior_has_latents_draws_itself_and_needs_no_training() -> None:
    assert isinstance(parse_plan(_plain()).prior, Prior)
    with pytest.raises(PlanError, match="a frozen prior's"):
        parse_plan(_plain().replace("{kind: pca, code: 4}", "{kind: latent}"))
    with pytest.raises(PlanError, match="drawn by a frozen prior"):
        parse_plan(_plain().replace("{kind: letters, count: 20}", "{kind: prior}"))
    with pytest.raises(PlanError, match="frozen prior"):
        parse_plan(_plain().replace("steps: 5", "steps: 5, parameters: lora"))


def _plain() -> str:
    return (
        PLAN.split("prior:\n", maxsplit=1)[0]
        .replace("{kind: prior, count: 80}", "{kind: letters, count: 20}")
        .replace("{kind: latent}", "{kind: pca, code: 4}")
        + "stages: {train: {rate: 0.1, steps: 5}}\nsampling: {method: flow}\n"
    )


def test_flux_packs_squares() -> None:
    flux = changed("kind: diffusers\n", "kind: diffusers\n  family: flux\n")
    assert parse_plan(flux).frozen
    odd = changed("height: 8, width: 8}", "height: 1, width: 1}", flux)
    with pytest.raises(PlanError, match="squares of 2 x 2"):
        parse_plan(odd)


def test_methods_that_would_not_use_it_are_refused() -> None:
    for method, said in (("merf", "mean embedding"), ("central-images", "central images")):
        with pytest.raises(PlanError, match=said):
            parse_plan(PLAN.replace("representation:", f"method: {method}\nrepresentation:"))
    assert parse_plan(PLAN.replace("representation:", "method: evolution\nrepresentation:")).frozen


KNOWN = {"digits": "22664554", "digits-flow": "96a6271f", "emoji-wavelet": "00c19813",
         "mnist-straightdp": "af16d7cb", "mnist-merf": "3b911527", "mnist": "e6f22a62"}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_older_plans_keep_their_hash(name: str) -> None:
    """Of the release before frozen priors: later keys at their default are no facts."""
    assert plan_hash(load_plan(SHIPPED / f"{name}.yaml")).startswith(KNOWN[name])
