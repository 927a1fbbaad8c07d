"""Attention maps: the composed picture is the weights, and what is drawn follows them."""

import io
import warnings
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

from dist_transformer.reporting.attention import SentenceAttention, attention_png, composed, gap_of, shown_pieces

pytestmark = pytest.mark.slow


def random_maps(num_layers: int, num_heads: int, rows: int, columns: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(5).random((num_layers, num_heads, rows, columns))
    return [*(drawn / drawn.sum(-1, keepdims=True)).astype(np.float32)]


def sentence_of(source: list[str], target: list[str], num_layers: int = 2, num_heads: int = 3) -> SentenceAttention:
    sizes = [(len(source), len(source)), (len(target), len(target)), (len(target), len(source))]
    maps = [random_maps(num_layers, num_heads, *size) for size in sizes]
    return SentenceAttention("the source", "the target", source, ["<s>", *target[:-1]], target, *maps)


def pixels_of(picture: bytes, color: float) -> int:
    """How many pixels have the shade of this part of the scale."""
    wanted = np.asarray(colormaps["Blues"](color, bytes=True))[:3]
    pixels = np.rint(255 * imread(io.BytesIO(picture))[:, :, :3])
    return int((pixels == wanted).all(-1).sum())


def test_the_composed_image_holds_every_weight_once_and_nothing_between():
    layers = random_maps(3, 4, 5, 7)
    image, gap = composed(layers), gap_of(layers[0])
    found = np.full_like(image, np.nan)
    for layer, maps in enumerate(layers):
        for head, weights in enumerate(maps):
            rows, columns = layer * (5 + gap), head * (7 + gap)
            np.testing.assert_array_equal(image[rows : rows + 5, columns : columns + 7], weights)
            found[rows : rows + 5, columns : columns + 7] = weights
    np.testing.assert_array_equal(image, found)
    assert np.isfinite(image).sum() == 3 * 4 * 5 * 7
    assert np.nansum(image) == pytest.approx(3 * 4 * 5)  # each row sums to 1


def test_what_is_drawn_follows_the_weights():
    pieces = [f"p{number}" for number in range(4)]
    same = [np.stack([np.eye(4, dtype=np.float32)] * 2)]
    sentence = replace(sentence_of(pieces, pieces, 1, 2), encoder=same, decoder=same, cross=same)
    picture = attention_png(sentence)
    dark, light = pixels_of(picture, 1.0), pixels_of(picture, 0.0)
    assert light / dark == pytest.approx(3, rel=0.05)  # of a 4 x 4 identity a quarter is 1
    other = [np.roll(same[0], 1, axis=2)]
    assert attention_png(replace(sentence, cross=other)) != picture


def test_many_small_weights_are_seen():
    pieces = [f"p{number}" for number in range(30)]
    even = [np.full((2, 30, 30), 1 / 30, dtype=np.float32)]
    picture = attention_png(replace(sentence_of(pieces, pieces, 1, 2), encoder=even, decoder=even, cross=even))
    red = imread(io.BytesIO(picture))[:, :, 0]
    assert np.median(red[red < 0.99]) < 0.9  # paper is 1


@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 1), (6, 8), (12, 2)])
def test_any_shape_of_model_has_a_picture(num_layers, num_heads):
    picture = attention_png(sentence_of(["▁a", "b", "</s>"], ["▁x", "</s>"], num_layers, num_heads))
    assert imread(io.BytesIO(picture)).ndim == 3


def test_one_piece_and_hundreds_of_pieces_have_a_picture():
    for length in (1, 150):
        attention_png(sentence_of([f"▁{n}" for n in range(length)], [f"▁{n}" for n in range(length)], 1, 1))


def test_characters_that_the_font_lacks_are_squares_and_nothing_warns():
    pieces = ["▁漢字", "▁größer", "$", "$x$", "^_{", "\n", "▁" + "long" * 9]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_png(sentence_of(pieces, pieces))
    assert shown_pieces(pieces)[:3] == ["_□□", "_größer", "$"]
    assert shown_pieces(pieces)[-1] == "_longlonglong…"
