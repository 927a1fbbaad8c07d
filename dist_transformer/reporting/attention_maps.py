"""The attention weights of a model on sentences and its own translations of them, as arrays for a figure.

Axes: S source tokens, T target tokens.
"""

from pathlib import Path

import torch

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.search import TorchSearcher
from dist_transformer.errors import UserError
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.model.search_interface import SearchInput
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.attention import SentenceAttention

MOST_TOKENS = 200
"""Limit of a sentence: a larger map would be illegible, and takes long on a CPU."""


def attention_of(folder: Path, sentences: list[str]) -> list[SentenceAttention]:
    """Translates each sentence like `translate`, with the model of a folder, on the CPU, and returns its attention.

    Raises:
        UserError: the folder holds no complete model, or a sentence has no tokens or too many.
    """
    loaded = load_model_folder(folder)
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
    return [_of_sentence(loaded.model, tokenizer, sentence) for sentence in sentences]


@torch.no_grad()
def _of_sentence(model: Transformer, tokenizer: Tokenizer, sentence: str) -> SentenceAttention:
    (source,) = tokenizer.encode_source([sentence])
    most = min(MOST_TOKENS, model.max_positions or MOST_TOKENS)
    if not 1 < len(source) <= most:
        raise UserError(f"“{sentence[:60]}”: {len(source)} tokens; expected 2 to {most}, the end of sentence counted")
    searcher = TorchSearcher([model], tokenizer.special, DecodingConfig(), torch.device("cpu"))
    (found,) = searcher.search([SearchInput(source, [], 0)])
    target = [*found[0].tokens, tokenizer.eos_id]
    read = [tokenizer.bos_id, *found[0].tokens]
    maps = model.attention_maps(torch.tensor([source]), torch.tensor([read]))
    encoder, decoder, cross = (
        [weights[0].numpy() for weights in layers] for layers in (maps.encoder, maps.decoder, maps.cross)
    )
    return SentenceAttention(
        sentence,
        tokenizer.decode_target(found[0].tokens),
        tokenizer.source_pieces(source),
        tokenizer.target_pieces(read),
        tokenizer.target_pieces(target),
        encoder,
        decoder,
        cross,
    )
