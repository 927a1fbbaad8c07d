"""The training step: DeepSpeed ZeRO around the model, its optimizer and its state."""
