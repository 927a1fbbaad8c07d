"""A step of training: DeepSpeed ZeRO around the model, its optimizer and its state."""
