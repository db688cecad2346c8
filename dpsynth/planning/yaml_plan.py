"""Plan YAML to a typed plan, strictly: every error names the line and what to type.

Stricter than YAML 1.1: `1e-5` is a number, `010` and `1:30` are text, `yes` is text,
a key is given once, no tags, and aliases cannot blow up.
"""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from dpsynth.artifacts import lock
from dpsynth.errors import PlanError
from dpsynth.planning import complaints
from dpsynth.planning.schema import Plan

S = TypeVar("S", bound=BaseModel)

MAX_BYTES = 1_000_000
MAX_VALUES = 20_000
MAX_DEPTH = 20

_NUMBER = re.compile(r"[-+]?(\.[0-9][0-9_]*|(0|[1-9][0-9_]*)(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_SCALARS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("null", re.compile(r"(~|null|Null|NULL|)$"), "~nN\0"),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), "-+0123456789"),
    ("float", re.compile(rf"({_NUMBER.pattern[:-1]}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
     "-+.0123456789"),
)  # fmt: skip


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars above in place of YAML 1.1's."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", _pattern, ["" if c == "\0" else c for c in _first]
    )


def load_plan(path: Path) -> Plan:
    """Read a plan; relative paths in it are taken from the plan file's folder.

    Raises:
        PlanError: one clear complaint with file, line, what was given and what is expected.
    """
    plan = parse_plan(_read(path), str(path))
    return resolve_paths(plan, Path(os.path.abspath(path)).parent)  # noqa: PTH100 - keeps symlinks


def parse_plan(text: str, file: str = "plan.yaml") -> Plan:
    """The plan in `text`, its paths as written; `file` is for messages."""
    source = complaints.Source(file, tuple(text.splitlines()))
    root = _compose(text, source)
    data = _Reader(source).value(root)
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise complaints.explain(error, root, source) from None


def plan_values(path: Path) -> dict[str, Any]:
    """The plain values of a plan file as they are written, to make another plan of.

    Raises PlanError where it is no such YAML; what the values mean is not asked.
    """
    text = _read(path)
    source = complaints.Source(str(path), tuple(text.splitlines()))
    return dict(_Reader(source).value(_compose(text, source)))


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the plan's facts as canonical JSON: no path, comment or key order enters."""
    return lock.plan_hash(plan.facts())


def resolve_paths(section: S, folder: Path) -> S:
    """The section with every path in it absolute, relative ones taken from `folder`."""
    changed = {key: _resolved(value, folder) for key, value in section}
    return section.model_copy(update=changed)


def _resolved(value: Any, folder: Path) -> Any:
    if isinstance(value, Path):
        return Path(os.path.abspath(folder / value.expanduser()))  # noqa: PTH100
    if isinstance(value, BaseModel):
        return resolve_paths(value, folder)
    if isinstance(value, list):
        return [_resolved(item, folder) for item in value]
    return value


def _read(path: Path) -> str:
    starter = "dpsynth plan --init   (writes a commented starter plan.yaml)"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such plan file", hint=starter) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise PlanError(f"{path}: the plan file cannot be read: {reason}", hint=starter) from None
    if len(raw) > MAX_BYTES:
        raise PlanError(f"{path}: larger than {MAX_BYTES} bytes; a plan is a short YAML file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not a text file; a plan is UTF-8 YAML", hint=starter) from None


def _compose(text: str, source: complaints.Source) -> yaml.Node:
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        given = error.problem or error.context or "not YAML"
        hint = "indent with spaces, not tabs" if "\\t" in given else "fix the YAML on that line"
        raise source.error(line, f"not valid YAML: {given}", hint=hint) from None
    except yaml.reader.ReaderError as error:
        raise source.error(
            text[: error.position].count("\n"),
            f"not valid YAML: {error.reason}",
            hint="a plan is plain text without control characters",
        ) from None
    except RecursionError:
        raise source.error(0, "nested too deeply", hint="a plan has few levels") from None
    if root is None:
        raise source.error(
            0, "the plan is empty", hint="dpsynth plan --init   (writes a commented starter plan)"
        )
    if not isinstance(root, yaml.MappingNode):
        raise source.error(
            root.start_mark.line,
            "the plan is not a mapping; expected lines such as `name: digits`, `budget:`",
            hint="dpsynth plan --init   (writes a commented starter plan)",
        )
    return root


class _Reader:
    """Turns a composed YAML tree into plain values, refusing what a plan never holds."""

    def __init__(self, source: complaints.Source) -> None:
        self._source, self._seen = source, 0

    def value(self, node: yaml.Node, depth: int = 0) -> Any:
        """The node's plain value. An alias counts each time that it is used."""
        self._seen += 1
        line = node.start_mark.line
        if self._seen > MAX_VALUES or depth > MAX_DEPTH:
            raise self._source.error(
                line, "too many or too deeply nested values (aliases count each use)",
                hint="write the values out; a plan has a few dozen",
            )  # fmt: skip
        if isinstance(node, yaml.MappingNode):
            self._tagged(node, "map")
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            self._tagged(node, "seq")
            return [self.value(item, depth + 1) for item in node.value]
        return self._scalar(node)

    def _tagged(self, node: yaml.Node, kind: str) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}":
            raise self._source.error(
                node.start_mark.line, f"the tag {node.tag} is not allowed in a plan",
                hint="remove the tag (the part with `!`)",
            )  # fmt: skip

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        read: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line
            key = self.value(key_node, depth + 1)
            if not isinstance(key, str):
                raise self._source.error(
                    line, f"the key {complaints.shown(key)} is not text",
                    hint="keys of a plan are words, such as `epsilon:`",
                )  # fmt: skip
            if key in read:
                raise self._source.error(
                    line, f"the key `{key}` is given twice; the first is on line {lines[key] + 1}",
                    hint="keep one of the two lines",
                )  # fmt: skip
            read[key], lines[key] = self.value(value_node, depth + 1), line
        return read

    def _scalar(self, node: yaml.Node) -> Any:
        text = str(node.value)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind in {"int", "float"}:
            return self._number(node, kind, text)
        self._tagged(node, "str")
        if not text.isprintable():
            raise self._source.error(
                node.start_mark.line, "text with a line break or control character",
                hint="keep names and paths on one line of printable characters",
            )  # fmt: skip
        return text

    def _number(self, node: yaml.Node, kind: str, text: str) -> int | float:
        digits = text.replace("_", "").lower()
        if digits.lstrip("+-") in {".inf", ".nan"}:
            return float(digits.replace(".", ""))
        try:
            return int(digits) if kind == "int" and len(digits) <= 40 else float(digits)
        except ValueError:
            raise self._source.error(
                node.start_mark.line, f"{complaints.shown(text)} is not a number",
                hint="write a plain number, such as 1, 0.5 or 1e-5",
            ) from None  # fmt: skip
