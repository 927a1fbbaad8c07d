"""Training over a slow network: what a step loses to the exchange of gradients and weights.

    python benchmarks/network.py                        # as root; `small`, ZeRO 0 to 3, 1 Gbit/s
    python benchmarks/network.py --stages 1 --lanes-per-rank 4 --mbit 250

Each rank runs in a network namespace of its own, on one core, with one thread. The namespaces are joined by a bridge; on
one side each link sends at most so many bits a second (`tc`'s tbf), on another it does not, and on a third each rank
trains alone on a lane, all at the same time: that is the arithmetic. The bytes are those that a ring sends for the
stage, over the rate of the link. A step cannot be shorter than the longer of the two. `plan`'s model of a step, given the
arithmetic and the rate, is set beside it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import common
from common import Figures, Rounds
from ranks import Group, add_model_arguments, settings_of
from synthetic_corpus import write_tokens

from dist_transformer.config.schema import Config
from dist_transformer.planning.hardware import GIVEN, Constant, hardware_of
from dist_transformer.planning.step_time import exposed_seconds
from dist_transformer.planning.vocabularies import with_vocabularies

SLOW, FAST, ALONE = "over the link", "without a limit", "alone"
BUDGET = 1.15
SUBNET = "10.213.77"
LATENCY_SECONDS = 1e-4
"""Of a message of a collective, as `plan` assumes it for CPUs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lanes-per-rank", type=int, default=1)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of each rank's link, each way")
    parser.add_argument("--steps", type=int, default=6, help="of each side in a round")
    arguments = common.arguments_of(parser, rounds=5)
    if os.geteuid() != 0:
        sys.exit("expected root: network namespaces are made")
    found = common.begin(1)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_tokens(Path(name), arguments.pairs, arguments.vocabulary, 4096)
        links = {
            SLOW: stack.enter_context(_network("s", arguments.ranks, arguments.mbit)),
            FAST: stack.enter_context(_network("f", arguments.ranks, None)),
        }
        rounds = {f"ZeRO {stage}": _stage(stage, links, Path(name), arguments) for stage in arguments.stages}
    print(_description(arguments, rounds) + "\n\n" + _table(rounds, arguments))
    common.finish(arguments, found, rounds)


Place = Callable[[int], tuple[list[str], dict[str, str]]]


@contextmanager
def _network(kind: str, num_ranks: int, mbit: int | None) -> Iterator[Place]:
    """A bridge, and a namespace for each rank; yields how to start a rank in its own."""
    prefix = f"dt{kind}{os.getpid() % 10_000}"
    with ExitStack() as stack:
        _run(f"ip link add {prefix}b type bridge")
        stack.callback(_run, f"ip link del {prefix}b")
        _run(f"ip link set {prefix}b up")
        for rank in range(num_ranks):
            space, here = f"{prefix}n{rank}", f"{prefix}v{rank}"
            _run(f"ip netns add {space}")
            stack.callback(_run, f"ip netns del {space}")
            _run(f"ip link add {here} type veth peer name e0 netns {space}")
            _run(f"ip link set {here} master {prefix}b up")
            for command in (f"addr add {SUBNET}.{rank + 1}/24 dev e0", "link set e0 up", "link set lo up"):
                _run(f"ip -n {space} {command}")
            if mbit is not None:
                _run(f"tc -n {space} qdisc add dev e0 root tbf rate {mbit}mbit burst 512kb latency 100ms")

        def place(rank: int) -> tuple[list[str], dict[str, str]]:
            core = str(rank % (os.cpu_count() or 1))
            return ["ip", "netns", "exec", f"{prefix}n{rank}", "taskset", "-c", core], {
                "MASTER_ADDR": f"{SUBNET}.1",
                "GLOO_SOCKET_IFNAME": "e0",
            }

        yield place


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _stage(stage: int, links: dict[str, Place], folder: Path, arguments: argparse.Namespace) -> Rounds:
    num_ranks, lanes = arguments.ranks, arguments.lanes_per_rank
    together = settings_of(arguments, stage, num_ranks * lanes, folder, 1)
    with ExitStack() as stack:
        cases: dict[str, Callable[[], Figures]] = {}
        for name, place in links.items():
            group = Group(num_ranks, together, place)
            stack.callback(group.end)
            cases[name] = lambda group=group: group.take(arguments.steps)  # type: ignore[misc]
        settings = settings_of(arguments, stage, lanes, folder, 1)
        single = [
            Group(1, settings, lambda _, rank=rank: (["taskset", "-c", str(rank % (os.cpu_count() or 1))], {}))  # type: ignore[misc]
            for rank in range(num_ranks)
        ]
        for group in single:
            stack.callback(group.end)

        def all_alone() -> Figures:
            for group in single:
                group.start(arguments.steps)
            return max((group.answer() for group in single), key=lambda figures: figures["wall_seconds"])

        cases[ALONE] = all_alone
        for take in cases.values():
            take()  # warms up: allocates memory that is reused
        return common.interleaved(cases, arguments.rounds)


def _exposed_seconds(stage: int, pass_seconds: float, latency_seconds: float, arguments: argparse.Namespace) -> float:
    """Seconds that `plan` adds to a step for what passes of so many seconds do not hide; of passes without any: for all."""
    kinds = {"precision": arguments.precision, "communication_dtype": arguments.communication_dtype}
    settings = {"data": {}, "model": {"preset": arguments.preset}, "training": {"zero_stage": stage, **kinds}}
    config = with_vocabularies(Config.model_validate(settings), arguments.vocabulary, arguments.vocabulary)
    link, latency = Constant(arguments.mbit / 8000, GIVEN), Constant(latency_seconds, GIVEN)
    hardware = replace(hardware_of("cpu"), network_gb_per_second=link, link_gb_per_second=link, latency_seconds=latency)
    return exposed_seconds(config, arguments.ranks, 1, arguments.lanes_per_rank, pass_seconds, hardware)


def _description(arguments: argparse.Namespace, rounds: dict[str, Rounds]) -> str:
    return (
        f"\n`{arguments.preset}`, vocabulary {arguments.vocabulary:,}, {arguments.precision}, gradients sent in "
        f"{arguments.communication_dtype}; {arguments.ranks} ranks of a core "
        f"and {arguments.lanes_per_rank} lane(s) each, of at most {arguments.max_tokens:,} tokens; "
        f"links of {arguments.mbit:,} Mbit/s; "
        f"steps a round: {arguments.steps}; medians of rounds: {arguments.rounds}"
    )


def _table(rounds: dict[str, Rounds], arguments: argparse.Namespace) -> str:
    header = ["stage", "tokens/s over the link", "without a limit", "step over the link, s", "arithmetic alone, s"]
    header += [
        "bytes, s",
        "step to the longer of both",
        f"budget {BUDGET}",
        "exposed communication",
        "step that plan foretells, s",
        "waiting in update",
    ]
    rows = []
    for stage, sides in rounds.items():
        steps = {name: [s["wall_seconds"] / arguments.steps for s in samples] for name, samples in sides.items()}
        number, arithmetic = int(stage.split()[1]), _middle(steps[ALONE])
        sent = _exposed_seconds(number, 0.0, 0.0, arguments)
        foretold = arithmetic + _exposed_seconds(
            number, arithmetic / arguments.lanes_per_rank, LATENCY_SECONDS, arguments
        )
        ratios = [slow / max(alone, sent) for slow, alone in zip(steps[SLOW], steps[ALONE], strict=True)]
        exposed = [1 - alone / slow for slow, alone in zip(steps[SLOW], steps[ALONE], strict=True)]
        ratio = _middle(ratios)
        rows.append(
            [
                stage,
                *(f"{common.median(sides[name], 'tokens_per_second'):,.0f}" for name in (SLOW, FAST)),
                f"{_middle(steps[SLOW]):.3f}",
                f"{_middle(steps[ALONE]):.3f}",
                f"{sent:.3f}",
                f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                "kept" if ratio <= BUDGET else "missed",
                f"{_middle(exposed):.1%}",
                f"{foretold:.3f} ({foretold / _middle(steps[SLOW]) - 1:+.0%})",
                f"{common.median(sides[SLOW], 'update') / common.median(sides[SLOW], 'wall_seconds'):.1%}",
            ]
        )
    return common.markdown_table(header, rows)


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
