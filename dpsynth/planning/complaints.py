"""One clear complaint about a plan: file and line, what was given, what to type."""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from dpsynth.errors import PlanError
from dpsynth.planning.schema import Plan
from dpsynth.planning.section import MISFIT, Section
from dpsynth.planning.training import PRIOR_TAGS

Loc = tuple[int | str, ...]

# What pydantic's error types mean to someone who writes a plan.
_EXPECTED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": 'text, such as "0" in quotes',
    "list_type": "a list, such as [a, b]",
    "path_type": "a path as text",
    "model_type": "a section: indented `key: value` lines",
    "model_attributes_type": "a section: indented `key: value` lines",
    "dict_type": "a section: indented `key: value` lines",
}
_SECTION = ("model_type", "model_attributes_type", "dict_type")
_BOUND = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_EXAMPLES = {
    "epsilon": "1.0",
    "delta": "1e-5",
    "capacity": "60000",
    "rate": "0.02",
    "version": "1",
    "unit": "record` or `unit: {column: patient, most: 8}",
    "column": "patient",
    "most": "8",
    "patches": "[2, 2, 4]",
}


@dataclass(frozen=True)
class Source:
    """A plan's file name, for messages, and its lines."""

    file: str
    lines: tuple[str, ...]

    def error(self, line: int, problem: str, *, hint: str = "") -> PlanError:
        """The complaint about a line (counted from 0), showing that line."""
        text = self.lines[line].rstrip() if line < len(self.lines) else ""
        printable = "".join(c if c.isprintable() else " " for c in text)[:120]
        shown_line = f"\n  {line + 1} | {printable}" if printable.strip() else ""
        return PlanError(f"{self.file}:{line + 1}: {problem}{shown_line}", hint=hint)


def shown(value: Any) -> str:
    """A given value as a message shows it."""
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value[:60]}"' if isinstance(value, str) else str(value)


def explain(error: ValidationError, root: yaml.Node, source: Source) -> PlanError:
    """The first problem by line, and how many more there are on other lines."""
    found: dict[tuple[int, str], list[Any]] = {}
    for problem in error.errors(include_url=False):
        line, path = _place(problem, root)
        found.setdefault((line, path), []).append(problem)
    # A misspelt key or an unknown kind explains a missing one, so it comes first.
    (line, path), problems = min(found.items(), key=lambda item: (_rank(item[1][0]), item[0]))
    text, hint = _words(path, problems)
    others = sorted({at + 1 for at, _ in found if at != line})
    if others:
        text += f" (also look at line {', '.join(map(str, others))})"
    return source.error(line, text, hint=hint)


def _rank(problem: Any) -> int:
    """Which of several problems is told: the smallest."""
    if problem["type"] == "extra_forbidden":
        return 0
    unknown_kind = problem["type"] == "literal_error" and problem["loc"][-1] in ("kind", "by")
    return 1 if unknown_kind else 2


def _words(path: str, problems: Sequence[Any]) -> tuple[str, str]:
    first = problems[0]
    kind, key = first["type"], path.rpartition(".")[2]
    parent = path.rpartition(".")[0]
    if kind == "missing":
        where = f"`{parent}:`" if parent else "the top level"
        example = _EXAMPLES.get(key, "...")
        return f"{where} lacks the key `{key}`", f"add a line `{key}: {example}` under {where}"
    if kind == "extra_forbidden":
        return f"unknown key `{path}`", _spelling(key, first["loc"])
    if kind == "union_tag_not_found":
        tag = str(first["ctx"]["discriminator"]).strip("'")
        return f"`{path}` lacks the key `{tag}`", f"add a line `{tag}: ...` under `{key}:`"
    if kind == "union_tag_invalid":
        tag, tags = str(first["ctx"]["discriminator"]).strip("'"), first["ctx"]["expected_tags"]
        given = first["ctx"]["tag"]
        hint = _nearest(tag, given, tags) or f"write `{tag}:` with one of them"
        return f"`{path}.{tag}`: got {shown(given)}, expected {tags}", hint
    if kind == MISFIT:
        # Keys in the reason are seen from the section that holds them.
        section = ".".join(str(part) for part in first["loc"] if part not in PRIOR_TAGS)
        hint = first["ctx"]["hint"] or "change the plan so that this holds"
        return f"{section + ': ' if section else ''}{first['ctx']['reason']}", hint
    if kind == "value_error":
        reason = first["msg"].removeprefix("Value error, ")
        return f"{path + ': ' if path else ''}{reason}", "change the plan so that this holds"
    expected = " or ".join(dict.fromkeys(_expected(problem) for problem in problems))
    given = first["input"]
    hint = (
        _nearest(key, given, expected)
        or (_section_hint(path, given, first["loc"]) if kind in _SECTION else "")
        or _example(path, expected)
    )
    return f"`{path}`: got {shown(given)}, expected {expected}", hint


def _nearest(key: str, given: Any, expected: str) -> str:
    """The quoted word in `expected` that was probably meant; empty where none is near."""
    known = re.findall(r"'([^']*)'", expected)
    near = difflib.get_close_matches(str(given), known, n=1, cutoff=0.6)
    return f"did you mean `{key}: {near[0]}`?" if near else ""


def _section_hint(path: str, given: Any, loc: Loc) -> str:
    """How to write as a section what was given as bare text, such as `optimizer: adamw`."""
    known = [
        (word, name, section)
        for section in _sections_at(loc)
        for name, field in section.model_fields.items()
        for word in _literals(field.annotation)
    ]
    near = difflib.get_close_matches(str(given), [word for word, _, _ in known], n=1, cutoff=0.6)
    if not near:
        return ""
    _, name, section = next(item for item in known if item[0] == near[0])
    needed = [key for key, field in section.model_fields.items() if field.is_required()]
    others = "".join(f", {key}: ..." for key in needed if key != name)
    written = f"{{{name}: {near[0]}{others}}}"
    parent, _, key = path.rpartition(".")
    return (
        f"write `{written}` in the list `{parent}`"
        if key.isdigit()
        else f"write `{key}: {written}`"
    )


def _literals(annotation: Any) -> Iterator[str]:
    """The words that a field of fixed choices takes; none for any other field."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from (word for word in typing.get_args(annotation) if isinstance(word, str))


def _example(path: str, expected: str) -> str:
    parent, _, key = path.rpartition(".")
    if key in _EXAMPLES:
        return f"write `{key}: {_EXAMPLES[key]}`"
    return (
        f"write {expected} in the list `{parent}`"
        if key.isdigit()
        else f"write `{key}: `, {expected}"
    )


def _expected(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _BOUND:
        word, name = _BOUND[kind]
        return f"a number {word} {context[name]:g}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "string_pattern_mismatch":
        return "lower-case letters, digits, dot, dash or underscore (at most 64)"
    if kind == "too_short":
        return "a list of at least one"
    return _EXPECTED.get(kind, str(problem["msg"]))


def _place(problem: Any, root: yaml.Node) -> tuple[int, str]:
    """Line (from 0) and dotted name of a problem: of the key to blame where keys do not fit."""
    loc: Loc = problem["loc"]
    if problem["type"] == MISFIT:
        for key in problem["ctx"]["at"]:
            line, path = _locate((*loc, *key.split(".")), root, MISFIT)
            if path.endswith(key):
                return line, path
    return _locate(loc, root, problem["type"])


def _locate(loc: Loc, root: yaml.Node, kind: str) -> tuple[int, str]:
    """Line (from 0) and dotted name of pydantic's location; union tags in it are skipped."""
    node, line, names = root, root.start_mark.line, list[str]()
    tagged: yaml.Node | None = None
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if not last and node is not tagged and _is_tag(node, part):
            tagged = node  # a tag that is a key's name too: `kind: template`, `template: ...`
            continue
        child = _child(node, part)
        if child is None:
            if last and kind == "missing":
                names.append(str(part))
            continue
        key, node = child
        line = key.start_mark.line
        names.append(str(part))
    return line, ".".join(names)


def _is_tag(node: yaml.Node, part: int | str) -> bool:
    """Whether the section says `kind: PART` or `by: PART`."""
    return isinstance(node, yaml.MappingNode) and any(
        key.value in {"kind", "by"} and value.value == part for key, value in node.value
    )


def _child(node: yaml.Node, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return key, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
        return node.value[part], node.value[part]
    return None


def _spelling(key: str, loc: Loc) -> str:
    known = _keys_at(loc[:-1])
    section = _section_of(key) if len(loc) == 1 else ""
    if section:
        return f"it belongs under `{section}:`; indent it there"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}:`?"
    return f"remove it; the keys here are {', '.join(known)}" if known else "remove it"


def _section_of(key: str) -> str:
    """The one section of the plan that has this key; empty where none or several have it."""
    found = [
        name
        for name, field in Plan.model_fields.items()
        if any(key in section.model_fields for section in _sections(field.annotation))
    ]
    return found[0] if len(found) == 1 else ""


def _keys_at(loc: Loc) -> list[str]:
    """Keys of the section at pydantic's location."""
    return sorted({name for section in _sections_at(loc) for name in section.model_fields})


def _sections_at(loc: Loc) -> list[type[Section]]:
    """The classes that the section at pydantic's location may be of."""
    here: list[type[Section]] = [Plan]
    for part in loc:
        tagged = [section for section in here if part in _tags(section)]
        if tagged:
            here = tagged
        elif isinstance(part, str):
            fields = [s.model_fields[part] for s in here if part in s.model_fields]
            # A name that is no field tells members of a union apart: the section stays.
            here = [s for f in fields for s in _sections(f.annotation)] if fields else here
    return here


def _tags(section: type[Section]) -> tuple[Any, ...]:
    for name in ("kind", "by"):
        if name in section.model_fields:
            return typing.get_args(section.model_fields[name].annotation)
    return ()


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The section classes inside a field's annotation (optional, list, tagged union)."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections(inner)
