"""Plan YAML to typed plan to verified plan; replay. No data, no torch."""
