"""Runs Python programs in forks of one process that holds the slow libraries of others.

A server: each line on stdin is a request, each line on stdout the exit code of its program. No
module of dpsynth is loaded here, so that a program imports the package as a fresh interpreter does.
"""

import atexit
import gc
import json
import os
import signal
import sys
import threading
import traceback
import types

import cryptography.hazmat.primitives.ciphers
import dp_accounting
import jinja2
import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import opacus
import pydantic
import pywt
import safetensors.numpy
import safetensors.torch
import scipy.stats
import sklearn.datasets
import sklearn.linear_model
import sklearn.neighbors
import torch
import torchvision
import typer.main
import typer.rich_utils
import yaml
from PIL import Image

LOADED = (
    cryptography, dp_accounting, jinja2, matplotlib, opacus, pydantic, pywt, safetensors, scipy,
    sklearn, torch, torchvision, typer, yaml, Image,
)  # fmt: skip


def _prepared(request):
    """Give this fork the streams, the folder, the environment and the names of a new process."""
    signal.alarm(request["timeout"])
    for stream, path in enumerate((os.devnull, request["out"], request["err"])):
        flags = os.O_WRONLY | os.O_CREAT if stream else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o600), stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
    np.random.seed()
    sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(sys.modules["__main__"])


def _run(request):
    """Carry the program out, and end as the interpreter does."""
    code = 1
    try:
        exec(compile(request["program"], "<string>", "exec"), _prepared(request))
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def main():
    gc.collect()
    gc.freeze()  # what forks share is not touched by their collections
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
