"""Several processes as one run: who is who, exact sums, and one process that leads. No data."""
