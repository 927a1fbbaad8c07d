"""Text of a profile for people: a table of the parts of a step, and one of the operators with the most time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dist_transformer.planning.flops import ModelFlops
from dist_transformer.training.metrics.mfu import Peak
from dist_transformer.training.profiling.accounting import (
    ATTENTION,
    BACKWARD,
    COMMUNICATION,
    FEED_FORWARD,
    FORWARD,
    LOSS,
    PARTS,
    Account,
    Spent,
)

MOST_OPERATORS = 12


@dataclass(frozen=True)
class RankProfile:
    """Profile of one rank.

    Attributes:
        where: rank, device, precision, threads.
        plain_seconds: median of steps without the profiler; `cpu_seconds` of their process, all threads together.
        flops: model FLOPs of the rank's micro-batches in all profiled steps; `plain_flops`: mean of steps before.
        account: time spent in all profiled steps.
    """

    where: str
    num_steps: int
    plain_seconds: float
    cpu_seconds: float
    plain_flops: float
    flops: ModelFlops
    account: Account
    peak: Peak
    has_gpu: bool

    @property
    def seconds(self) -> float:
        """Time of a profiled step."""
        return self.account.microseconds / 1e6 / self.num_steps

    @property
    def busy_seconds(self) -> float:
        """Time of a profiled step without communication: the other ranks wait for the rank with the most."""
        return self.seconds - self.account.parts[COMMUNICATION].total / 1e6 / self.num_steps


def text_of(profile: RankProfile) -> str:
    """Returns the profile as Markdown."""
    return "\n".join([*summary_of(profile), "", *_operators_table(profile)])


def summary_of(profile: RankProfile) -> list[str]:
    """Returns the first lines: the time of a step, its share of the peak, and the table of its parts."""
    return [*_head(profile), "", *_parts_table(profile)]


def _head(profile: RankProfile) -> list[str]:
    peak, rate = profile.peak, profile.plain_flops / profile.plain_seconds
    assert peak.measured is not None
    shares = [f"{rate / peak.measured:.1%} of the {_gigaflops(peak.measured)} GFLOP/s measured of a matrix product"]
    if peak.published:
        shares.append(f"{rate / peak.published:.1%} of the {_gigaflops(peak.published)} GFLOP/s published")
    of_cpus = f"{1000 * profile.cpu_seconds:.1f} ms of the CPUs"
    if not profile.has_gpu:  # the cost of training on a machine shared with others
        of_cpus += f" ({_gigaflops(profile.plain_flops / profile.cpu_seconds)} GFLOP in a second of a CPU)"
    return [
        f"{profile.where}; {profile.num_steps} steps",
        "",
        f"- a step takes {1000 * profile.plain_seconds:.1f} ms, and {of_cpus}; under the profiler, as in the table, it takes "
        f"{1000 * profile.seconds:.1f} ms",
        f"- {profile.plain_flops / 1e9:.2f} GFLOP a step for its real tokens: {_gigaflops(rate)} GFLOP/s, {' and '.join(shares)}",
    ]


def _parts_table(profile: RankProfile) -> list[str]:
    spent = {part: profile.account.parts[part] for part in PARTS if part in profile.account.parts}
    rows = [_row(profile, part, one, _flops_of(part, profile.flops)) for part, one in spent.items()]
    whole = Spent(*(sum(getattr(one, name) for one in spent.values()) for name in ("operators", "between", "device")))
    rows.append(_row(profile, "the step", whole, profile.flops.total))
    device = ["GPU ms"] if profile.has_gpu else []
    return _table(["part", "ms a step", "share", "between operators", *device, "GFLOP", "GFLOP/s", "of the peak"], rows)


def _row(profile: RankProfile, part: str, spent: Spent, flops: float) -> list[str]:
    steps, share = profile.num_steps, spent.total / profile.account.microseconds
    busy = (spent.device if profile.has_gpu else spent.total) / 1e6
    rate = flops / busy if busy else 0.0
    assert profile.peak.measured is not None
    return [
        part,
        f"{spent.total / 1000 / steps:.2f}",
        f"{share:.1%}",
        f"{spent.between / 1000 / steps:.2f}",
        *([f"{spent.device / 1000 / steps:.2f}"] if profile.has_gpu else []),
        *(
            [f"{flops / 1e9 / steps:.3f}", _gigaflops(rate), f"{rate / profile.peak.measured:.1%}"]
            if rate
            else [""] * 3
        ),
    ]


def _flops_of(part: str, flops: ModelFlops) -> float:
    """Returns the FLOPs of a part: a third is in the forward pass; the loss computes its gradients at once."""
    shares: Mapping[str, float] = {
        f"{FORWARD}: {ATTENTION}": flops.attention / 3,
        f"{FORWARD}: {FEED_FORWARD}": flops.feed_forward / 3,
        f"{BACKWARD}: {ATTENTION}": flops.attention * 2 / 3,
        f"{BACKWARD}: {FEED_FORWARD}": flops.feed_forward * 2 / 3,
        LOSS: flops.output,
    }
    return shares.get(part, 0.0)


def _operators_table(profile: RankProfile) -> list[str]:
    found, steps = profile.account, profile.num_steps
    rows = [
        [name, f"{found.calls[name] / steps:.0f}", f"{spent / 1000 / steps:.2f}", f"{spent / found.microseconds:.1%}"]
        for name, spent in sorted(found.operators.items(), key=lambda one: -one[1])[:MOST_OPERATORS]
    ]
    return _table(["operator, without those inside", "calls a step", "ms a step", "share"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return [line(header), rule, *map(line, rows)]


def _gigaflops(per_second: float) -> str:
    return f"{per_second / 1e9:,.1f}"
