"""Figure of the attention weights of one sentence, for all heads of all layers.

Three blocks: encoder self-attention, decoder self-attention, cross-attention. In each, small maps of every layer (rows)
and head (columns) at the left, and at the right the mean over the heads of the last layer, large and with its pieces.
A row of a map is the attention of one position: darker is more, and the weights of a row sum to 1.

Axes: H heads, S source pieces, T target pieces.
"""

import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.reporting.fonts import drawable

if TYPE_CHECKING:  # imported at run time only for drawing: it takes half a second
    from matplotlib.axes import Axes

Map = NDArray[np.floating[Any]]
GAP_SHARE = 0.12
"""Space between two small maps, as a share of the longer side of one."""
LONGEST_PIECE = 14
MOST_LABELS = 64
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
WORD_BEGIN = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character by which sentencepiece represents a space."""
WIDTH_INCHES, LABEL_INCHES = 13.0, 2.2
"""Width of the figure, and height of the titles and labels of each block."""
INK, PAPER = "#222222", "#ffffff"
GAMMA = 0.5
"""Exponent from weight to darkness, so that small weights, spread over a long sentence, are visible too."""


@dataclass(frozen=True)
class SentenceAttention:
    """The weights of one sentence and its translation.

    Attributes:
        source_pieces: (S), the end of sentence last.
        read_pieces: (T) the decoder's input, the begin of sentence first.
        target_pieces: (T) its prediction at each, the end of sentence last.
        encoder: for each layer (H, S, S).
        decoder: for each layer (H, T, T): at each target piece over those read.
        cross: for each layer (H, T, S): at each target piece over the source pieces.
    """

    source: str
    translation: str
    source_pieces: Sequence[str]
    read_pieces: Sequence[str]
    target_pieces: Sequence[str]
    encoder: Sequence[Map]
    decoder: Sequence[Map]
    cross: Sequence[Map]


def attention_png(sentence: SentenceAttention) -> bytes:
    """The figure as the content of a PNG file."""
    from matplotlib.figure import Figure

    source, target = sentence.source_pieces, sentence.target_pieces
    blocks = (
        ("Encoder self-attention", sentence.encoder, source, source, "at", "looks at"),
        (
            "Decoder self-attention",
            sentence.decoder,
            target,
            sentence.read_pieces,
            "predicts",
            "looks at (read so far)",
        ),
        ("Cross-attention", sentence.cross, target, source, "predicts", "looks at (source)"),
    )
    heights = [LABEL_INCHES + float(np.clip(0.19 * len(rows), 2.6, 7.0)) for _, _, rows, *_ in blocks]
    figure = Figure((WIDTH_INCHES, sum(heights)), facecolor=PAPER, layout="constrained")
    parts: Any = figure.subfigures(len(blocks), height_ratios=heights)
    for (title, layers, rows, columns, row_words, column_words), part in zip(blocks, parts, strict=True):
        part.suptitle(title, x=0.01, horizontalalignment="left", fontsize=13, fontweight="bold", color=INK)
        heads, mean = part.subplots(1, 2)
        _draw_heads(layers, heads)
        shades = _show(np.asarray(layers[-1], dtype=np.float64).mean(0), mean)
        _label(mean.xaxis, columns, rotation=90)
        _label(mean.yaxis, rows, rotation=0)
        mean.set_xlabel(f"{column_words}; mean of the heads of layer {len(layers)}", fontsize=9, color=INK)
        mean.set_ylabel(row_words, fontsize=9, color=INK)
        mean.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0, colors=INK, pad=2)
        mean.xaxis.set_label_position("top")
        scale = part.colorbar(shades, ax=mean, ticks=(0, 0.05, 0.2, 0.5, 1), format="{x:g}", aspect=40, pad=0.01)
        scale.ax.tick_params(labelsize=8, labelcolor=INK)
    with io.BytesIO() as out:
        figure.savefig(out, format="png", dpi=110)
        return out.getvalue()


def composed(layers: Sequence[Map]) -> NDArray[np.float32]:
    """All maps as one array, layers downwards and heads to the right, NaN between them.

    Map h of layer l begins at row l * (rows + gap) and column h * (columns + gap), with the gap of `gap_of`.
    """
    num_heads, rows, columns = layers[0].shape
    gap = gap_of(layers[0])
    shape = (len(layers) * (rows + gap) - gap, num_heads * (columns + gap) - gap)
    image = np.full(shape, np.nan, dtype=np.float32)
    for layer, maps in enumerate(layers):
        for head, weights in enumerate(maps):
            top, left = layer * (rows + gap), head * (columns + gap)
            image[top : top + rows, left : left + columns] = weights
    return image


def gap_of(maps: Map) -> int:
    """Pixels between two maps of `composed`, for maps (H, rows, columns)."""
    return max(1, round(GAP_SHARE * max(int(size) for size in maps.shape[1:])))


def shown_pieces(pieces: Iterable[str]) -> list[str]:
    """Pieces as labels: "_" where a word begins, long ones cut, characters that the font lacks as a square."""
    cut = (piece if len(piece) <= LONGEST_PIECE else piece[: LONGEST_PIECE - 1] + ELLIPSIS for piece in pieces)
    return [drawable(piece.replace(WORD_BEGIN, "_")) for piece in cut]


def _draw_heads(layers: Sequence[Map], axes: "Axes") -> None:
    from matplotlib.collections import PolyCollection

    image, (num_heads, rows, columns), gap = composed(layers), layers[0].shape, gap_of(layers[0])
    _show(image, axes)
    lefts, tops = (np.arange(count) * (size + gap) for count, size in ((num_heads, columns), (len(layers), rows)))
    axes.set_xticks(lefts + (columns - 1) / 2, [str(head + 1) for head in range(num_heads)])
    axes.set_yticks(tops + (rows - 1) / 2, [str(layer + 1) for layer in range(len(layers))])
    axes.set_xlabel("head", fontsize=9, color=INK)
    axes.set_ylabel("layer", fontsize=9, color=INK)
    corners = np.array([(0, 0), (columns, 0), (columns, rows), (0, rows)]) - 0.5
    frames = [corners + place for place in itertools.product(lefts, tops)]
    axes.add_collection(PolyCollection(frames, facecolors="none", edgecolors="#999999", linewidths=0.5))
    axes.set_xlim(-1.0, image.shape[1])
    axes.set_ylim(image.shape[0], -1.0)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0, labelsize=9, colors=INK)
    axes.xaxis.set_label_position("top")
    axes.set_frame_on(False)


def _label(axis: Any, pieces: Sequence[str], rotation: int) -> None:
    every = -(-len(pieces) // MOST_LABELS)
    places = range(0, len(pieces), every)
    labels = shown_pieces(pieces[place] for place in places)
    size = float(np.clip(300 / max(1, len(labels)), 5.0, 9.0))
    axis.set_ticks(places, labels, rotation=rotation, fontsize=size, parse_math=False)


def _show(weights: NDArray[Any], axes: "Axes") -> Any:
    from matplotlib.colors import PowerNorm

    return axes.imshow(weights, cmap="Blues", norm=PowerNorm(GAMMA, 0.0, 1.0), aspect="auto", interpolation="nearest")
