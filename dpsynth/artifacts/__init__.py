"""The wire: every file format that passes between commands."""
