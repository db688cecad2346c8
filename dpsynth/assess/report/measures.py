"""What an evaluation's report holds, of whatever format: a measure that is absent has no row.

A measure is an entry with a `synthetic` value; `plain`, `ceiling`, `floor` and `interval` are what
it has beside. Nothing is assumed of which measures there are, so that older and later reports can
be read too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpsynth.assess.report.copied import copies_table
from dpsynth.assess.report.tables import (
    Cell,
    Table,
    class_table,
    interval,
    is_matrix,
    is_number,
    is_records,
    matrix_table,
    records_table,
    spaced,
)
from dpsynth.released.page.render import number

VALUES = {
    "synthetic": "synthetic",
    "plain": "without augmentation",
    "ceiling": "ceiling",
    "floor": "floor",
}
NAMES = {
    "accuracy": "accuracy of a small probe",
    "accuracy_wide": "accuracy of a wide probe",
    "copies": "copy check",
    "diversity": "diversity inside a class",
    "fid": "FID",
    "frechet": "Frechet distance",
    "inception": "Inception features",
    "kernel": "kernel distance (KID)",
    "lpips": "LPIPS between images of one caption",
    "per_class_frechet": "Frechet distance inside a class",
    "perceptual": "LPIPS between images of one caption",
    "results": "what each attack saw",
    "precision_recall": "precision and recall",
    "density_coverage": "density and coverage",
}
_LOWER = {"fid", "frechet", "kernel", "per_class_frechet"}
_HIGHER = {
    "accuracy", "accuracy_wide", "coverage", "density", "domain_rate", "label_consistency",
    "precision", "recall",
}  # fmt: skip
_FIRST = ("accuracy", "accuracy_wide", "label_consistency", "domain_rate", "frechet", "fid")
# What describes a report or a measure, and is none.
_ABOUT = {
    "ceiling_confusion", "features", "findings", "format", "interval", "interval_how", "n", "name",
    "noise_source", "note", "notes", "picture", "private_source_declared_public", "probe_spread",
    "probes", "protocol", "room", "samples", "samples_plain", "sheet", "unbiased_interval", "where",
    "who_may_see_it", "width",
}  # fmt: skip
_COLUMNS = {"count": "records"}
_MOST_DEEP = 6


@dataclass
class Measures:
    """A report's tables, remarks on it, and files of pictures that it names.

    `methods`: how intervals came about, as (measures, method).
    """

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    methods: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)


def measures(report: Mapping[str, Any]) -> Measures:
    """What to show of a report, in a stable order; nothing for a report without measures."""
    found = Measures(notes=[str(note) for note in _listed(report.get("notes"))])
    reader = _Reader([str(name) for name in _listed(report.get("classes"))], found, {}, {})
    reader.read({k: v for k, v in report.items() if k != "classes"}, "", 0)
    found.tables.extend(
        class_table(columns, _sentence(f"{title}, by class."), reader.classes)
        for title, columns in reader.by_class.items()
        if any(value is not None for values in columns.values() for value in values)
    )
    found.methods = [
        (f"interval: {', '.join(names)}", how) for how, names in reader.methods.items()
    ]
    found.pictures = sorted(set(_pictures(report, 0)))
    return found


def name_of(key: str) -> str:
    """A key as people read it.

    >>> name_of("frechet"), name_of("label_consistency")
    ('Frechet distance', 'label consistency')
    """
    return NAMES.get(key, spaced(key))


@dataclass
class _Reader:
    """Goes through a report.

    `by_class`: columns of values by class, by measure; `methods`: how intervals came about.
    """

    classes: list[str]
    found: Measures
    by_class: dict[str, dict[str, list[Any]]]
    methods: dict[str, list[str]]

    def read(self, part: Mapping[str, Any], title: str, depth: int) -> None:
        """Tables of a part's own measures, then of what it holds."""
        own = {key: part[key] for key in sorted(part, key=_place) if key not in _ABOUT}
        rows = {key: value for key, value in own.items() if _is_measure(value)}
        if title == NAMES["copies"] and (table := copies_table(part)) is not None:
            self.found.tables.append(table)
            return
        if not depth:  # an older report's measure without ceiling or floor
            rows = {k: v for k, v in own.items() if k in rows or is_number(v)}
        else:
            self._remark(own, title)
        if rows:
            self.found.tables.append(_table(rows, _caption(title, part)))
        if isinstance(part.get("note"), str):
            self.found.notes.append(part["note"])
        for key, value in own.items():
            self._entry(key, value, title, depth)

    def _entry(self, key: str, value: object, title: str, depth: int) -> None:
        name = f"{title}: {name_of(key)}" if title else name_of(key)
        if is_matrix(value):
            where = title or name
            caption = f"{where}: a row for each true class, a column for each answer"
            caption += ", counted over all probes." if key == "counts" else "."
            self.found.tables.append(matrix_table(value, _sentence(caption), self.classes))
        elif columns := self._columns(key, value):
            self.by_class.setdefault(title or name, {}).update(columns)
        elif is_records(value):
            self.found.tables.append(records_table(value, _sentence(f"{name}.")))
        elif isinstance(value, Mapping) and depth < _MOST_DEEP:
            how = value.get("interval_how")
            if isinstance(how, Mapping) and isinstance(how.get("method"), str):
                self.methods.setdefault(how["method"], []).append(name)
            inner = value if not _is_measure(value) else _beside(value)
            self.read(inner, title if key == "confusion" else name, depth + 1)

    def _columns(self, key: str, value: object) -> dict[str, list[Any]]:
        """Values by class under the names of their columns; none for anything else."""
        if not self.classes:
            return {}
        of = "ceiling" if key.startswith("ceiling") else ""
        if is_records(value) and [row.get("class") for row in value] == self.classes:
            keys = [k for k in value[0] if k != "class" and not (of and k == "count")]
            return {
                f"{of} {_COLUMNS.get(k, spaced(k))}".strip(): [r[k] for r in value] for k in keys
            }
        if isinstance(value, Mapping) and list(value) == self.classes:
            value = list(value.values())
        listed = _listed(value)
        if len(listed) == len(self.classes) and all(v is None or is_number(v) for v in listed):
            return {of or ("synthetic" if "by_class" in key else spaced(key)): listed}
        return {}

    def _remark(self, own: Mapping[str, Any], title: str) -> None:
        """Plain entries of a part that is no table: a copy check's verdict, for one."""
        plain = {
            k: v for k, v in own.items() if v is not None and not isinstance(v, Mapping | list)
        }
        told = [str(plain.pop(key)) for key in ("verdict", "words") if key in plain]
        said = [": ".join(told)] if told else []
        said += [f"{name_of(key)} {number(value)}" for key, value in plain.items()]
        if said:
            self.found.notes.insert(0, _sentence(f"{title}: {'; '.join(said)}."))


def _is_measure(value: object) -> bool:
    return isinstance(value, Mapping) and "synthetic" in value


def _beside(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a measure holds beside the values of its row."""
    return {k: v for k, v in value.items() if isinstance(v, Mapping | list) and k not in VALUES}


def _table(rows: Mapping[str, Any], caption: str) -> Table:
    """Measures as rows; columns that no measure has are left out."""
    whole = {key: value if isinstance(value, Mapping) else {"synthetic": value}
             for key, value in rows.items()}  # fmt: skip
    columns = [c for c in VALUES if any(c in value for value in whole.values())]
    shown = []
    for key, value in whole.items():
        more = [f"{name_of(k)} {number(v)}" for k, v in value.items()
                if k not in VALUES and is_number(v)]  # fmt: skip
        if "synthetic" in value and value["synthetic"] is None:
            why = value.get("note")
            more.append(why if isinstance(why, str) else "not measured: a note below says why")
        better = (
            "lower is better" if key in _LOWER else "higher is better" if key in _HIGHER else ""
        )
        heading = Cell(name_of(key), " · ".join([better, *more] if better else more))
        cells = [Cell(number(value.get(c)), _interval(value, c)) for c in columns]
        shown.append((heading, tuple(cells)))
    return Table(caption, ("measure", *(VALUES[c] for c in columns)), tuple(shown))


def _interval(value: Mapping[str, Any], column: str) -> str:
    """The interval of a measure's column, whichever way the report spells it."""
    if column != "synthetic":
        return interval(value.get(f"{column}_interval"))
    said = value.get("interval")
    return interval(said.get("synthetic", said) if isinstance(said, Mapping) else said)


def _caption(title: str, part: Mapping[str, Any]) -> str:
    """What a table holds, in which features, of how many images."""
    said = [_sentence(f"{title}.")] if title else ["Measured on held-out records."]
    features = part.get("features")
    if isinstance(features, Mapping):
        counts = [f"{number(features[k])} {spaced(k.removeprefix('n_'))}"
                  for k in sorted(features) if k.startswith("n_")]  # fmt: skip
        said.append(f"Features: {features.get('name', 'unnamed')}. Images: {', '.join(counts)}.")
    said.append("Small print under a value: its interval.")
    return " ".join(said)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _place(key: str) -> tuple[int, str]:
    """Where a measure stands: the ones looked for first, then by name."""
    last = key.startswith("ceiling")
    return (_FIRST.index(key) if key in _FIRST else len(_FIRST) + last, key)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _pictures(part: object, depth: int) -> Iterator[str]:
    """Names of PNG files anywhere in a report."""
    if isinstance(part, str) and part.endswith(".png"):
        yield part
    if depth < _MOST_DEEP:
        for value in part.values() if isinstance(part, Mapping) else _listed(part):
            yield from _pictures(value, depth + 1)
