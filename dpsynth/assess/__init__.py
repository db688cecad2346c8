"""Looks at private data without releasing; output is curator-only."""
