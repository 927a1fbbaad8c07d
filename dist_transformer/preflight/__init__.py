"""Preflight: are the nodes of this job fit, and which is not? Each is measured alone and with its neighbours.

`alone` and `together` measure, on every rank; `judge` compares the nodes; `report` reads what the ranks wrote and says it.
"""
