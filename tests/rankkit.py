"""Runs of several processes, started as torchrun would by one server a test process."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


@functools.cache
def _server():
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_driver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(lambda: server.communicate(timeout=30))
    return server


class Starter:
    """Asks the server for one run after another; torch is loaded once for all test files."""

    def __init__(self):
        self._server = _server()

    def __call__(
        self, scenario, world, *, started=None, joined=None, whole_exit=False, **arguments
    ):
        request = {
            "scenario": scenario,
            "world": world,
            "started": started or world,
            "joined": joined or {},
            "whole_exit": whole_exit,
            "arguments": arguments,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
