"""Figure of the attention weights of one sentence, for all heads of all layers.

Three blocks: encoder self-attention, decoder self-attention, cross-attention. In each, small maps of every layer (rows)
and head (columns) at the left, and at the right the mean over the heads of the last layer, large and with its pieces.
A row of a map is the attention of one position: darker is more, and the weights of a row sum to 1.

Axes: H heads, S source pieces, T target pieces.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.reporting.fonts import drawable

if TYPE_CHECKING:  # imported at run time only for drawing: it takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Map = NDArray[np.floating[Any]]
GAP_SHARE = 0.12
"""Space between two small maps, as a share of the longer side of one."""
LONGEST_PIECE = 14
MOST_LABELS = 64
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
WORD_BEGIN = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character by which sentencepiece represents a space."""
WIDTH_INCHES, HEADS_INCHES, TITLE_INCHES, SCALE_INCHES = 13.0, 5.7, 0.75, 0.5
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


@dataclass(frozen=True)
class _Block:
    title: str
    layers: Sequence[Map]
    rows: Sequence[str]
    columns: Sequence[str]
    row_words: str
    column_words: str


def attention_png(sentence: SentenceAttention) -> bytes:
    """The figure as the content of a PNG file."""
    from matplotlib.figure import Figure

    blocks = _blocks(sentence)
    height = SCALE_INCHES + sum(map(_height, blocks))
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor=PAPER)

    def place(left: float, top: float, width: float, tall: float) -> "Axes":
        """Axes whose upper left corner lies so many inches from that of the figure."""
        size = (left / WIDTH_INCHES, (height - top - tall) / height, width / WIDTH_INCHES, tall / height)
        return figure.add_axes(size)

    shades = _draw_block(blocks[0], place, SCALE_INCHES)
    _draw_scale(figure, shades, place(WIDTH_INCHES - 4.2, 0.2, 4.0, 0.14))
    top = SCALE_INCHES + _height(blocks[0])
    for block in blocks[1:]:
        _draw_block(block, place, top)
        top += _height(block)
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


def _blocks(sentence: SentenceAttention) -> list[_Block]:
    source, read, target = sentence.source_pieces, sentence.read_pieces, sentence.target_pieces
    return [
        _Block("Encoder self-attention", sentence.encoder, source, source, "at", "looks at"),
        _Block("Decoder self-attention", sentence.decoder, target, read, "predicts", "looks at (read so far)"),
        _Block("Cross-attention", sentence.cross, target, source, "predicts", "looks at (source)"),
    ]


def _height(block: _Block) -> float:
    """Height of a block in inches, with space for the labels of the large map, and without stretching few layers."""
    return TITLE_INCHES + _label_inches(block.columns) + float(np.clip(0.19 * len(block.rows), 2.6, 7.0)) + 0.35


def _label_inches(pieces: Sequence[str]) -> float:
    return 0.15 + 0.085 * max(map(len, shown_pieces(pieces)))


def _draw_block(block: _Block, place: Callable[[float, float, float, float], "Axes"], top: float) -> Any:
    """Draws a block below `top`, in inches; returns the image of its large map."""
    below, bottom = top + TITLE_INCHES, top + _height(block) - 0.35
    heads = place(0.55, below + 0.1, HEADS_INCHES, bottom - below - 0.1)
    heads.text(-0.06, 1.0 + 0.5 / (bottom - below), block.title, transform=heads.transAxes, fontsize=13, fontweight="bold",
               color=INK)  # fmt: skip
    _draw_heads(block, heads)
    left = 0.55 + HEADS_INCHES + 0.45 + _label_inches(block.rows)
    below += _label_inches(block.columns)
    return _draw_mean(block, place(left, below, WIDTH_INCHES - left - 0.1, bottom - below))


def _draw_scale(figure: "Figure", shades: Any, axes: "Axes") -> None:
    """Draws the scale of the shades."""
    bar = figure.colorbar(shades, cax=axes, orientation="horizontal", ticks=(0, 0.05, 0.2, 0.5, 1))
    bar.ax.set_xticklabels(["0", "0.05", "0.2", "0.5", "1"], fontsize=8, color=INK)
    bar.ax.set_ylabel("weight", fontsize=9, color=INK, rotation=0, ha="right", va="center")
    bar.outline.set_linewidth(0.5)


def _draw_heads(block: _Block, axes: "Axes") -> None:
    image, (num_heads, rows, columns) = composed(block.layers), block.layers[0].shape
    gap = gap_of(block.layers[0])
    _show(image, axes)
    axes.set_xticks([head * (columns + gap) + (columns - 1) / 2 for head in range(num_heads)])
    axes.set_yticks([layer * (rows + gap) + (rows - 1) / 2 for layer in range(len(block.layers))])
    axes.set_xticklabels([str(head + 1) for head in range(num_heads)])
    axes.set_yticklabels([str(layer + 1) for layer in range(len(block.layers))])
    axes.set_xlabel("head", fontsize=9, color=INK)
    axes.set_ylabel("layer", fontsize=9, color=INK)
    for layer in range(len(block.layers)):
        for head in range(num_heads):
            _frame(axes, head * (columns + gap), layer * (rows + gap), columns, rows)
    axes.set_xlim(-1.0, image.shape[1])
    axes.set_ylim(image.shape[0], -1.0)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0, labelsize=9, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _frame(axes: "Axes", left: int, top: int, width: int, height: int) -> None:
    x, y = (left - 0.5, left + width - 0.5), (top - 0.5, top + height - 0.5)
    axes.plot([x[0], x[1], x[1], x[0], x[0]], [y[0], y[0], y[1], y[1], y[0]], color="#999999", linewidth=0.5)


def _draw_mean(block: _Block, axes: "Axes") -> Any:
    shades = _show(np.asarray(block.layers[-1], dtype=np.float64).mean(0), axes)
    _label(axes.xaxis, block.columns, rotation=90)
    _label(axes.yaxis, block.rows, rotation=0)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(f"{block.column_words}; mean of the heads of layer {len(block.layers)}", fontsize=9, color=INK)
    axes.set_ylabel(block.row_words, fontsize=9, color=INK)
    axes.tick_params(length=0, colors=INK, pad=2)
    return shades


def _label(axis: Any, pieces: Sequence[str], rotation: int) -> None:
    every = -(-len(pieces) // MOST_LABELS)
    places = range(0, len(pieces), every)
    labels = shown_pieces(pieces[place] for place in places)
    size = float(np.clip(300 / max(1, len(labels)), 5.0, 9.0))
    axis.set_ticks(places, labels, rotation=rotation, fontsize=size, parse_math=False)


def _show(weights: NDArray[Any], axes: "Axes") -> Any:
    from matplotlib.colors import PowerNorm

    return axes.imshow(weights, cmap="Blues", norm=PowerNorm(GAMMA, 0.0, 1.0), aspect="auto", interpolation="nearest")
