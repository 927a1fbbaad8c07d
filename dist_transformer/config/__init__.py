"""The configuration of a run: models (the settings), loading (YAML to models), checks (rules between settings)."""
