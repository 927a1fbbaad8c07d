"""demo-corpus: write the embedded corpus as text files, to look at it or to train something else on it."""

from pathlib import Path
from typing import Annotated

import typer


def demo_corpus_command(folder: Annotated[Path, typer.Argument(help="Where to write train.en, train.de, ...")]) -> None:
    """Write the embedded English-German corpus as aligned text files."""
    from dist_transformer.data.demo_corpus import demo_pairs
    from dist_transformer.run_dir import write_text

    for split in ("train", "validation", "test"):
        source, target = zip(*demo_pairs(split), strict=True)
        write_text(folder / f"{split}.en", "\n".join(source) + "\n")
        write_text(folder / f"{split}.de", "\n".join(target) + "\n")
        print(f"{folder / split}.{{en,de}}: {len(source)} pairs")
