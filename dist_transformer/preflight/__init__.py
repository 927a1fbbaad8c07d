"""Preflight: finds unfit nodes of a job. Each node is measured alone and with its neighbours.

`benchmarks` measures on every rank; `outliers` compares the nodes; `report` reads the ranks' files and reports the
result.
"""
