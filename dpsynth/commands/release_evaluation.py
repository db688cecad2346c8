"""`dpsynth release-evaluation`: spend the plan's evaluation stage."""

from typing import Any

from dpsynth.commands import _options as opt
from dpsynth.console import result


def release_evaluation(
    run: opt.Run,
    *,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    json: opt.Json = False,
) -> None:
    """Release a noisy confusion matrix of the held-out records, once; its scores may be handed out.

    A probe trained on released/samples alone is asked about each held-out record. Accuracy, and
    recall and precision of each class, follow from the noisy matrix, with error bars:
    released/evaluation.json and confusion.png. Needs `stages.evaluation` in the plan, comes after
    `sample`, and closes the run.

    Example: dpsynth release-evaluation runs/digits-evaluated
    """
    opt.use_threads(threads)
    opt.use_workers(workers)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run, private)  # over budget: the data is never opened

    from dpsynth.assess.check import ensure_checked

    ensure_checked(verified)
    from dpsynth.private.confusion import release_evaluation as library_release

    found = library_release(verified)
    result(found, json, lambda: as_text(found))
    opt.say_next(verified)


def as_text(found: dict[str, Any]) -> Any:
    """The released scores for people; every number carries noise."""
    from rich.console import Group

    from dpsynth.console import table
    from dpsynth.released.card import in_words

    rows = [
        (
            one["class"],
            f"{one['records']:.0f} +- {one['records_error']:.0f}",
            in_words(one["recall"]),
            in_words(one["precision"]),
        )
        for one in found["per_class"]
    ]
    records = found["records"]
    return Group(
        table(("class", "held-out records", "recall", "precision"), rows),
        f"accuracy of a probe trained on the samples alone: {in_words(found['accuracy'])}\n"
        f"held-out records: {records['value']:.0f} +- {records['error']:.0f}\n"
        "released, with noise: evaluation.json, confusion.png, confusion.safetensors",
    )
