"""Metrics of a run: records, log lines, the machines' load and MFU."""
