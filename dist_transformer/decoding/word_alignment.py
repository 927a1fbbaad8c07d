"""Word alignment between a sentence and its translation, from the model's cross-attention.

As the layer average of Garg et al. (2019), "Jointly Learning to Align and Translate": the mean over the heads of the
last layer but one. The weights of a word's pieces are summed, and each target word is aligned to the source word with
the greatest sum.

Axes: L layers, H heads, S source pieces, T target pieces, both with the end of sentence last.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.translate import Translation
from dist_transformer.model.transformer import Transformer

Spans = list[tuple[int, int]]


@torch.no_grad()
def cross_attention(model: Transformer, tokenizer: Tokenizer, line: str, translation: Translation) -> Tensor:
    """Cross-attention weights (L, H, T, S) of the decoder at each piece that it predicts; fp32, on the CPU. `line` is
    not blank."""
    (source,) = tokenizer.encode_source([line.strip()])
    read = [tokenizer.bos_id, *translation.tokens]
    device = model.output_weight.device
    maps = model.attention_maps(torch.tensor([source], device=device), torch.tensor([read], device=device))
    return torch.stack([weights_BHTS[0].float().cpu() for weights_BHTS in maps.cross])


def word_alignment(
    model: Transformer, tokenizer: Tokenizer, line: str, translation: Translation
) -> list[tuple[int, int]]:
    """Pairs (word in `line`, word of the translation) for each word of the translation; words are separated by spaces
    and counted from 0."""
    if not translation.text.split() or not line.split():
        return []
    text = line.strip()
    weights_LHTS = cross_attention(model, tokenizer, line, translation)
    weights_TS = weights_LHTS[max(0, len(weights_LHTS) - 2)].mean(0)
    source_words = words_of(text, tokenizer.source_spans(text)[:-1])
    target_words = words_of(translation.text, tokenizer.target_spans(translation.tokens))
    return links(weights_TS[:-1, :-1], source_words, target_words)


def words_of(text: str, spans: Spans) -> list[int]:
    """Number of the word of each piece of a text: the one at its first character that is no space."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return [min(bisect_right(ends, begin), len(ends) - 1) for begin, _ in spans]


def links(weights_TS: Tensor, source_words: Sequence[int], target_words: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs (source word, target word) for each target word that has a piece, in order."""
    num_source, num_target = max(source_words) + 1, max(target_words) + 1
    from_words = torch.zeros(len(weights_TS), num_source)
    from_words.index_add_(1, torch.tensor(source_words), weights_TS)
    of_words = torch.zeros(num_target, num_source).index_add_(0, torch.tensor(target_words), from_words)
    chosen = of_words.argmax(1).tolist()
    return [(chosen[word], word) for word in sorted(set(target_words))]
