"""`--workers` reaches the readers as a machine setting; several processes share the cores."""

import os

import pytest

from dpsynth.commands import _options as opt
from dpsynth.readers import parallel

PLACE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(opt.WORKERS, "")
    for name in (*PLACE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_option_and_the_readers_mean_one_setting():
    assert opt.WORKERS == parallel.WORKERS
    opt.use_workers(3)
    assert parallel.workers() == 3


def test_without_the_option_nothing_is_said():
    opt.use_workers(None)
    assert os.environ[opt.WORKERS] == ""


def test_processes_of_one_machine_share_its_cores(monkeypatch):
    for name, value in (PLACE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    opt.use_workers(None)
    assert parallel.workers() == 2
    opt.use_workers(7)  # said outright
    assert parallel.workers() == 7
