"""Strict YAML: every bad plan is one clear error with its line; good ones mean what they say."""

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_texts import SMALL, changed

from dpsynth.errors import PlanError
from dpsynth.planning.source_kinds import IdxSource
from dpsynth.planning.yaml_plan import load_plan, parse_plan, plan_hash


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


# old, new, part of the message, part of the hint; the message must name the line of `new`.
BAD = [
    ("epsilon: 2.0", "epsilon: 0", "expected a number above 0", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: -1", "expected a number above 0", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: .nan", "got nan, expected a finite number", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: .inf", "got inf, expected a finite number", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: -.inf", "got -inf, expected a finite", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: 1e999", "expected a finite number", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: " + "9" * 5000, "expected a finite number", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: lots", 'got "lots", expected a number', "epsilon: 1.0"),
    ("epsilon: 2.0", 'epsilon: "2.0"', 'got "2.0", expected a number', "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: true", "got true, expected a number", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon:", "got nothing, expected a number", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilon: [2.0]", "got a list, expected a number", "epsilon: 1.0"),
    ("epsilon: 2.0", "epsilonn: 2.0", "unknown key `budget.epsilonn`", "did you mean `epsilon:`"),
    ("epsilon: 2.0", "noise: 2.0", "unknown key `budget.noise`", "the keys here are adjacency"),
    ("epsilon: 2.0", "epsilon: 2\n  epsilon: 3", "given twice; the first is on line 5", "keep one"),
    ("epsilon: 2.0", "epsilon: 2\n  <<: {delta: 1}", "unknown key `budget.<<`", "remove it"),
    ("delta: 1e-5", "delta: 1", "expected a number below 1", "delta: 1e-5"),
    ("delta: 1e-5", "delta: 0", "expected a number above 0", "delta: 1e-5"),
    ("delta: 1e-5", "delta: 010", 'got "010", expected a number', "delta: 1e-5"),
    ("delta: 1e-5", "delta: 1:30", 'got "1:30", expected a number', "delta: 1e-5"),
    ("  delta: 1e-5", "\tdelta: 1e-5", "'\\t'", "spaces, not tabs"),
    ("name: small", "name: !!python/object:os.system x", "tag", "remove the tag"),
    ("name: small", "name: !mine x", "the tag !mine is not allowed", "remove the tag"),
    ("name: small", "name: Small One", "lower-case letters", "write `name: `"),
    ("name: small", "name: ../up", "lower-case letters", "write `name: `"),
    ("name: small", 'name: "a\\x07"', "control character", "printable"),
    ("name: small", "name: [small", "not valid YAML", "fix the YAML"),
    ("name: small", "name: *nowhere", "undefined alias", "fix the YAML"),
    ("name: small", "? [a]\n: b", "the key a list is not text", "words"),
    ("name: small", "1: b", "the key 1 is not text", "words"),
    ("version: 1", "version: 2", "got 2, expected 1", "version: 1"),
    ("capacity: 1000", "capacity: 1e3", "expected a whole number", "capacity: 60000"),
    ("capacity: 1000", "capacity: 0", "expected a number above 0", "capacity: 60000"),
    (
        "capacity: 1000",
        "capacity: 1000\n  public: yes",
        'got "yes", expected true',
        "true or false",
    ),
    ("kind: npz", "kind: npy", "got \"npy\", expected 'idx', 'folder'", "did you mean `kind: npz`"),
    ("kind: npz, ", "", "lacks the key `kind`", "add a line `kind: ...`"),
    ("path: secret", "pth: secret", "unknown key `private.source.pth`", "did you mean `path:`"),
    ("classes: [a, b]", "classes: [0, 1]", "private.classes.0`: got 0", 'text, such as "0"'),
    ("classes: [a, b]", "classes: [a, a]", "class names must be distinct", ""),
    (
        "classes: [a, b]",
        "classes: []",
        "got an empty list, expected a list",
        "list",
    ),
    ("fraction: 0.2", "fraction: 1", "expected a number below 1", "fraction"),
    ("covariance: class", "covariance: full", "expected 'class', 'shared' or 'public'", "'class'"),
    ("method: release", "method: magic", "expected 'release', 'flow', 'guide'", "'guide'"),
    ("stages:", "epsilon: 1.0\nstages:", "unknown key `epsilon`", "under `budget:`; indent"),
    ("stages:", "stage:", "unknown key `stage`", "did you mean `stages:`"),
    ("budget:", "budget: 3\nbudgets:", "unknown key `budgets`", "did you mean `budget:`"),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), BAD, ids=[bad[1] for bad in BAD])
def test_a_bad_plan_is_one_error_with_its_line(old: str, new: str, message: str, hint: str) -> None:
    text = changed(old, new)
    with pytest.raises(PlanError) as caught:
        parse_plan(text, "my/plan.yaml")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2
    named = re.match(r"my/plan\.yaml:(\d+): ", caught.value.message)
    assert named, caught.value.message
    shown = re.search(rf"\n  {named[1]} \| (.*)$", caught.value.message)
    assert shown, caught.value.message
    assert shown[1].split() == text.splitlines()[int(named[1]) - 1][:120].split()


@pytest.mark.parametrize(
    ("old", "new"), [(b[0], b[1]) for b in BAD if ":" in b[1] and "\n" not in b[1]]
)
def test_the_line_is_the_changed_one(old: str, new: str) -> None:
    text = changed(old, new)
    with pytest.raises(PlanError, match=r".*") as caught:
        parse_plan(text)
    section = {"classes: [a, a]"}  # a fault of a whole section is shown at its first line
    if new not in section and new != "name: [small":
        assert f"plan.yaml:{line_of(text, new.strip()[:40])}:" in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the plan is empty"),
        (b"# only a comment\n", "the plan is empty"),
        (b"- a\n- b\n", "not a mapping"),
        (b"just text", "not a mapping"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe\x00", "not a text file"),
        (b"a: \x00\x01", "not valid YAML"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"x" * 1_000_001, "larger than"),
        (b"a: " + b"[" * 5000, "nested too deeply"),
        (b"a: &a [*a]\n", "deeply nested"),
        (
            b"a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + b"".join(
                b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10))
                for c in range(ord("b"), ord("h"))
            ),
            "too many",
        ),
    ],
    ids=[
        "empty",
        "comment",
        "list",
        "text",
        "binary",
        "nul",
        "two",
        "huge",
        "deep",
        "loop",
        "bomb",
    ],
)
def test_a_foreign_file_is_a_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("where", ["absent.yaml", "."])
def test_an_absent_plan_is_a_clear_error(tmp_path: Path, where: str) -> None:
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / where)
    assert "--init" in caught.value.hint


def test_numbers_are_numbers() -> None:
    plan = parse_plan(changed("epsilon: 2.0", "epsilon: 2"))
    assert plan.budget.delta == 1e-5
    assert plan.budget.epsilon == 2.0
    assert isinstance(plan.budget.epsilon, float)
    assert parse_plan(changed("capacity: 1000", "capacity: 1_000")).private.capacity == 1000
    for text in ("1E-5", "1.e-5", ".00001", "0.00001", "1e-05", "+1e-5"):
        assert parse_plan(changed("delta: 1e-5", f"delta: {text}")).budget.delta == 1e-5


def test_yes_and_no_are_class_names() -> None:
    assert parse_plan(changed("[a, b]", "[yes, no, on, 12:30]")).private.classes == [
        "yes", "no", "on", "12:30",
    ]  # fmt: skip


def test_an_anchor_is_fine() -> None:
    text = changed("name: small", "name: &n small").replace("[a, b]", "[*n, b]")
    assert parse_plan(text).private.classes == ["small", "b"]


def test_paths_are_taken_from_the_plan_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    source = "source: {kind: idx, images: ../data/i.gz, labels: /abs/l.gz}"
    text = changed("source: {kind: npz, path: secret-records.npz}", source)
    (folder / "p.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    plan = load_plan(Path("plans/p.yaml"))
    assert isinstance(plan.private.source, IdxSource)
    assert plan.private.source.images == tmp_path / "data" / "i.gz"
    assert plan.private.source.labels == Path("/abs/l.gz")


def test_the_hash_sees_facts_alone() -> None:
    base = plan_hash(parse_plan(SMALL))
    assert plan_hash(parse_plan(changed("secret-records", "elsewhere"))) == base
    assert plan_hash(parse_plan("# a comment\n" + changed("1e-5", "0.00001"))) == base
    assert plan_hash(parse_plan(changed("epsilon: 2.0", "epsilon: 2"))) == base
    assert plan_hash(parse_plan(changed("epsilon: 2.0", "epsilon: 2.1"))) != base
    assert plan_hash(parse_plan(changed("[a, b]", "[b, a]"))) != base


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80), st.integers(0, len(SMALL)))
def test_any_junk_is_a_plan_error_or_a_plan(junk: bytes, at: int) -> None:
    text = SMALL[:at] + junk.decode("utf-8", errors="replace") + SMALL[at:]
    with contextlib.suppress(PlanError):
        parse_plan(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(SMALL) - 1), st.integers(1, 30))
def test_any_cut_is_a_plan_error_or_a_plan(at: int, length: int) -> None:
    with contextlib.suppress(PlanError):
        parse_plan(SMALL[:at] + SMALL[at + length :])
