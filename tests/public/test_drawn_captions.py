"""Captions to draw images for: text files, tables, image folders and zips; never private ones."""

import zipfile
from pathlib import Path

import pytest

from dpsynth.errors import DataError, MissingError, PlanError
from dpsynth.planning.verify import make_run
from dpsynth.planning.yaml_plan import parse_plan
from dpsynth.public.captions import Drawn, drawn_captions, labelled_captions, require_drawable
from dpsynth.public.pretrain import pretrain
from dpsynth.released.asked import asked_of

PLAN = """\
name: drawn
budget: {epsilon: 1.0, delta: 1e-6}
private:
  source: {kind: folder, path: private}
  capacity: 100
  image: {height: 8, width: 8}
  classes: [cat, dog, "Food & Drink"]
  held_out: {by: hash, fraction: 0.2}
  captions: {kind: free, public: true}
public: [{kind: letters, count: 20}]
representation: {kind: tokens}
tokens: {levels: 1}
stages: {train: {rate: 0.1, steps: 5}}
sampling: {method: tokens, captions: FILE}
"""
METADATA = (
    "file_name,text,label\n"
    '3.png,"soup, hot",Food & Drink\n'
    "1.png,a  cat,cat\n"
    "2.png,a cat,cat\n"
    "4.png,sleeping,dog\n"
)
SAID = [Drawn("soup, hot", "Food & Drink"), Drawn("a cat", "cat"), Drawn("sleeping", "dog")]


def plan(file: Path, text: str = PLAN):
    return parse_plan(text.replace("FILE", str(file)))


def folder_of(tmp_path: Path, metadata: str = METADATA, name: str = "metadata.csv") -> Path:
    folder = tmp_path / "public"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(metadata)
    return folder


def zip_of(tmp_path: Path, inside: str = "metadata.csv", metadata: str = METADATA) -> Path:
    path = tmp_path / "public.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(inside, metadata)
    return path


def table_of(tmp_path: Path, text: str, name: str = "said.csv") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize("wrapped", ["metadata.csv", "twemoji/metadata.csv"])
def test_a_zip_gives_captions_and_classes_in_order_each_once(tmp_path, wrapped):
    path = zip_of(tmp_path, wrapped)
    assert labelled_captions(plan(path), path) == SAID
    asked = asked_of(plan(path))
    assert asked.captions == ["soup, hot", "a cat", "sleeping"]
    assert asked.classes.tolist() == [2, 0, 1]
    assert drawn_captions(plan(path)) == asked.captions


def test_a_folder_and_json_lines_do_as_well(tmp_path):
    assert asked_of(plan(folder_of(tmp_path))).classes.tolist() == [2, 0, 1]
    (tmp_path / "public" / "metadata.csv").unlink()
    rows = '{"file_name": "a.png", "text": "a dog"}\n{"file_name": "b.png", "text": "the cat"}\n'
    folder = folder_of(tmp_path, rows, "metadata.jsonl")
    assert asked_of(plan(folder)).classes.tolist() == [1, 0]  # by the class that they name


def test_a_table_may_leave_labels_to_the_words(tmp_path):
    path = table_of(tmp_path, "\ufefftext,label,more\nasleep,cat,1\na dog,,2\n")
    assert asked_of(plan(path)).classes.tolist() == [0, 1]
    path = table_of(tmp_path, "text\na dog\ncats and a cat\na dog\n")
    assert asked_of(plan(path)).captions == ["a dog", "cats and a cat"]
    with pytest.raises(DataError, match=r"names 0 of the declared.*") as caught:
        asked_of(plan(table_of(tmp_path, "text\nasleep\n")))
    assert "label" in caught.value.hint


def test_a_text_file_is_read_as_ever(tmp_path):
    path = table_of(tmp_path, "a cat, label\n\ttwo  dogs, a dog\n", "said.txt")
    assert labelled_captions(plan(path), path) == [Drawn("a cat, label"), Drawn("two dogs, a dog")]
    with pytest.raises(DataError, match="repeats line 1 in line 2"):
        drawn_captions(plan(table_of(tmp_path, "a cat\na cat\n", "said.txt")))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("text,label\na,cat\na,dog\n", "two labels, 'cat' and 'dog' in row 2"),
        ("text,label\na,cat\na,\n", "two labels"),
        ("label\ncat\n", "has columns label, need text"),
        ("text,text\na,b\n", "need text"),
        ("text,label\na,cat,more\n", "a broken row in line 2"),
        ("text,label\n,cat\n", "no caption of 1 to 1,000 characters in row 1"),
        ("text\n" + "x" * 1001 + "\n", "no caption"),
        ("text,label\n", "has 0 captions"),
        ("", "need text"),
        ('text\n"a\n', "is no CSV"),
        ("text\n" + "".join(f"a {n}\n" for n in range(4096)), "has 4096 captions"),
    ],
)
def test_faults_of_a_table(tmp_path, table, why):
    path = table_of(tmp_path, table)
    with pytest.raises(DataError) as caught:
        asked_of(plan(path))
    assert why in caught.value.message and "said.csv" in caught.value.message
    assert caught.value.hint


def test_a_label_is_a_declared_class(tmp_path):
    with pytest.raises(DataError, match="'emu', which is no declared class"):
        asked_of(plan(table_of(tmp_path, "text,label\na cat,emu\n")))


def test_faults_of_a_folder(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"has no metadata.csv or metadata.jsonl"):
        drawn_captions(plan(empty))
    with pytest.raises(DataError, match="two labels"):
        drawn_captions(plan(zip_of(tmp_path, metadata=METADATA + "5.png,a cat,dog\n")))
    with pytest.raises(DataError, match="cannot be read"):
        drawn_captions(plan(folder_of(tmp_path, "file_name,label\n1.png,cat\n")))
    with pytest.raises(DataError, match="no file_name in its row: row 1"):
        drawn_captions(plan(folder_of(tmp_path, "file_name,text\n,cat\n")))
    broken = zip_of(tmp_path).read_bytes()
    at = broken.index(b"soup")
    (tmp_path / "public.zip").write_bytes(broken[:at] + b"s\x00up" + broken[at + 4 :])
    with pytest.raises(DataError, match="is damaged"):
        drawn_captions(plan(tmp_path / "public.zip"))
    with pytest.raises(MissingError):
        drawn_captions(plan(tmp_path / "none.zip"))


def test_the_private_source_is_refused_whatever_the_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    private = tmp_path / "private"
    private.mkdir()
    (private / "metadata.csv").write_text(METADATA)
    table_of(tmp_path, "text\na cat\n", "private/said.csv")
    (tmp_path / "link").symlink_to(private)
    for name in ("private", "private/metadata.csv", "private/said.csv", "link"):
        with pytest.raises(PlanError, match="lies in the private source"):
            asked_of(plan(tmp_path / name))


def test_free_captions_need_a_model_that_reads_them_and_a_public_file():
    def of(**changes):
        text = PLAN
        for old, new in changes.values():
            assert old in text
            text = text.replace(old, new)
        return plan(Path("said.txt"), text)

    numbers = ("representation: {kind: tokens}\ntokens: {levels: 1}",
               "representation: {kind: pca, code: 4}")  # fmt: skip
    flow = ("method: tokens", "method: flow")
    reader = ("public: [", "velocity: {kind: mmdit}\npublic: [")
    undrawn = (", captions: FILE", "")
    moments = ("{train:", "{moments: {}, train:")
    assert of().private.captions.public
    assert of(a=numbers, b=flow, c=reader).stages.moments is None
    for changes, why in (
        ({"a": undrawn}, "captions of kind free need sampling.captions"),
        ({"a": numbers, "b": flow}, "velocity.kind: mmdit"),
        ({"a": numbers, "b": flow, "c": reader, "d": undrawn}, "and sampling.captions"),
        ({"a": numbers, "b": flow, "c": reader, "d": moments}, "features: sentence"),
    ):
        with pytest.raises(PlanError) as caught:
            of(**changes)
        assert why in caught.value.message, caught.value.message


def test_that_captions_are_public_is_said_in_the_facts_alone():
    said = plan(Path("said.txt"))
    unsaid = plan(Path("said.txt"), PLAN.replace(", public: true", ""))
    assert said.facts()["private"]["captions"] == {"kind": "free", "public": True}
    assert unsaid.facts()["private"]["captions"] == {"kind": "free"}
    assert type(said).of_facts(said.facts()).facts() == said.facts()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a cat\na thing\n", "names 0 of"),
        ("a cat beside a dog\n", "names 2 of"),
        ("", "0 captions"),
    ],
)
def test_pretraining_refuses_what_sampling_would(tmp_path: Path, text: str, message: str) -> None:
    said = table_of(tmp_path, text, "said.txt")
    with pytest.raises(DataError, match=message):
        require_drawable(plan(said))
    written = table_of(tmp_path, PLAN.replace("FILE", str(said)), "plan.yaml")
    verified, sources = make_run(written, tmp_path / "run"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsynth.public.pretrain.read_public", sources.append)
        with pytest.raises(DataError, match=message):
            pretrain(verified)
    assert sources == []
