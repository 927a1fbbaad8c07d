"""Folders as OPUS-MT's on Hugging Face, made here: random weights, and a vocabulary of real sentencepiece models."""

import functools
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers

from dist_transformer.data.sources.demo_corpus import demo_pairs

CODES = [">>deu<<", ">>nds<<"]


def demo_sentences(number: int) -> tuple[list[str], list[str]]:
    pairs = [pair for _, pair in zip(range(number), demo_pairs("train"), strict=False)]
    return [source for source, _ in pairs], [target for _, target in pairs]


@functools.cache
def trained_spm(side: int, kind: str) -> bytes:
    """As OPUS-MT trains them: unknown 0, begin 1, end 2, no padding. Side 0 is the source."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(demo_sentences(300)[side]),
        model_writer=writer,
        vocab_size=160,
        model_type=kind,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return writer.getvalue()


def pieces_of(spm: sentencepiece.SentencePieceProcessor) -> list[str]:
    return [spm.id_to_piece(number) for number in range(spm.get_piece_size())]


def make_marian_folder(
    folder: Path, *, kind: str = "unigram", is_shared: bool = True, left_out: int = 0, **given: Any
) -> "transformers.MarianMTModel":
    """The model that lies in `folder`, in eval mode. vocab.json lacks `left_out` of the pieces that text is cut into."""
    folder.mkdir(parents=True)
    sides = []
    for side, name in enumerate(("source.spm", "target.spm")):
        (folder / name).write_bytes(trained_spm(side, kind))
        sides.append(sentencepiece.SentencePieceProcessor(model_file=str(folder / name)))
    texts = [
        [piece for piece in pieces_of(side)[3:] if len(piece) != 1 or piece == "\u2581"]
        + [piece for piece in pieces_of(side)[3:] if len(piece) == 1 and piece != "\u2581"]
        for side in sides
    ]
    texts = [pieces[: len(pieces) - left_out] for pieces in texts]
    joint = sorted({*texts[0], *texts[1]})
    vocabularies = [joint, joint] if is_shared else texts
    names = ("vocab.json", "vocab.json") if is_shared else ("vocab.json", "target_vocab.json")
    # The ids of the special pieces are common to both sides, so separate vocabularies have padding near the beginning.
    numbered = [
        ["</s>", "<unk>", *CODES, *pieces, "<pad>"] if is_shared else ["</s>", "<unk>", "<pad>", *pieces]
        for pieces in vocabularies
    ]
    for name, pieces in zip(names, numbered, strict=True):
        (folder / name).write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}), encoding="utf-8")
    tokenizer = {
        "source_lang": "en",
        "target_lang": "de",
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": not is_shared,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    pad_id = numbered[0].index("<pad>")
    sizes = dict(d_model=16, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=24, decoder_ffn_dim=24)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4)
    ids = dict(pad_token_id=pad_id, decoder_start_token_id=pad_id, eos_token_id=0, forced_eos_token_id=0)
    lengths = dict(vocab_size=len(numbered[0]), decoder_vocab_size=len(numbered[1]), max_position_embeddings=128)
    kinds = dict(activation_function="swish", scale_embedding=True, share_encoder_decoder_embeddings=is_shared)
    torch.manual_seed(3)
    model = transformers.MarianMTModel(
        transformers.MarianConfig(**{**sizes, **heads, **ids, **lengths, **kinds, **given})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # positions are no weights
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return model.eval()
