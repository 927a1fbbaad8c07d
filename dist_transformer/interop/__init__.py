"""Models as people keep and share them: model folders of safetensors, and averages of checkpoints."""
