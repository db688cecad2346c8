"""Self-contained HTML pages: one file, no script, no network, nothing but what the caller gives.

Knows released and public artifacts alone; `assess.report` builds the curator's page on top.
"""
