"""What `status` takes for done, and what `plan` warns of."""

import pytest

from dpsynth.artifacts.files import write_json
from dpsynth.planning.steps import _passed
from dpsynth.planning.verify import warnings
from dpsynth.planning.yaml_plan import load_plan


@pytest.mark.parametrize(("report", "passed"), [({"ok": True}, True), ({"ok": False}, False)])
def test_a_check_is_done_when_the_records_fit(report, passed, tmp_path):
    assert not _passed(tmp_path / "check.json")
    write_json(tmp_path / "check.json", report)
    assert _passed(tmp_path / "check.json") is passed
    (tmp_path / "check.json").write_text("{")
    assert not _passed(tmp_path / "check.json")


def test_a_model_that_no_image_comes_from_is_warned_of(pytestconfig):
    plan = load_plan(pytestconfig.rootpath / "plans/digits-flow.yaml")
    assert not any("sampling: {method: flow}" in line for line in warnings(plan))
    direct = plan.sampling.model_copy(update={"method": "release"})
    told = warnings(plan.model_copy(update={"sampling": direct}))
    assert any("sampling: {method: flow}" in line for line in told)
