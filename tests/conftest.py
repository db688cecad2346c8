"""Shared by all tests; being here also puts `tests/` on the import path."""

import os

# Before torch is imported, and for every subprocess: two test workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
