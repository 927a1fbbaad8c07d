"""Runs Sockeye or JoeyNMT in its own environment, and prints what its log leaves out: real target tokens and loss by step.

    python -P print_marks.py joeynmt STEPS_PER_MARK train config.yaml

One method of the toolkit is wrapped; what it computes is not touched.
"""

import functools
import json
import math
import runpy
import sys


class Marks:
    """Sums over some steps, printed as a line."""

    def __init__(self, steps_per_mark):
        self._steps_per_mark, self._step, self._tokens, self._loss = steps_per_mark, 0, 0, 0.0

    def add(self, target_tokens, loss_sum):
        self._step, self._tokens, self._loss = self._step + 1, self._tokens + target_tokens, self._loss + loss_sum
        if self._step % self._steps_per_mark == 0:
            value = {"step": self._step, "target_tokens": self._tokens, "loss": self._loss / self._tokens}
            print("MARK " + json.dumps(value), flush=True)
            self._tokens, self._loss = 0, 0.0


def sockeye(marks):
    from sockeye.training import EarlyStoppingTrainer

    forward_backward = EarlyStoppingTrainer._forward_backward

    @functools.wraps(forward_backward)
    def marked(self, batch, *arguments):
        losses, counts = forward_backward(self, batch, *arguments)
        tokens = int((batch.labels["target_label"] != 0).sum())
        marks.add(tokens, losses[0].item() * tokens)
        return losses, counts

    EarlyStoppingTrainer._forward_backward = marked
    return "sockeye.train"


def joeynmt(marks):
    """Its loss is the divergence from the smoothed distribution; with the entropy of that it is the cross-entropy."""
    from joeynmt.training import TrainManager

    step = TrainManager._train_step

    @functools.wraps(step)
    def marked(self, batch):
        loss, correct = step(self, batch)
        smoothing, others = self.model.loss_function.smoothing, len(self.model.trg_vocab) - 2
        entropy = -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(smoothing / others)
        marks.add(int(batch.ntokens), (float(loss) + entropy) * int(batch.ntokens))
        return loss, correct

    TrainManager._train_step = marked
    return "joeynmt"


def main():
    toolkit, steps_per_mark = sys.argv[1], int(sys.argv[2])
    module = {"sockeye": sockeye, "joeynmt": joeynmt}[toolkit](Marks(steps_per_mark))
    sys.argv = [toolkit, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
