"""The one door to private records."""
