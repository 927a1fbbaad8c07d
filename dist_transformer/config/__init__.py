"""The configuration of a run: models (what there is), loading (YAML to models), checks (what must hold together)."""
