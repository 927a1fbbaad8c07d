"""The embedded demonstration corpus: English to German numbers, dates, times, prices and sentences about them.

Every source sentence has exactly one target, so a trained model can be scored exactly, and a small Transformer learns it
in minutes on a CPU. No sentence of validation or test is seen in training, on either side:

    ("The train to Bonn leaves at half past seven on Monday.", "Der Zug nach Bonn fährt am Montag um halb acht ab.")

Each split is two aligned files in the folder `demo` beside this one. tests/helpers/demo_generator.py made them of its
templates.
"""

import bz2
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

DemoSplit = Literal["train", "validation", "test"]
PAIRS_OF_SPLIT: dict[DemoSplit, int] = {"train": 30_000, "validation": 500, "test": 1_000}
DEMO_VERSION = 2
"""Version in every recipe that uses the corpus, incremented whenever one of its pairs changes."""


def demo_pairs(split: DemoSplit) -> Iterator[tuple[str, str]]:
    """Yields the (English, German) pairs of a split, always in the same order; each source once."""
    english, german = (Path(__file__).with_name("demo") / f"{split}.{code}.bz2" for code in ("en", "de"))
    with bz2.open(english, "rt", encoding="utf-8") as source, bz2.open(german, "rt", encoding="utf-8") as target:
        for pair in islice(zip(source, target, strict=True), PAIRS_OF_SPLIT[split]):
            yield pair[0].rstrip("\n"), pair[1].rstrip("\n")
