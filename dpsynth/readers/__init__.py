"""Formats of labelled image data. Who may open which path is decided by vault and public."""
