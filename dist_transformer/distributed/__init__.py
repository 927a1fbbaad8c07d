"""Ranks: the group, what one rank does for all, and work in rounds. The only place that talks to torch.distributed directly."""
