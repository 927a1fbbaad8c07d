"""Folders as Marian itself writes them, made here with random weights, and what Marian computes from a .npz, written out.

The formulas are those of src/models/transformer.h, src/layers and src/tensors of marian-nmt/marian-dev 1.12, in fp64.
"""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import yaml
from marian_folders import demo_sentences

D_MODEL, D_FF, HEADS, LAYERS = 8, 12, 2, 2
SETTINGS: dict[str, Any] = {
    "type": "transformer",
    "dim-emb": D_MODEL,
    "transformer-dim-ffn": D_FF,
    "transformer-heads": HEADS,
    "enc-depth": LAYERS,
    "dec-depth": LAYERS,
    "transformer-ffn-activation": "relu",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-decoder-autoreg": "self-attention",
    "tied-embeddings-all": True,
}


def marian_spm(seed: int = 0) -> bytes:
    """As Marian trains them: end 0, unknown 1, no begin, no padding."""
    writer, (source, target) = io.BytesIO(), demo_sentences(300)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*source, *target][seed:]),
        model_writer=writer,
        vocab_size=150 - 10 * seed,
        bos_id=-1,
        eos_id=0,
        unk_id=1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return writer.getvalue()


def make_marian_npz(folder: Path, left_out: tuple[str, ...] = (), **given: Any) -> dict[str, np.ndarray]:
    """Writes model.npz, the vocabularies and model.npz.decoder.yml, and returns the arrays. `given`: other settings, with
    _ for -. Vocabularies are separate unless all embeddings are tied."""
    folder.mkdir(parents=True)
    settings = {**SETTINGS, **{name.replace("_", "-"): value for name, value in given.items()}}
    names = ["vocab.spm"] * 2 if settings["tied-embeddings-all"] else ["source.spm", "target.spm"]
    sizes = []
    for seed, name in enumerate(names):
        content = marian_spm(0 if names[0] == names[1] else seed)
        (folder / name).write_bytes(content)
        sizes.append(sentencepiece.SentencePieceProcessor(model_proto=content).get_piece_size())
    arrays = random_arrays({**settings, "dim-vocabs": sizes})
    write_npz(folder / "model.npz", {name: array for name, array in arrays.items() if name not in left_out})
    decoder = {"relative-paths": True, "models": ["model.npz"], "vocabs": names}
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump(decoder), encoding="utf-8")
    return arrays


def random_arrays(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, int]] = {}
    for side, parts in (("encoder", ("self",)), ("decoder", ("self", "context"))):
        for layer in range(1, LAYERS + 1):
            name = f"{side}_l{layer}"
            for part in parts:
                for letter in "qkvo":
                    shapes |= {f"{name}_{part}_W{letter}": (D_MODEL, D_MODEL), f"{name}_{part}_b{letter}": (1, D_MODEL)}
                shapes |= {f"{name}_{part}_Wo_ln_{kind}": (1, D_MODEL) for kind in ("scale", "bias")}
            shapes |= {f"{name}_ffn_W1": (D_MODEL, D_FF), f"{name}_ffn_b1": (1, D_FF)}
            shapes |= {f"{name}_ffn_W2": (D_FF, D_MODEL), f"{name}_ffn_b2": (1, D_MODEL)}
            shapes |= {f"{name}_ffn_ffn_ln_{kind}": (1, D_MODEL) for kind in ("scale", "bias")}
    source, target = settings["dim-vocabs"]
    if settings["tied-embeddings-all"]:
        shapes["Wemb"] = (source, D_MODEL)
    else:
        shapes |= {"encoder_Wemb": (source, D_MODEL), "decoder_Wemb": (target, D_MODEL)}
        if not settings.get("tied-embeddings"):
            shapes["decoder_ff_logit_out_Wt"] = (target, D_MODEL)
    shapes["decoder_ff_logit_out_b"] = (1, target)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["special:model.yml"] = np.frombuffer(yaml.safe_dump(dict(settings)).encode() + b"\0", np.int8)
    return arrays


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **dict(arrays))


def read_npz(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays, and the settings among them."""
    with np.load(path) as file:
        arrays = dict(file)
    content = arrays["special:model.yml"].tobytes()
    assert content.endswith(b"\0"), "Marian reads until the zero"
    return arrays, yaml.safe_load(content.rstrip(b"\0"))


def marian_log_probabilities(path: Path, source: list[int], target: list[int]) -> np.ndarray:
    """Returns the log-probability of each id of `target`, given `source` and the ids before it."""
    arrays, settings = read_npz(path)
    weights = {name: array.astype(np.float64) for name, array in arrays.items() if array.dtype == np.float32}
    shared = weights.get("Wemb")
    embeddings = [weights[f"{side}_Wemb"] if shared is None else shared for side in ("encoder", "decoder")]
    heads, activation = settings["transformer-heads"], settings["transformer-ffn-activation"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return unit * weights[f"{name}_ln_scale"] + weights[f"{name}_ln_bias"]

    def affine(x: np.ndarray, name: str, suffix: str) -> np.ndarray:
        return x @ weights[f"{name}_W{suffix}"] + weights[f"{name}_b{suffix}"]

    def attention(x: np.ndarray, memory: np.ndarray, name: str, is_causal: bool = False) -> np.ndarray:
        def split(y: np.ndarray) -> np.ndarray:
            return y.reshape(len(y), heads, -1).transpose(1, 0, 2)

        query, key, value = (
            split(affine(x, name, "q")),
            split(affine(memory, name, "k")),
            split(affine(memory, name, "v")),
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])
        if is_causal:
            scores = scores + np.triu(np.full(scores.shape[1:], -1e9), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        joined = (shares / shares.sum(-1, keepdims=True)) @ value
        return norm(x + affine(joined.transpose(1, 0, 2).reshape(x.shape), name, "o"), f"{name}_Wo")

    def feed_forward(x: np.ndarray, name: str) -> np.ndarray:
        inner = affine(x, name, "1")
        inner = np.maximum(inner, 0) if activation == "relu" else inner / (1 + np.exp(-inner))
        return norm(x + affine(inner, name, "2"), f"{name}_ffn")

    hidden = with_positions(embeddings[0][source])
    for layer in range(1, settings["enc-depth"] + 1):
        hidden = attention(hidden, hidden, f"encoder_l{layer}_self")
        hidden = feed_forward(hidden, f"encoder_l{layer}_ffn")
    memory = hidden
    hidden = with_positions(np.concatenate([np.zeros_like(embeddings[1][:1]), embeddings[1][target[:-1]]]))
    for layer in range(1, settings["dec-depth"] + 1):
        hidden = attention(hidden, hidden, f"decoder_l{layer}_self", is_causal=True)
        hidden = attention(hidden, memory, f"decoder_l{layer}_context")
        hidden = feed_forward(hidden, f"decoder_l{layer}_ffn")
    is_tied = settings["tied-embeddings-all"] or settings.get("tied-embeddings")
    output = embeddings[1] if is_tied else weights["decoder_ff_logit_out_Wt"]
    logits = hidden @ output.T + weights["decoder_ff_logit_out_b"]
    logits -= logits.max(-1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_probabilities[np.arange(len(target)), target]


def with_positions(embedded: np.ndarray) -> np.ndarray:
    """sqrt(D) times the embeddings, plus sines in the first half of D and cosines in the second."""
    length, width = embedded.shape
    half = width // 2
    angles = np.arange(length)[:, None] * np.exp(np.arange(half) * -math.log(10000.0) / (half - 1))
    return math.sqrt(width) * embedded + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
