"""`dist-transformer train` with a fault on one rank, or on "all": FAULT RANK CONFIG [overrides] NUM_RANKS.

A fault begins with the sixth global batch. Those of arithmetic end when the run has noticed a divergence, as one that a
lower learning rate cures would, "spike twice" the second one; nothing else of the program is changed. Several faults of
one rank stand with ", " between them. The ranks are forked from a process that has imported torch and DeepSpeed, but
nothing that starts threads.
"""

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dist_transformer.cli.main import main
from dist_transformer.processes.launching import fork_local_ranks
from dist_transformer.training.engine.engine import Engine

FIRST_BATCH = 5
SPIKE = 50.0
SPARE_BYTES = 1 << 20
STEPS_MEANWHILE = 3


def install(fault: str) -> None:
    """Makes this rank a faulty one."""
    from dist_transformer.training.global_batch import GlobalBatch
    from dist_transformer.training.loop import Loop

    step, backward = Loop._step, Engine.backward
    at_work, times = False, 2 if fault == "spike twice" else 1

    def faulty_step(loop: Loop, batch: GlobalBatch, *others: object) -> bool:
        nonlocal at_work
        number = loop.state.batches
        if fault == "flipped weight" and number == FIRST_BATCH:
            next(iter(loop._engine.objective.parameters())).detach().view(torch.int32).view(-1)[0] ^= 1
        if fault == "stop" and number == FIRST_BATCH:
            os.kill(os.getpid(), signal.SIGUSR1)
        at_work = number == FIRST_BATCH if fault == "infinity" else number >= FIRST_BATCH and num_noticed() < times
        return step(loop, batch, *others)

    def faulty_backward(engine: Engine, loss_sum: Tensor, global_tokens: int, **named: bool) -> None:
        if at_work and fault == "exception":
            raise RuntimeError("injected by the test")
        if at_work and fault == "memory":
            take_memory_away()
        if at_work and fault in ("infinity", "infinities"):
            loss_sum = loss_sum * float("inf")
        backward(engine, loss_sum, global_tokens, **named)

    Loop._step = faulty_step
    Engine.backward = faulty_backward
    if fault in ("slow disk", "killed while saving"):
        install_disk(fault)
    if fault == "no dry run":
        import dist_transformer.training.trainer as trainer

        trainer.dry_run = lambda *arguments: None
    if fault.startswith("waits for a signal"):
        install_waiting(int(fault.removeprefix("waits for a signal").removeprefix(" after ") or 6))
    if fault == "other machine":
        os.environ["ATEN_CPU_CAPABILITY"] = "default"  # asked for at the first product
    if fault == "wrong gradients":
        install_wrong_gradients()
    if fault == "needs a word":
        install_listening()
    if fault == "long records":
        install_long_records()
    if fault.startswith("end"):
        install_end(fault.removeprefix("end "))
    if fault.startswith("validation"):
        _, number, where, what = fault.split()
        install_validation(int(number), where, what)
    if fault in ("spike", "spike twice"):
        forward = Engine.__call__

        def faulty_forward(engine: Engine, *inputs: object) -> tuple[Tensor, ...]:
            loss, *others = forward(engine, *inputs)
            return (loss * SPIKE if at_work and len(others) == 1 else loss, *others)  # a validation has three

        Engine.__call__ = faulty_forward


def install_disk(fault: str) -> None:
    """A disk that takes the first checkpoint only while training continues; or the second one kills the writer."""
    import dist_transformer.training.checkpoint.async_writer as saver
    from dist_transformer.training.global_batch import GlobalBatch
    from dist_transformer.training.loop import Loop

    begin, write = saver.AsyncWriter.begin, saver.write_state_file
    loops: list[Loop] = []
    saves: list[int] = []
    step = Loop._step

    def noted_step(loop: Loop, batch: GlobalBatch, *others: object) -> bool:
        loops[:] = [loop]
        return step(loop, batch, *others)

    def noted_begin(at: saver.AsyncWriter, engine: Engine, state: dict[str, int]) -> None:
        saves.append(state["step"])
        begin(at, engine, state)

    def faulty_write(*arguments: object) -> None:
        if fault == "slow disk" and len(saves) == 1:
            while loops[0].state.step < saves[0] + STEPS_MEANWHILE:
                threading.Event().wait(0.01)
        write(*arguments)
        if fault == "killed while saving" and len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Loop._step, saver.AsyncWriter.begin, saver.write_state_file = noted_step, noted_begin, faulty_write


def install_validation(number: int, where: str, what: str) -> None:
    """In the measuring, the search or the scoring of the validation of this number, or in the step after it: a stop, a
    kill, no memory, or a dead disk."""
    import dist_transformer.decoding.metrics as score
    from dist_transformer.decoding.search import TorchSearcher
    from dist_transformer.training.validation.runner import Validator

    begun: list[int] = []

    def replaced(owner: object, name: str, place: str) -> None:
        original = getattr(owner, name)

        def faulty(*arguments: object, **named: object) -> object:
            if name == "validate":
                begun.append(1)
            elif (where, len(begun)) == (place, number) and (name != "__call__" or arguments[-1] is True):
                strike(what, where == "scoring")
            return original(*arguments, **named)

        setattr(owner, name, faulty)

    replaced(Validator, "validate", "")
    replaced(Engine, "__call__", "measuring")
    replaced(Engine, "backward", "step")
    replaced(TorchSearcher, "search", "search")
    replaced(score, "corpus_scores", "scoring")


def install_waiting(count: int) -> None:
    """After so many global batches of a start, the next one waits until a stop is asked for, or the rank is killed."""
    from dist_transformer.training.global_batch import GlobalBatch
    from dist_transformer.training.loop import Loop

    step, batches = Loop._step, 0

    def waiting(loop: Loop, batch: GlobalBatch, *others: object) -> bool:
        nonlocal batches
        batches += 1
        while batches == count + 1 and not loop._run.wants_stop():
            threading.Event().wait(0.01)
        return step(loop, batch, *others)

    Loop._step = waiting


def install_wrong_gradients() -> None:
    """One in ten forward passes of training gives a loss, and so a gradient, that is wrong by less than a hundredth."""
    from dist_transformer.training.engine.objective import Objective

    forward, drawn = Objective.forward, random.Random(1)

    def faulty(objective: Objective, *inputs: object) -> tuple[Tensor, ...]:
        loss, *others = forward(objective, *inputs)
        if objective.training and drawn.random() < 0.1:
            loss = loss * (1 + 0.01 * drawn.random())
        return (loss, *others)

    Objective.forward = faulty


def install_listening() -> None:
    """Work that may take long fails where the watchdog heard nothing since the piece before it."""
    from dist_transformer.data.loader.window import WindowBuilder
    from dist_transformer.decoding.ensemble import Ensemble
    from dist_transformer.training.checkpoint.tensor_files import StateFiles
    from dist_transformer.training.engine.objective import Objective
    from dist_transformer.training.watchdog import Watchdog

    before = ""
    progress = Watchdog.progress

    def heard(watchdog: Watchdog, doing: str) -> None:
        nonlocal before
        before = ""
        progress(watchdog, doing)

    def replaced(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def silent(*arguments: object) -> object:
            nonlocal before
            here, found = f"{owner.__name__}.{name}", original(*arguments)
            if threading.current_thread() is threading.main_thread():  # of other threads the processor time tells
                assert not before, f"{before} and {here} without a word between them"
                before = here
            return found

        setattr(owner, name, silent)

    Watchdog.progress = heard
    replaced(Objective, "forward")
    replaced(WindowBuilder, "build")
    replaced(Ensemble, "step")
    replaced(StateFiles, "read")


def install_long_records() -> None:
    """Records are cut back until the other rank's watchdog has heard of it twice."""
    from dist_transformer.run.metrics_log import MetricsLog
    from dist_transformer.training.watchdog import Watchdog

    rewind, progress, heard = MetricsLog.rewind, Watchdog.progress, Path("heard_of_records")

    def noted(watchdog: Watchdog, doing: str) -> None:
        if os.environ["RANK"] == "1" and "records" in doing:
            heard.write_text(heard.read_text() + "." if heard.exists() else ".")
        progress(watchdog, doing)

    def long_rewind(*arguments: object, in_place: bool = False) -> None:
        deadline = time.monotonic() + 60
        while not heard.exists() or len(heard.read_text()) < 2:
            assert time.monotonic() < deadline, "rank 1 heard nothing"
        rewind(*arguments, in_place=in_place)

    Watchdog.progress, MetricsLog.rewind = noted, long_rewind


def install_end(what: str) -> None:
    """A stop comes while what is done at the end of a run takes longer than anybody waits."""
    from dist_transformer.training import finish

    name = {"averaging": "write_final_model", "report": "report_after_training"}[what]
    setattr(finish, name, lambda *arguments: strike("stop", True))


def strike(what: str, is_endless: bool) -> None:
    if what == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if what == "disk":
        raise OSError(5, "Input/output error")
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGUSR1)
    if is_endless:  # a score that takes longer than anybody waits
        threading.Event().wait()


def num_noticed() -> int:
    name = next(argument for argument in sys.argv if argument.startswith("run.name=")).removeprefix("run.name=")
    events = Path("runs", name, "divergence.json")
    return len(json.loads(events.read_text(encoding="utf-8"))) if events.exists() else 0


def take_memory_away() -> None:
    """What `ulimit -v` does, from here on: this process gets no more than it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(64 << 20)


def train(fault: str, faulty_rank: str, arguments: list[str]) -> None:
    """Trains as a rank, which is a faulty one if it has that number, or all have."""
    if faulty_rank in (os.environ["RANK"], "all"):
        for each in fault.split(", "):
            install(each)
    sys.argv = ["dist-transformer", "train", *arguments]
    main()


if __name__ == "__main__":
    fault, faulty_rank, *arguments = sys.argv[1:]
    if "RANK" not in os.environ:
        sys.exit(fork_local_ranks(partial(train, fault, faulty_rank, arguments[:-1]), int(arguments[-1])))
    train(fault, faulty_rank, arguments)
