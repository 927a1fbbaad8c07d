"""Location of a rank's part of the training state in the memory of each ZeRO stage.

    parameter   |.......... 12 elements ..........|   flattened
    rank 0      |... piece: 0 to 7 ...|               a narrow part of its fp32 master, and the same of the moments
    rank 1                            |. 7 to 12 .|

Stage 0 holds every parameter whole on every rank. Stages 1 and 2 concatenate the parameters of a group and cut the
result into as many parts as ranks. Stage 3 cuts each parameter by itself, padded to a multiple of the ranks. Parameters
that are not trained have no master: stages 0 to 2 hold them whole, stage 3 cuts them in the precision of training.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dist_transformer.training.engine.optimizer import PARTS, deal_out


@dataclass(frozen=True)
class Fragment:
    """This rank's part of one tensor of the training state: elements [start, start + values.numel()) of it, flattened.

    `values` is fp32 and one-dimensional, a view of the engine's own memory (on the CPU if offloaded); a copy only for
    frozen fp16 weights, which exist in fp16 only.
    """

    part: str
    name: str
    start: int
    values: Tensor

    @property
    def key(self) -> str:
        """Name of the tensor in a checkpoint."""
        return f"{self.part}/{self.name}"


@dataclass(frozen=True)
class Shard:
    """Elements of one parameter: `length` from `start` on, at `offset` of `master` and of its optimizer state."""

    name: str
    start: int
    master: Tensor
    offset: int
    length: int
    is_trained: bool = True
    is_everywhere: bool = False
    """True if every rank holds the same shard; one of them saves it in a checkpoint."""

    def parts(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Returns views of the shard's elements, by part of the state."""
        state = optimizer.state[self.master] if self.is_trained else {}
        return {"weight": self.weight, **{part: self._of(state[part]) for part in PARTS if part in state}}

    @property
    def weight(self) -> Tensor:
        """The shard's elements of the master."""
        return self._of(self.master)

    def _of(self, whole: Tensor) -> Tensor:
        return whole.detach().view(-1).narrow(0, self.offset, self.length)


def masters(optimizer: Any, stage: int) -> list[Tensor]:
    """Returns the fp32 tensors that Adam updates on this rank, from DeepSpeed's optimizer of a ZeRO stage."""
    if stage == 0:
        return [p for group in optimizer.param_groups for p in group["params"]]
    return list(optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups)


def pieces(parameters: dict[str, nn.Parameter], optimizer: Any, stage: int, rank: int) -> list[Shard]:
    """Returns this rank's shard of each parameter (no communication)."""
    find = _piece_of_stage_3 if stage == 3 else _piece_of_stages_0_to_2
    found = (find(name, parameter, optimizer, rank) for name, parameter in parameters.items())
    return [piece for piece in found if piece is not None]


def fragments(held: list[Shard], optimizer: torch.optim.Optimizer, rank: int, num_ranks: int) -> list[Fragment]:
    """Returns this rank's share of a checkpoint: over all ranks, every element of every tensor once."""
    owners = deal_out({piece.name: piece.length for piece in held if piece.is_everywhere}, num_ranks)
    return [
        Fragment(part, piece.name, piece.start, values.float())
        for piece in held
        if owners.get(piece.name, rank) == rank
        for part, values in piece.parts(optimizer).items()
    ]


def sync_weights_from_masters(optimizer: Any, stage: int) -> None:
    """Copies the fp32 masters to the weights that the forward pass uses (collective)."""
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer._partition_all_parameters()
        for sub_group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        optimizer.checkpoint_event_epilogue()  # gathers the small parameters that stage 3 keeps whole


def _piece_of_stages_0_to_2(name: str, parameter: nn.Parameter, optimizer: Any, rank: int) -> Shard | None:
    if not parameter.requires_grad or not hasattr(parameter, "_hp_mapping"):
        return Shard(name, 0, parameter, 0, parameter.numel(), parameter.requires_grad, is_everywhere=True)
    mapping: Any = parameter._hp_mapping
    if mapping is None:  # other ranks hold it
        return None
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    master = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    return Shard(name, here.start, master, there.start, here.numel)


def _piece_of_stage_3(name: str, parameter: Any, optimizer: Any, rank: int) -> Shard | None:
    size = parameter.partition_numel()
    start = rank * size
    length = min(size, parameter.ds_numel - start)  # the end of the last partitions is padding
    if length <= 0:
        return None
    if not parameter.requires_grad:
        return Shard(name, start, parameter.ds_tensor, 0, length, is_trained=False)
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return Shard(name, start, optimizer.fp32_partitioned_groups_flat[group], offset, length)
