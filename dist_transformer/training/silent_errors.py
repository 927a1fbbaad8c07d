"""Silent errors: ranks that hold other weights than the rest, memory that changes at rest, ranks that compute wrongly.

    compare     every COMPARE_EVERY_STEPS steps and before each save: what ranks hold alike, and what changed at rest
    audit       rank r computes a micro-batch of rank r + 1 again, and both compare their gradients, before the update
    must_repeat where they differ, every rank computes it too, the minority is named, and the step is computed again

A fault is recorded in history.jsonl. A node that has one again is excluded from the run's jobs.
"""

import logging
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.errors import MachineError, UserError
from dist_transformer.model import gpu_kernels
from dist_transformer.processes.stacks import host_name
from dist_transformer.run.excluded_nodes import exclude
from dist_transformer.run.metrics_log import read_records
from dist_transformer.training.engine.bit_sums import bit_sum
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import inputs_of
from dist_transformer.training.memory import explaining_out_of_memory
from dist_transformer.training.run import Run
from dist_transformer.training.run_log import add_to_history
from dist_transformer.training.train_state import seed_dropout

log = logging.getLogger(__name__)

COMPARE_EVERY_STEPS = 100
"""Reading all weights takes less than a thousandth of so many steps."""
MAX_REPEATS = 8
"""Times that a step is computed again; a rank that is wrong more often would hold up the run."""
MOST_EXAMINED = 8
"""Differing micro-batches of a step that all ranks compute to find out who is wrong."""
BOUND = 1e-3
"""Where bits may differ: the largest difference of the gradient's norm in one parameter, as a share of the whole norm."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Pass:
    """All that the gradient of one forward and backward pass depends on, besides the weights."""

    micro_batches: list[MicroBatch]
    dropout_seed: int
    target_tokens: int
    """Of the global batch."""

    def to_send(self) -> "Pass":
        """Returns a copy without the windows that the tensors are views of, and without row ids."""
        sides = ("source_BS", "target_in_BT", "target_out_BT")
        copies = [
            replace(batch, row_ids=torch.empty(0), **{side: getattr(batch, side).clone() for side in sides})
            for batch in self.micro_batches
        ]
        return replace(self, micro_batches=copies)


class SilentErrors:
    """The checks of one start.

    Args:
        nodes: the node of each rank.
        unlike: why ranks may differ without a fault; "": they may not.
    """

    def __init__(self, run: Run, engine: Engine, nodes: Sequence[str], unlike: str = "") -> None:
        self._run, self._ranks, self._engine, self._nodes, self._unlike = run, run.ranks, engine, nodes, unlike
        self._share, self._seed = run.config.training.audit_share, run.config.run.seed
        self._found: list[tuple[Pass, list[tuple[int, Tensor]]]] = []
        self._has_audited, self._repeats, self._compared_step = False, 0, -1

    def compare(self, step: int) -> None:
        """Compares the state that ranks hold alike, once a step (collective). Raises MachineError: on every rank: a
        rank holds something else, or its memory changed at rest."""
        if step == self._compared_step:
            return
        self._compared_step = step
        mine = {kind: int(bit_sum(tensors)) for kind, tensors in self._engine.replicated().items()}
        sums, changed = zip(*self._ranks.all_gather_object((mine, self._engine.changed_at_rest())), strict=True)
        words = "changed in its memory while nothing wrote them"
        at_rest = {rank: f"{' and '.join(kinds)} {words}" for rank, kinds in enumerate(changed) if kinds}
        others = [(rank, kind) for kind in mine for rank in minority([of_rank[kind] for of_rank in sums])]
        differing = {rank: f"it holds other {kind} than the other ranks" for rank, kind in others}
        if faults := at_rest or differing:
            if self._unlike and not at_rest:
                held = " and ".join(dict.fromkeys(kind for _, kind in others))
                said = f"ranks hold different {held}: {self._unlike}"
            else:
                self._record(step, faults)
                said = f"{self._said(faults)}. A memory or a processor is at fault"
            raise MachineError(
                f"step {step}: {said}. Nothing of it was saved: the same command resumes from the newest checkpoint"
            ).agreed()

    def is_audited(self, batches: int, first: int) -> bool:
        """Decides by seed and step whether the pass from this lane of each rank on is audited: the same on every rank."""
        drawn = blake2b(f"audit {self._seed} {batches} {first}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn) < self._share * 2**64

    def audit(self, mine: Pass, sums: Tensor) -> None:
        """Computes the pass of the next rank again, and keeps a difference for `must_repeat` (collective).

        Args:
            sums: `gradient_sums` of this rank's own pass.
        """
        theirs, their_sums = self._ranks.pass_on((mine.to_send(), sums))
        computed, self._has_audited = self._compute(theirs), True
        if not alike(computed, their_sums):
            other = (self._ranks.rank + 1) % self._ranks.num_ranks
            self._found.append((theirs, [(other, their_sums), (self._ranks.rank, computed)]))

    def must_repeat(self, step: int) -> bool:
        """True if a gradient of the step about to be made was wrong on some rank (collective). Names that rank, and
        asks for a stop if its node is now excluded. Raises MachineError: on every rank: the step was wrong too
        often."""
        if not self._has_audited:
            return False
        self._has_audited = False
        if not int(self._ranks.all_reduce_sum(torch.tensor([len(self._found)]))):
            self._repeats = 0
            return False
        found = [each for of_rank in self._ranks.all_gather_object(self._found) for each in of_rank]
        self._found = []
        wrong: set[int] = set()
        for examined, votes in found[:MOST_EXAMINED]:
            votes += enumerate(self._ranks.all_gather_object(self._compute(examined)))
            wrong |= {votes[number][0] for number in minority([sums for _, sums in votes], alike)}
        faults = dict.fromkeys(sorted(wrong), "it computed another gradient than other ranks for the same micro-batch")
        if excluded := self._record(step, faults):
            self._run.stop.end_after(0.0, f"excluded because of wrong gradients: {', '.join(excluded)}")
        self._repeats += 1
        if self._repeats > MAX_REPEATS:
            raise MachineError(
                f"step {step}: {self._said(faults)}, after {MAX_REPEATS} repetitions of the step. The same command resumes "
                "from the newest checkpoint; keep the node out of the job"
            ).agreed()
        return True

    def _compute(self, of: Pass) -> Tensor:
        seed_dropout(of.dropout_seed, self._ranks.device)
        loss, _ = self._engine.objective(*inputs_of(of.micro_batches, self._ranks.device))
        return self._engine.sums_of_backward(loss, of.target_tokens)

    def _said(self, faults: dict[int, str]) -> str:
        return "; ".join(f"rank {rank} on {self._nodes[rank]}: {what}" for rank, what in faults.items())

    def _record(self, step: int, faults: dict[int, str]) -> list[str]:
        """Records faults by rank; returns the nodes that are excluded from now on (collective)."""
        return self._ranks.from_rank_zero(lambda: self._write(step, faults))

    def _write(self, step: int, faults: dict[int, str]) -> list[str]:
        run_dir = self._run.run_dir
        by_node = {self._nodes[rank]: f"step {step}: {what}" for rank, what in faults.items()}
        before = Counter(record.get("node") for record in read_records(run_dir.history, "fault"))
        for rank, what in faults.items():
            log.error("fault      step %d, rank %d on %s: %s", step, rank, self._nodes[rank], what)
            add_to_history(run_dir, "fault", step, {"rank": rank, "node": self._nodes[rank], "reason": what})
        is_certain = len(by_node) == 1 or len(faults) < self._ranks.num_ranks
        again = {node: reason for node, reason in by_node.items() if before[node]}
        if not (again and is_certain and run_dir.slurm.is_dir()):
            return []
        try:  # rather wait for another node than train on this one: spare nodes are not counted
            return list(exclude(run_dir, again, len({*self._nodes}), len(again)))
        except (OSError, MachineError) as error:
            log.warning("%s: %s", run_dir.excluded, error)
            return []


def begin_checks(run: Run, engine: Engine) -> SilentErrors:
    """Begins the checks of a start (collective). Kernels of ours that fail on one rank are used by none. Raises UserError:
    on every rank: the machines are of different kinds, and what is to be equal on all would not be."""
    device, training = run.ranks.device, run.config.training
    may_have_kernels = device.type == "cuda" and training.precision != "fp32" and run.config.model.plugin is None
    with explaining_out_of_memory("the first kernels", device):
        has_kernels = may_have_kernels and gpu_kernels.has_kernels()
    mine = (host_name(), machine_name(device), torch.get_num_threads(), has_kernels)
    nodes, kinds, threads, kernels = zip(*run.ranks.all_gather_object(mine), strict=True)
    if 0 < sum(kernels) < len(kernels):  # all wait for the slowest rank, and padded batches have other masks of dropout
        gpu_kernels.is_off = True
        without = ", ".join(sorted({node for node, has in zip(nodes, kernels, strict=True) if not has}))
        if run.ranks.is_rank_zero:
            log.warning("kernels    torch's on all ranks: ours fail on %s, whose standard error says why", without)
    unlike = ", ".join(sorted({*kinds})) if len({*kinds}) > 1 else ""
    engine.gradient_sums.is_exact = device.type == "cpu" and not unlike and len({*threads}) == 1
    if training.audit_share:
        if device.type == "cuda" and unlike and run.config.model.dropout:
            raise UserError(
                f"training.audit_share: the GPUs are of different kinds ({unlike}), which draw other dropout masks from the "
                "same seed; give all ranks one kind, model.dropout: 0 or training.audit_share: 0"
            ).agreed()
        how = "bit by bit" if engine.gradient_sums.is_exact else f"within {BOUND:g} of the norm"
        log.info("audit      of %g of the micro-batches, %s", training.audit_share, how)
    said = ""
    if unlike and training.zero_stage == 0:
        said = (
            f"with training.zero_stage: 0 each rank computes the update itself, and machines of different kinds ({unlike}) "
            "may round it otherwise; set it to 1, or give all ranks one kind"
        )
        if run.config.optimizer.matrices == "muon":
            raise UserError(f"optimizer.matrices: muon: {said}").agreed()
        log.warning("machines   %s", said)
    return SilentErrors(run, engine, nodes, said)


def alike(first: Tensor, second: Tensor) -> bool:
    """True if two `gradient_sums` are of the same gradient: equal bits, or norms within BOUND of the whole norm."""
    if first.dtype == torch.int64:
        return torch.equal(first, second)
    if not torch.equal(first.isfinite(), second.isfinite()):
        return False
    first, second = (each.nan_to_num(0.0, 0.0, 0.0) for each in (first, second))
    return bool((first - second).abs().max() <= BOUND * max(first.norm(), second.norm()))


def minority(
    values: Sequence[Value], are_alike: Callable[[Value, Value], bool] = lambda first, second: first == second
) -> list[int]:
    """Returns the numbers of the values that are not like most; of all of them if no value is more frequent."""
    like = [[number for number, other in enumerate(values) if are_alike(value, other)] for value in values]
    most = max(like, key=len)
    rivals = [each for each in like if len(each) == len(most) and each != most]
    return [number for number in range(len(values)) if rivals or number not in most]


def machine_name(device: torch.device) -> str:
    """Returns the kind of machine, on which the bits of a result depend."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.exists() else [platform.processor()]
    model = next((line for line in lines if line.startswith("model name")), lines[0])
    return f"{model.partition(': ')[2] or model}, {torch.backends.cpu.get_cpu_capability()}"
