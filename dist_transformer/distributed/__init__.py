"""Ranks: the group, work of rank 0 for all, work in rounds. Only it and DeepSpeed's adapter call torch.distributed."""
