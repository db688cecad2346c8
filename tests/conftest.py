"""Shared by all tests; being here also puts `tests/` on the import path."""

import os
import signal

# Before torch is imported, and for every subprocess: two test workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it puts into the background with Ctrl-C ignored, and children would inherit
# that: the commands that tests interrupt would not hear them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
