"""The card of a hand-out folder, in Markdown: what was spent, on what, and what it does not cover.

Its builder takes the lock, the transcript and what lies in `released/`, and nothing else.
"""

from collections.abc import Sequence
from typing import Any

from dpsynth.accounting.compose import epsilon
from dpsynth.accounting.statistics import BucketedGradientSums, sensitivity
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.transcript import Transcript
from dpsynth.console import counted
from dpsynth.planning.frozen import KIND as FROZEN
from dpsynth.planning.units import RECORD, UnitColumn, read_unit, unit_words
from dpsynth.released.card_contents import FILES, drawn, literal

UNSAFE = "UNSAFE: the noise came from a fixed seed. Nothing here is private; for tests alone."
PUBLIC_DEMO = (
    "PUBLIC DEMO: the plan declares its private source public. Nothing was at stake, and "
    "curator-only values may have been shown."
)


def stamps(lock: Lock) -> dict[str, str]:
    """Text fields for every image and sheet of a run."""
    fields = {"dpsynth": "synthetic"}
    if lock.unsafe_seed is not None:
        fields["dpsynth-unsafe"] = UNSAFE
    if lock.facts["private"]["public"]:
        fields["dpsynth-demo"] = PUBLIC_DEMO
    return fields


def spent(lock: Lock, transcript: Transcript) -> float:
    """Epsilon of every charge in the transcript, composed, rounded up."""
    return _composed(lock, charged_slots(lock, transcript))


def build_card(
    lock: Lock,
    transcript: Transcript,
    samples: dict[str, dict[str, Any]],
    files: Sequence[str] = (),
    evaluation: dict[str, Any] | None = None,
) -> str:
    """The card's text.

    `samples`: summaries of the finished sample folders, by folder name; `files`: what else lies in
    the hand-out folder; `evaluation`: its `evaluation.json`, where an evaluation was charged, and
    `of_samples`, the folder that it is of (None for one that was drawn anew since).

    Raises DataError: a summary holds something else than a sampler writes.
    """
    parts = [
        f"# {lock.facts['name']}: synthetic images under differential privacy",
        *(f"> **{text}**" for key, text in stamps(lock).items() if key != "dpsynth"),
        _guarantee(lock, transcript),
        _spending(lock, transcript),
        *([] if evaluation is None else [_evaluated(lock, evaluation)]),
        _adversary(lock),
        _outside(lock),
        _noise(lock),
        _contents(lock, samples, files),
        _verify(transcript),
    ]
    return "\n\n".join(parts) + "\n"


def _guarantee(lock: Lock, transcript: Transcript) -> str:
    budget, unit = lock.budget, read_unit(lock.budget["unit"])
    state = "closed" if _is_closed(transcript) else "still open: more may be spent"
    return _section(
        "Guarantee",
        f"Spent: **epsilon {spent(lock, transcript):.4f} at delta {budget['delta']:g}**, composed "
        f"over every charge in `transcript.jsonl` by privacy-loss distributions, rounded up. "
        f"Budget: epsilon {budget['epsilon']:g}, delta {budget['delta']:g}; verified before any "
        f"private record was read. The transcript is {state}.\n\n"
        f"- Adjacency: {budget['adjacency']} {'record' if unit is None else unit.column}.\n"
        f"- Unit of privacy: one {unit_words(budget['unit'])}{_unit_meaning(unit)}\n"
        f"- Declared number of {'records' if unit is None else 'units'}: "
        f"{lock.facts['private']['capacity']:,}. It is declared, not counted."
        + _delta_warning(lock),
    )


def _unit_meaning(unit: UnitColumn | None) -> str:
    """What the unit covers, and whom it does not cover."""
    if unit is None:
        return (
            ", that is one labelled image. Someone with several images in the data has a weaker "
            "guarantee (epsilon grows with their number)."
        )
    return (
        f". The guarantee covers all images of one {unit.column} together, however many there "
        f"are; of more than {unit.most}, the others were not used. Every image whose "
        f"{unit.column} has another name or number counts as someone else's."
    )


def _delta_warning(lock: Lock) -> str:
    limit = 1 / (10 * lock.facts["private"]["capacity"])
    if lock.budget["delta"] <= limit:
        return ""
    return (
        f"\n- **Warning**: delta {lock.budget['delta']:g} is above 1/(10 N) = {limit:.1e}; a "
        f"mechanism with such a delta may expose some records outright."
    )


def _spending(lock: Lock, transcript: Transcript) -> str:
    charged = charged_slots(lock, transcript)
    settled = {line["slot"] for line in transcript.lines if line["kind"] == "settle"}
    rows = ["| mechanism | charges | noise / sensitivity | rate | steps | epsilon alone |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    stages = dict.fromkeys(slot.stage for slot in charged)
    for stage in stages:
        mine = [slot for slot in charged if slot.stage == stage]
        rows += [_row(lock, stage, mine), *_round_rows(stage, mine)]
    lost = [slot for slot in charged if slot.id not in settled]
    note = ""
    if lost:
        was, count = ("was", "counts") if len(lost) == 1 else ("were", "count")
        note = f"\n\n{counted(len(lost), 'charge')} {was} lost to a crash and {count} as spent."
    note += _buckets(lock, charged)
    if not charged:
        rows = ["Nothing was spent yet."]
    return _section("Epsilon by mechanism", "\n".join(rows) + note)


def _row(lock: Lock, stage: str, slots: Sequence[Slot]) -> str:
    multipliers = sorted({_multiplier(slot) for slot in slots})
    noise = ", ".join(f"{value:.4g}" for value in multipliers[:3])
    if _round_rows(stage, slots):
        noise = "by round"
    rates = sorted({slot.rate for slot in slots if slot.rate is not None})
    steps = sum(slot.steps or 0 for slot in slots)
    return (
        f"| {stage} | {len(slots)} | {noise} | {', '.join(f'{r:g}' for r in rates) or '-'} | "
        f"{steps or '-'} | {_composed(lock, slots):.4f} |"
    )


def _round_rows(stage: str, slots: Sequence[Slot]) -> list[str]:
    """One row a round where the stage released several; epsilon is what they compose to."""
    releases = list(dict.fromkeys(slot.release for slot in slots))
    if stage == "train" or len(releases) < 2:
        return []
    rows = []
    for name in releases:
        mine = [slot for slot in slots if slot.release == name]
        noise = _multiplier(mine[0])
        rows.append(f"| - {name} | {len(mine)} | {noise:.4g} | - | - | - |")
    return rows


def _buckets(lock: Lock, charged: Sequence[Slot]) -> str:
    """What each time bucket's steps had, where clips differ by bucket; empty where they do not."""
    edges = (lock.allocation or {}).get("edges")
    slot = next((s for s in charged if isinstance(s.statistic, BucketedGradientSums)), None)
    if slot is None or not isinstance(slot.statistic, BucketedGradientSums) or not edges:
        return ""
    rows = ["| flow time | clip | noise / clip |", "| --- | --- | --- |"]
    for clip, low, high in zip(slot.statistic.clips, edges, edges[1:], strict=False):
        rows.append(f"| {low:.3g} to {high:.3g} | {clip:.5g} | {slot.noise_std / clip:.4g} |")
    return (
        "\n\nSteps of training took these time buckets in turn, each with a clip of its own and "
        "all with one absolute noise; chosen from public data before anything was spent. The noise "
        "/ sensitivity above is that of the largest clip.\n\n" + "\n".join(rows)
    )


def _multiplier(slot: Slot) -> float:
    """Noise over sensitivity: that of the largest clip, where clips differ by time bucket."""
    return slot.noise_std / sensitivity(slot.statistic)


def _composed(lock: Lock, slots: Sequence[Slot]) -> float:
    if not slots:
        return 0.0
    delta = lock.budget["delta"] - lock.delta_slack
    return epsilon([slot.event() for slot in slots], delta).pessimistic


def charged_slots(lock: Lock, transcript: Transcript) -> list[Slot]:
    """The slots that were spent, forfeited ones too."""
    slots = {slot.id: slot for slot in lock.slots}
    ids = [line["slot"] for line in transcript.lines if line["kind"] == "charge"]
    return [slots[number] for number in ids if number in slots]


def _is_closed(transcript: Transcript) -> bool:
    return any(line["kind"] == "close" for line in transcript.lines)


def _evaluated(lock: Lock, found: dict[str, Any]) -> str:
    """The released scores, each with its interval."""
    rows = ["| class | recall | precision |", "| --- | --- | --- |"]
    rows += [
        f"| {literal(one['class'])} | {in_words(one['recall'])} | {in_words(one['precision'])} |"
        for one in found["per_class"]
    ]
    folder = found.get("of_samples")
    of = f"`{folder}/`" if folder else "samples that were drawn anew since, **not those in here**"
    records = found["records"]
    return _section(
        "Charged evaluation",
        f"A classifier trained on {of} alone ({found['samples']['count']:,} images), asked about "
        f"held-out private records: accuracy **{in_words(found['accuracy'])}**. The matrix that "
        "this follows from carries noise and is among the charges above: using these figures "
        "costs nothing more. Held-out records, by that matrix: "
        f"{records['value']:.0f} +- {records['error']:.0f}. In brackets stand intervals at "
        f"{found['level']:.0%}, by noise and sampling together; errors and the matrix are in "
        "`evaluation.json`." + _independent(lock) + "\n\n" + "\n".join(rows),
    )


def _independent(lock: Lock) -> str:
    if lock.budget["unit"] == RECORD:
        return ""
    return (
        " Sampling errors take images for independent; those of one unit are not, so that they are "
        "larger. A unit of several images counts by a share of each."
    )


def in_words(given: dict[str, Any]) -> str:
    """A score of `evaluation.json` for people.

    >>> in_words({"value": 0.812, "error": 0.031, "low": 0.75, "high": 0.87})
    '0.812 (0.750 to 0.870)'
    >>> in_words({"value": None, "error": None, "low": 0.2, "high": 1.0})
    'unknown (0.200 to 1.000)'
    """
    if given["value"] is None:
        return f"unknown ({given['low']:.3f} to {given['high']:.3f})"
    return f"{given['value']:.3f} ({given['low']:.3f} to {given['high']:.3f})"


def _adversary(lock: Lock) -> str:
    return _section(
        "What the adversary sees",
        "Everything in this folder: releases, models, images, lock, transcript, this card. "
        "The guarantee holds for someone who knows all of it, the code, and every private "
        f"{'record' if lock.budget['unit'] == RECORD else 'unit'} "
        f"but one, with any amount of computing. Intermediate gradients, batches and checkpoints "
        f"of the private training were not released; the accounting of "
        f"`{lock.facts['name']}` covers them all the same.",
    )


def _frozen(lock: Lock) -> str:
    """Whose samples these sources are, of a plan with a frozen prior; else nothing."""
    prior = lock.facts.get("prior", {})
    if prior.get("kind") != FROZEN:
        return ""
    named = literal(prior["model"]) if "model" in prior else "a folder of the custodian's"
    family = literal(prior["family"])
    return (
        f" The prior is a pretrained text-to-image model of the family {family}, {named}; "
        "`public/calibration.json` has the hash of its weights."
    )


def _outside(lock: Lock) -> str:
    items = [
        "Public data and pretrained models: the guarantee covers the private records alone. "
        f"Public sources here: {', '.join(s['kind'] for s in lock.facts['public'])}."
        f"{_frozen(lock)}",
        "Timing, crashes, memory use, or anything else seen by someone at the custodian's machine.",
        "Which run was picked: choosing between runs by scores on private records costs privacy "
        "that no charge here counts. Pick by public scores, or by a charged evaluation.",
        "The custodian's `curator/` folder, which holds private values and is never handed out.",
        "What is true of people in general: a conclusion that would be drawn from the data without "
        "a person's image may still be drawn about that person.",
        "That noise was really drawn: a transcript can show what was declared, not what was done.",
    ]
    if (lock.facts["private"].get("captions") or {}).get("public"):
        items.insert(
            1,
            "That someone knows the captions of the private records: the plan declares them "
            "public. Training saw them with the images, under the same charges.",
        )
    return _section("Outside the guarantee", "\n".join(f"- {item}" for item in items))


def _noise(lock: Lock) -> str:
    source = (
        "a cryptographic generator seeded by the operating system, whose state is never saved"
        if lock.unsafe_seed is None
        else "a FIXED SEED (UNSAFE, for tests alone)"
    )
    lines = [f"Noise and sampling coins come from {source}."]
    stages = {slot.stage for slot in lock.slots}
    if "moments" in stages:
        lines.append(
            "The moments carry discrete Gaussian noise on a grid; its distance to the continuous "
            f"Gaussian is bounded and paid for by {lock.delta_slack:.1e} of delta."
        )
    if "embedding" in stages:
        lines.append(
            "Counts and sums of features carry discrete Gaussian noise on a grid; its distance to "
            f"the continuous Gaussian is paid for by {lock.delta_slack:.1e} of delta."
        )
    if "votes" in stages:
        lines.append(
            "The votes for every member, also for one that no record chose, carry discrete "
            "Gaussian noise on a grid; its distance to the continuous Gaussian is paid for by "
            f"{lock.delta_slack:.1e} of delta."
        )
    if "central" in stages:
        lines.append(
            "Central images are of random subsets whose coins are never kept, and carry discrete "
            "Gaussian noise on a grid; its distance to the continuous Gaussian is paid for by "
            f"{lock.delta_slack:.1e} of delta."
        )
    if "evaluation" in stages:
        lines.append("So does the confusion matrix of the evaluation.")
    if "train" in stages:
        lines.append(
            "DP-SGD's noise is a float64 Gaussian, and noisy sums are rounded to a declared grid; "
            "clipped gradients are added in float32 over at most 128 records at a time, unless the "
            "training was told to add exactly: a mitigation of floating-point attacks, not a proof "
            "against them."
        )
    return _section("Noise", " ".join(lines))


def _contents(lock: Lock, samples: dict[str, dict[str, Any]], files: Sequence[str]) -> str:
    said = {**FILES, **_means_alone(lock)}
    rows = [f"- `{name}`: {what}." for name, what in said.items() if name in files]
    rows += [drawn(folder, summary) for folder, summary in sorted(samples.items())]
    classes = ", ".join(literal(name) for name in lock.facts["private"]["classes"])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(lock.versions.items()))
    if not samples:
        rows.append("- No images were drawn yet.")
    text = "\n".join(rows)
    return _section(
        "Contents",
        f"{text}\n\nClasses: {classes}. "
        f"Every file and its SHA-256: `manifest.json`. Made with {versions}.",
    )


def _means_alone(lock: Lock) -> dict[str, str]:
    """What the file of the moments holds where no second moments were released."""
    moments = lock.facts["stages"].get("moments") or {}
    if moments.get("covariance") != "public":
        return {}
    return {"moments.safetensors": "noisy counts and sums of codes, without second moments"}


def _verify(transcript: Transcript) -> str:
    partial = "" if _is_closed(transcript) else " --partial"
    return _section(
        "How to verify",
        "Needs neither the data nor a GPU, and the light install alone:\n\n"
        f"```\ndpsynth replay{partial} --head {transcript.head} .\n```\n\n"
        "It recomputes epsilon from the charges, checks that they are among what the lock "
        "verified, and that no line was changed, dropped, moved or added. Head of the transcript "
        f"(compare it with what the custodian publishes elsewhere):\n\n`{transcript.head}`",
    )


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}"
