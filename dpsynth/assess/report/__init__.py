"""The curator's page of a run: everything there is to see, in one HTML file of the curator's room.

It reads what other commands wrote (`curator/evaluation*.json`, `curator/audit/`) and measures
nothing itself; no private record is opened.
"""
