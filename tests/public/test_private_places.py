"""Paths that meet the private source: the same, above it, below it, or by a link."""

import pytest
from clikit import DIGITS
from token_runs import token_plan

from dpsynth.errors import PlanError
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.public.captions import require_public
from dpsynth.public.private_places import meets_private


def plan_of(folder, source):
    private = DIGITS.replace("source: {kind: digits}", f"source: {source}")
    return load_plan(token_plan(folder, private=private))


def test_a_folder_meets_what_lies_above_and_below_it(tmp_path):
    secret = tmp_path / "data" / "secret"
    (secret / "one").mkdir(parents=True)
    plan = plan_of(tmp_path / "plan", f"{{kind: folder, path: {secret}}}")
    (tmp_path / "link").symlink_to(secret)
    for path in (secret, secret / "one", secret / "new", tmp_path / "data", tmp_path / "link"):
        assert meets_private(plan, path), path
    for path in (tmp_path / "plan", tmp_path / "data" / "secret-not", tmp_path / "data" / "other"):
        assert not meets_private(plan, path), path


def test_files_of_images_and_labels_count_each(tmp_path):
    plan = plan_of(tmp_path, f"{{kind: idx, images: {tmp_path}/a/x, labels: {tmp_path}/b/y}}")
    assert meets_private(plan, tmp_path / "a")
    assert meets_private(plan, tmp_path / "b" / "y")
    assert not meets_private(plan, tmp_path / "a" / "z")


def test_built_in_records_lie_nowhere(tmp_path):
    assert not meets_private(load_plan(token_plan(tmp_path)), tmp_path)


def test_the_metadata_of_a_private_folder_is_known_by_another_name(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "metadata.csv").write_text("file_name,text\n1.png,a cat\n")
    plan = plan_of(tmp_path / "plan", f"{{kind: folder, path: {secret}}}")
    (tmp_path / "said.csv").hardlink_to(secret / "metadata.csv")
    (tmp_path / "copy.csv").write_text("text\na cat\n")
    assert meets_private(plan, tmp_path / "said.csv")
    assert not meets_private(plan, tmp_path / "copy.csv")


def test_captions_are_none_of_what_is_private_around_it_or_a_curators(tmp_path):
    secret, room = tmp_path / "all" / "secret", tmp_path / "run" / "curator"
    secret.mkdir(parents=True)
    (room / "x").mkdir(parents=True)
    (tmp_path / "run" / "plan.lock.json").write_text("{}")
    (tmp_path / "link.txt").symlink_to(room / "said.txt")
    plan = plan_of(tmp_path / "plan", f"{{kind: folder, path: {secret}}}")
    for path in (secret, secret / "said.txt", tmp_path / "all"):
        with pytest.raises(PlanError, match="private source"):
            require_public(plan, path)
    for path in (room, room / "x" / "metadata.csv", tmp_path / "link.txt"):
        with pytest.raises(PlanError, match="curator"):
            require_public(plan, path)
    require_public(plan, tmp_path / "all" / "said.txt")
