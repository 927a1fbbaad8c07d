"""Models outside of training: model folders of safetensors, import and export, and averages of checkpoints."""
