"""`dpsynth audit`: attack models that are trained under the plan with canaries planted."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dpsynth.commands import _options as opt
from dpsynth.console import counted, note, result, table
from dpsynth.errors import AuditError, UsageError, typed

Quick = Annotated[
    bool,
    typer.Option("--quick", help="No reference models and fewer samples: minutes on a small plan."),
]
Canaries = Annotated[
    int | None,
    typer.Option(
        "--canaries",
        metavar="N",
        help="Canaries of each training, 50 to 2000, each put in by a fair coin. Default: 200, or "
        "fewer where the release is small.",
    ),
]
CanaryImages = Annotated[
    Literal["patterns", "public"],
    typer.Option(
        "--canary-images",
        metavar="KIND",
        help="patterns (default): worst cases that no record looks like; public: images of the "
        "plan's public sources, under wrong labels.",
        show_default=False,
    ),
]
References = Annotated[
    int | None,
    typer.Option(
        "--references",
        metavar="N",
        help="Models to train for likelihood ratios, 0 to 256. Default: 8, with --quick none.",
    ),
]
PublicData = Annotated[
    bool,
    typer.Option(
        "--public-data",
        help="Public images stand in for the private records, which are not opened: the verdict is "
        "about plan and code alone, and may be published.",
    ),
]


def audit(
    run: opt.Run,
    *,
    quick: Quick = False,
    canaries: Canaries = None,
    canary_images: CanaryImages = "patterns",
    references: References = None,
    public_data: PublicData = False,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Try to break the plan: train with canaries planted, guess who was in. Exit 7 if it fails.

    Trains models of its own by the plan's mechanisms, in curator/audit/; the run's own spend,
    transcript and ledger stay as they are. Attacks guess which canaries were put in, from released
    moments, gradients, model and samples; right guesses give a lower bound on epsilon (95%).

    It fails if a bound is above what the accountant promises, or if it misses one of four faults
    that it plants itself: no noise, no clip, noise used twice, a record copied into the output.
    Passing proves no privacy (docs/privacy/audit.md). Stopped, it goes on with the next training.

    Example: dpsynth audit runs/digits --quick
    """
    opt.use_threads(threads)
    opt.use_workers(workers)
    from dpsynth.planning.verify import load_verified

    if public_data and private is not None:
        raise UsageError(
            "--private and --public-data were both given, and with --public-data no private "
            "record is opened",
            hint=typed("dpsynth", "audit", run, "--public-data"),
        )
    verified = load_verified(run, private)

    from dpsynth.assess.audit.run import Asked
    from dpsynth.assess.audit.run import audit as library_audit

    shown = public_data or opt.may_show(verified, show_curator)
    asked = Asked(quick, canaries, canary_images, references, public_data)
    report = library_audit(verified, asked)
    where = Path(report["where"])
    found = {"ok": report["passed"], **opt.findings(report, where, shown)}
    result(found, json, lambda: _as_text(found))
    if warned := len(report["verdict"]["warned"]):
        note(f"{counted(warned, 'warning')} in the verdict: read {where} before a hand-out")
    if not report["passed"]:
        raise AuditError(
            "the audit failed: read its verdict before anything is handed out",
            hint=f"{where} (with --show-curator it is printed too)",
        )
    opt.say_next(verified)


def _as_text(found: dict[str, Any]) -> Any:
    """Table and verdict for people; where these may not be shown, their number and place."""
    from rich.console import Group
    from rich.text import Text

    if "verdict" not in found:
        passed = "passed" if found["ok"] else "FAILED"
        what = counted(found["findings"], "curator-only finding")
        return Text(f"audit: {passed}; {what} in {found['where']}")
    columns = ("attack", "world", "promised", "bound", "AUC", "95% interval")
    rows = [
        (
            row["attack"],
            row["world"],
            f"{row['promised']:.4g}",  # as the verdict rounds them
            f"{row['bound']:.4g}",
            f"{row['auc']:.3f}",
            "{:.3f} to {:.3f}".format(*row["auc_interval"]),
        )
        for row in found["attacks"]
    ]
    parts = [table(columns, rows, title="attacks on canaries"), *_own(found["own_run"])]
    lines = [found["verdict"]["text"], f"report:  {found['where']}", f"picture: {found['picture']}"]
    lines += [f"note: no attack looks at stages.{name}" for name in found["not_attacked"]]
    return Group(*parts, Text("\n".join(lines)))


def _own(rows: list[dict[str, Any]]) -> list[Any]:
    """Membership inference on the run's own model and samples, where there were any."""
    if not rows:
        return []
    columns = ("attack", "AUC", "95% interval", "TPR at FPR 0.1%", "TPR at FPR 1%")
    shown = [
        (
            row["attack"],
            f"{row['auc']:.3f}",
            "{:.3f} to {:.3f}".format(*row["auc_interval"]),
            row["tpr_at_0.001"],
            row["tpr_at_0.01"],
        )
        for row in rows
    ]
    return [table(columns, shown, title="membership of this run's own records")]
