"""Tracking in MLflow. metrics.jsonl in the run folder is authoritative and needs no server; `tracker` appends events
for MLflow to an outbox next to it; `shipper` sends both to the server, in a thread that training never waits for;
`outbox` records the state of delivery; `mlflow_client` is the adapter of MLflow."""
