"""Ranks: the group, work of rank 0 for all, work in rounds. The only folder that calls torch.distributed,
apart from DeepSpeed's adapter."""
