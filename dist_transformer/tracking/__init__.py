"""The history of a run. `metrics_log` writes what happened into the run folder, which is the truth and needs no server;
`tracker` notes what MLflow shall know in a spool beside it; `shipper` carries both to the server, `background_shipper` in
a thread that training never waits for; `spool` remembers what has arrived; `mlflow_door` is the only file that imports
mlflow."""
