"""Assignment of a profiler's spans to the parts of a step. Pure arithmetic on spans of time.

Ranges (record_function) around calls of the loop name the parts; a span belongs to the innermost range around it, and
counts without the spans inside of it:

    step [ data [..] forward [ attention [ aten::linear [ aten::addmm ] ] loss [..] ] backward [ evaluate AddmmBackward0 [..] ] ]

Operations of the backward pass are not inside of a range of their sub-layer, but have the sequence number of their
forward operation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

PREFIX = "dist_transformer."
STEP, DATA, FORWARD, ATTENTION, FEED_FORWARD, LOSS, BACKWARD, OPTIMIZER, COMMUNICATION, TRACKING, VALIDATION, CHECKPOINT = (
    "step", "data", "forward", "attention", "feed-forward", "loss", "backward", "optimizer", "communication",
    "tracking and logging", "validation", "checkpoint",
)  # fmt: skip
REST, LOOP = "the rest", "the loop"
SUB_LAYERS = (ATTENTION, FEED_FORWARD)
PARTS = (
    DATA,
    *(f"{direction}: {part}" for direction in (FORWARD, BACKWARD) for part in (*SUB_LAYERS, REST)),
    LOSS, OPTIMIZER, COMMUNICATION, TRACKING, VALIDATION, CHECKPOINT, LOOP,
)  # fmt: skip
"""Parts in the order of the table; together they are the step."""
COLLECTIVES = ("c10d::", "nccl:", "gloo:", "record_param_comms")
BACKWARD_NODE = "autograd::engine::evaluate_function: "


class Span(NamedTuple):
    """One operation or range of a thread; times in microseconds.

    Attributes:
        sequence: number that an operation shares with its backward operation; -1 without one.
        is_range: True for a range, which only names a part.
        device_us: time of the GPU kernels that this span itself started.
    """

    name: str
    thread: int
    start: float
    end: float
    sequence: int
    is_range: bool
    device_us: float


@dataclass
class Spent:
    """Microseconds of one part.

    Attributes:
        operators: time inside of torch's operators.
        between: time outside of them: Python, waiting.
        device: time of the GPU's kernels.
    """

    operators: float = 0.0
    between: float = 0.0
    device: float = 0.0

    @property
    def total(self) -> float:
        return self.operators + self.between


@dataclass
class Account:
    """Time spent in some steps, by part and by operator (calls, microseconds of the operator itself)."""

    parts: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    calls: Counter[str] = field(default_factory=Counter)
    operators: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def microseconds(self) -> float:
        return sum(spent.total for spent in self.parts.values())


@dataclass(frozen=True)
class _Place:
    """Place of a span in a step: a direction and a part of it, or a part of its own."""

    direction: str = ""
    part: str = LOOP

    @property
    def name(self) -> str:
        return f"{self.direction}: {self.part}" if self.part in (*SUB_LAYERS, REST) else self.part

    def within(self, name: str) -> "_Place":
        """Returns the place inside of our range of this name. Forward passes in a validation belong to it."""
        if self.part in (VALIDATION, CHECKPOINT, TRACKING) and name != COMMUNICATION:
            return self
        if name in (FORWARD, BACKWARD):
            return _Place(name, REST)
        # A layer that is recomputed in the backward pass is a part of that pass.
        return replace(self, part=name) if name in (*SUB_LAYERS, LOSS) and self.direction else _Place("", name)


def account(spans: Iterable[Span]) -> Account:
    """Sums the time of the main thread within steps, and the GPU time of all threads."""
    by_thread: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_thread[span.thread].append(span)
    steps = [span for span in by_thread.values() if any(s.name == PREFIX + STEP for s in span)]
    assert len(steps) == 1, "steps are of one thread"
    main = steps[0][0].thread
    found, part_of = Account(), dict[int, str]()
    _walk(by_thread.pop(main), None, part_of, found)
    for others in by_thread.values():  # with a GPU, the backward pass has a thread of its own
        _walk(others, _Place(BACKWARD, REST), part_of, found)
    return found


def _walk(spans: Sequence[Span], outside: _Place | None, part_of: dict[int, str], found: Account) -> None:
    """Adds the spans of one thread. `outside`: place of spans in no range; None: only spans in steps count, with the
    time of the thread itself. The sub-layer of each forward operation is added to `part_of`."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))  # outer spans first
    parents = _parents(ordered)
    own = [span.end - span.start for span in ordered]
    for span, parent in zip(ordered, parents, strict=True):
        if parent is not None:
            own[parent] -= span.end - span.start
    places: list[_Place | None] = []
    for span, parent, microseconds in zip(ordered, parents, own, strict=True):
        place = _place_of(span, outside if parent is None else places[parent], part_of)
        places.append(place)
        if place is not None:
            _learn(span, place, part_of)
            found.parts[place.name].device += span.device_us
            if outside is None:
                _count(span, microseconds, found.parts[place.name], found)


def _parents(ordered: Sequence[Span]) -> list[int | None]:
    """Returns for each span the index of the innermost span around it."""
    parents: list[int | None] = []
    opened: list[int] = []
    for number, span in enumerate(ordered):
        while opened and span.start >= ordered[opened[-1]].end:
            opened.pop()
        parents.append(opened[-1] if opened else None)
        opened.append(number)
    return parents


def _place_of(span: Span, around: _Place | None, part_of: Mapping[int, str]) -> _Place | None:
    name = span.name.removeprefix(PREFIX)
    if name != span.name:
        return _Place() if name == STEP else around and around.within(name)
    if around is None:
        return None
    if span.name.startswith(COLLECTIVES):
        return _Place("", COMMUNICATION)
    if span.name.startswith(BACKWARD_NODE) and around.direction == BACKWARD:
        return _Place(BACKWARD, part_of.get(span.sequence, REST))
    return around


def _learn(span: Span, place: _Place, part_of: dict[int, str]) -> None:
    """Records the part of a forward operation; the last one with a sequence number is that of the backward node."""
    if span.sequence >= 0 and not span.name.startswith(BACKWARD_NODE) and place.direction == FORWARD:
        part_of[span.sequence] = place.part


def _count(span: Span, microseconds: float, spent: Spent, found: Account) -> None:
    if span.is_range:
        spent.between += microseconds
        return
    spent.operators += microseconds
    name = span.name.removeprefix(BACKWARD_NODE)
    found.calls[name] += 1
    found.operators[name] += microseconds
