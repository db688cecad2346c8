"""Shared by all tests; being here also puts `tests/` on the import path."""
