"""What the paper reports (StraightDP, Tables 1, 2, 4, 5 and 7), to stand beside ours.

Its FID is of Inception features and its public domain is KMNIST; ours is Fashion-MNIST and glyphs.
"""

Value = tuple[float, ...]
"""Accuracies, or other figures, in the order of the row's epsilons; nan where there is none."""

EPSILONS = (0.3, 1.0, 3.0)

# Row of Table 1: (accuracy, FID) at epsilon 0.3, 1 and 3.
TABLE_1: dict[str, tuple[Value, Value]] = {
    "release sampled": ((0.741, 0.762, 0.797), (301.0, 236.6, 241.9)),
    "prior + guidance": ((0.246, 0.236, 0.222), (97.1, 89.3, 87.0)),
    "pixel: uniform": ((0.055, 0.207, 0.620), (72.5, 62.7, 51.6)),
    "pixel: planned": ((0.056, 0.226, 0.641), (74.5, 63.5, 51.8)),
    "pixel: uniform + moments": ((0.484, 0.706, 0.859), (88.4, 63.6, 49.3)),
    "pixel: planned + moments": ((0.443, 0.724, 0.848), (94.1, 66.7, 51.5)),
    "pixel: + low B0": ((0.561, 0.697, 0.788), (100.3, 75.1, 69.5)),
    "latent: uniform": ((0.434, 0.709, 0.808), (63.3, 58.4, 51.7)),
    "latent: planned": ((0.408, 0.695, 0.798), (63.3, 59.2, 53.1)),
    "latent: uniform + moments": ((0.695, 0.814, 0.843), (63.8, 55.7, 49.6)),
    "latent: planned + moments": ((0.682, 0.811, 0.839), (64.1, 56.5, 50.2)),
    "latent: + low B0": ((0.633, 0.792, 0.835), (64.7, 57.6, 51.5)),
}

# Table 2, left: (accuracy, FID) at epsilon 0.3.
TABLE_2_LEFT: dict[str, Value] = {
    "unconstrained": (0.443, 94.1),
    "late injection": (0.402, 103.0),
    "stream clamp": (0.535, 98.7),
    "full backbone": (0.561, 100.3),
}

# Table 2, right: accuracy of the standard and of the constrained backbone by epsilon.
TABLE_2_RIGHT: dict[float, Value] = {
    3.0: (0.848, 0.788),
    1.0: (0.724, 0.697),
    0.5: (0.584, 0.606),
    0.3: (0.443, 0.561),
}

# Table 4: accuracy on MNIST, then accuracies of class, quadrant and stroke on composed digits.
TABLE_4: dict[str, Value] = {
    "one-hot class (reference)": (0.724, 0.106, 1.000, 1.000),
    "per-slot indicators": (0.632, 0.114, 1.000, 0.843),
    "pooled text encoder": (0.464, 0.111, 0.886, 0.748),
    "without projection": (0.32,),
    "without centring or intercept": (0.12,),
}

# Table 5: per-class FID, label consistency, domain rate at epsilon 1.
TABLE_5: dict[str, Value] = {
    "release sampled": (264.4, 0.621, 0.944),
    "pixel: uniform": (107.1, 0.170, 0.649),
    "pixel: planned + moments": (101.4, 0.444, 0.689),
    "pixel: + low B0": (112.6, 0.348, 0.795),
}

# Table 7: (precision, recall) at epsilon 0.3, 1 and 3.
TABLE_7: dict[str, tuple[Value, Value]] = {
    "pixel: uniform": ((0.164, 0.219, 0.246), (0.443, 0.510, 0.543)),
    "pixel: planned": ((0.167, 0.219, 0.248), (0.443, 0.506, 0.548)),
    "pixel: planned + moments": ((0.149, 0.207, 0.258), (0.381, 0.471, 0.519)),
    "pixel: + low B0": ((0.138, 0.228, 0.233), (0.314, 0.405, 0.459)),
    "latent: planned + moments": ((0.032, 0.039, 0.046), (0.331, 0.337, 0.320)),
}

COLUMNS = {
    "1": "accuracy / FID",
    "2": "accuracy / FID",
    "4": "accuracy, or class / quadrant / stroke",
    "5": "FID by class / cons. / domain",
    "7": "precision / recall",
    "gradient": "none",
}
"""What the values of a table's rows are, in their order."""


def values(table: str, row: str, epsilon: float) -> Value:
    """The paper's values for a row at an epsilon; () where it has none.

    >>> values("2", "full backbone", 0.5), values("2", "stream clamp", 0.3)
    ((0.606,), (0.535, 98.7))
    >>> values("4", "composed: per-slot indicators", 1.0)
    (0.114, 1.0, 0.843)
    """
    if table in ("1", "7"):
        known = (TABLE_1 if table == "1" else TABLE_7).get(row)
        if known is None or epsilon not in EPSILONS:
            return ()
        return tuple(part[EPSILONS.index(epsilon)] for part in known)
    if table == "2":
        if epsilon == EPSILONS[0]:
            return TABLE_2_LEFT.get(row, ())
        place = {"unconstrained": 0, "full backbone": 1}.get(row)
        return () if place is None else (TABLE_2_RIGHT[epsilon][place],)
    if table == "4":
        return _captions(row)
    return TABLE_5.get(row, ()) if table == "5" and epsilon == 1.0 else ()


def _captions(row: str) -> Value:
    """Accuracy on MNIST; of composed digits the accuracies of class, quadrant and stroke."""
    composed = row.startswith("composed: ")
    name = row.removeprefix("composed: ")
    known = TABLE_4.get("one-hot class (reference)" if name == "one-hot" else name, ())
    return known[1:] if composed else known[:1]
