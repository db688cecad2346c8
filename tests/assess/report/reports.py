"""Reports as `evaluate` and `audit` write them, small and made by hand."""

import json
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.rooms import RunDir

WHERE = {"classes": ["zero", "one", "two"], "room": "curator", "notes": ["few images: a doubt"]}


def evaluation(classes: list[str] = WHERE["classes"]) -> dict[str, Any]:
    """A report of format 2 with a value of every shape that one has."""
    counts = {"synthetic": 2000, "held_out": 500, "ceiling": 1297}
    by_class = {name: 10.0 + n for n, name in enumerate(classes)}
    rows = [{"class": c, "count": 50, "recall": 0.9, "precision": None} for c in classes]
    how = {"level": 0.95, "resamples": 1000, "method": "percentile bootstrap of records"}
    matrix = [[40 if a == b else 2 for b in range(len(classes))] for a in range(len(classes))]
    space = {
        "space": "pixels", "verdict": "clean", "n_samples": 2000, "n_null": 500, "copies": 0,
        "copied_samples": [], "close_share": 0.01, "interval": [0.006, 0.0155],
        "expected_share": 0.01, "p_value": 0.4, "threshold": 0.83, "least_score": 0.7,
    }  # fmt: skip
    return {
        **WHERE,
        "format": "dpsynth-evaluation-2",
        "classes": classes,
        "accuracy": {
            "synthetic": 0.9133, "interval": [0.89, 0.93], "interval_how": how, "ceiling": 0.9727,
            "floor": 0.116, "chance": 0.1, "n": counts, "classes": rows, "ceiling_classes": rows,
            "probe_spread": {"synthetic": 0.004, "ceiling": 0.006},
            "confusion": {"counts": matrix, "probes": 3},
            "ceiling_confusion": {"counts": matrix, "probes": 3},
        },
        "frechet": {
            "synthetic": 93.72, "interval": [80.0, 107.5], "interval_how": how, "ceiling": 6.167,
            "floor": 472.2, "relative": 0.198, "unbiased": 92.1, "n": counts,
        },
        "per_class_frechet": {"synthetic": None, "interval": None, "by_class": by_class,
                              "ceiling_by_class": by_class, "ceiling": None, "floor": None},
        "label_consistency": {"synthetic": 0.9555, "interval": [0.94, 0.97], "ceiling": 0.99,
                              "floor": 0.1, "n": counts},
        "inception": {"fid": None, "note": "Inception FID left blank"},
        "copies": {"verdict": "clean", "words": "no sample is nearer", "exact_copies": 0,
                   "spaces": [space, space | {"space": "features"}],
                   "picture": "somewhere/curator/copies.png"},
        "features": {"name": "lenet-84", "width": 84, "n_synthetic": 2000, "n_held_out": 500},
        "protocol": {"probe": "mean of 3 probes", "probe_steps": 500},
        "samples": {"count": 2000, "metadata_sha256": "0" * 64},
        "sheet": "elsewhere/curator/evaluation.png",
        "findings": 5,
    }  # fmt: skip


def audit(leak: bool = False) -> dict[str, Any]:
    """An audit's report with its verdict."""

    def seen(control: str | None, bound: float, promised: float = 1.0) -> dict[str, Any]:
        return {
            "world": control or "plan", "control": control, "attack": "gradient canaries",
            "promised": promised, "bound": bound, "auc": 0.52, "auc_interval": [0.45, 0.59],
            "tpr_at_0.01": 0.04, "tpr_at_0.01_interval": [0.01, 0.1], "correct": 38, "guesses": 50,
        }  # fmt: skip

    head = "FAIL: an attack saw more than the plan promises." if leak else "PASS. No attack saw"
    text = f"{head}\nPromised: epsilon 3.\nPlanted faults:\n- noise left out: seen by canaries"
    controls = dict.fromkeys(("no-noise", "no-clip", "noise-reused", "copied-record"), True)
    return {
        "format": "dpsynth-audit-1",
        "canaries": 200,
        "quick": True,
        "verdict": {"passed": not leak, "leaked": [], "controls_seen": controls, "text": text},
        "attacks": [seen(None, 5.5 if leak else 0.4, 3.0), *(seen(name, 2.2) for name in controls)],
    }


def put(run: RunDir, name: str, report: dict[str, Any]) -> Path:
    """Write a report into the curator's room."""
    path = run.curator / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report))
    return path


def of_these_samples(run: RunDir, report: dict[str, Any]) -> dict[str, Any]:
    """The report as one of the run's own samples."""
    digest = sha256_file(run.released / "samples" / "metadata.csv")
    return {**report, "samples": {"count": 30, "metadata_sha256": digest}}
