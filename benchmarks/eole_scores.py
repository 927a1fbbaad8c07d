"""Scores of the same translations by Eole itself and by this program, of models that Eole trained, in fp32 on one core.

    python benchmarks/eole_scores.py --work /tmp/eole      # some minutes; Eole is 1 GB, in an environment there

Eole trains models on the demonstration corpus; `import --from eole` takes them in. Both then translate held-out sentences with
a beam of 1. A figure is the largest difference of a sentence's log-probability, among the sentences that both translate the
same; what never ends is cut by each program elsewhere.
(With `add_qkvbias`, Eole 0.6.4 itself translates every word as unknown on a CPU, so that no model here has it.)
"""

import argparse
import math
import shutil
import tempfile
from pathlib import Path

import common
import yaml
from marian_scores import Text, finish, ours, python_with, run
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.engines import open_search
from dist_transformer.decoding.translate import translate_lines

TRAINED_BY_EOLE = {
    "ReLU, a vocabulary for each side, output tied": {"share_decoder_embeddings": True},
    "SiLU, biases of feed-forward networks, nothing tied, 3 + 3 layers": {
        "mlp_activation_fn": "silu",
        "add_ffnbias": True,
        "layers": 3,
    },
    "ReLU, all embeddings tied": {"share_embeddings": True, "share_decoder_embeddings": True},
}


def train(folder: Path, python: Path, text: Text, model: dict[str, object], steps: int) -> None:
    """Trains with Eole in `folder`; the checkpoint is `folder`/theirs."""
    is_shared = model.get("share_embeddings", False)
    names = ("both", "both") if is_shared else ("en", "de")
    for name, paths in {"both": text.train, "en": text.train[:1], "de": text.train[1:]}.items():
        if name in names:
            trained = {"input": ",".join(map(str, paths)), "model_prefix": str(folder / name), "vocab_size": 1000}
            SentencePieceTrainer.train(**trained, model_type="bpe", hard_vocab_limit=False, minloglevel=2)
            spm = SentencePieceProcessor(model_file=str(folder / f"{name}.model"))
            pieces = [spm.id_to_piece(number) for number in range(3, spm.get_piece_size())]  # without unk, <s>, </s>
            (folder / f"{name}.txt").write_text("".join(f"{piece}\t1\n" for piece in pieces), encoding="utf-8")
    files = {
        f"{side}_subword_model": str(folder / f"{name}.model") for side, name in zip(("src", "tgt"), names, strict=True)
    }
    corpus = {"path_src": str(text.train[0]), "path_tgt": str(text.train[1]), "transforms": ["sentencepiece"]}
    settings = {
        "data": {
            "corpus_1": corpus,
            "valid": {**corpus, "path_src": str(text.scored[0]), "path_tgt": str(text.scored[1])},
        },
        "src_vocab": str(folder / f"{names[0]}.txt"),
        "tgt_vocab": str(folder / f"{names[1]}.txt"),
        "share_vocab": is_shared,
        "vocab_size_multiple": 8,
        "transforms_configs": {"sentencepiece": files},
        "seed": 1,
        "model": {
            **{"architecture": "transformer", "hidden_size": 128, "layers": 2, "heads": 4, "transformer_ff": 256},
            **{"embeddings": {"word_vec_size": 128, "position_encoding_type": "SinusoidalInterleaved"}, **model},
        },
        "training": {
            **{"model_path": str(folder / "theirs"), "world_size": 0, "num_workers": 0, "batch_type": "tokens"},
            **{"batch_size": 2048, "train_steps": steps, "valid_steps": steps, "save_checkpoint_steps": steps},
            **{"optim": "adam", "adam_beta2": 0.998, "learning_rate": 2.0, "decay_method": "noam", "warmup_steps": 200},
            **{
                "label_smoothing": 0.1,
                "dropout": [0.1],
                "attention_dropout": [0.1],
                "param_init_method": "xavier_uniform",
            },
        },
    }
    (folder / "eole.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    run([python.with_name("eole"), "train", "-c", folder / "eole.yaml"])


def compared(folder: Path, python: Path, text: Text) -> dict[str, float]:
    """The figures of the model that Eole left in `folder`."""
    ours("import", folder / "theirs", folder / "ours", "--from", "eole")
    greedy = ["-beam_size", "1", "-length_penalty", "none", "-with_score", "-batch_type", "sents", "-batch_size", "32"]
    there = folder / "theirs.txt"
    files = ["-model_path", folder / "theirs", "-src", text.scored[0], "-output", there]
    run([python.with_name("eole"), "predict", *files, *greedy, "-world_size", "0"])
    lines = [line.split("\t") for line in there.read_text(encoding="utf-8").splitlines()]
    config = DecodingConfig(beam_size=1)
    search = open_search("torch", [folder / "ours"], config)
    found = [best for best, *_ in translate_lines(search.searcher, search.tokenizer, text.source, config)]
    pairs = [(each, theirs, float(score)) for each, (theirs, score, *_) in zip(found, lines, strict=True)]
    same = [abs(each.log_probability - score) for each, theirs, score in pairs if each.text == theirs]
    return {
        "sentences": len(pairs),
        "same_lines": len(same),
        "mean": sum(score for _, _, score in pairs) / len(pairs),
        "largest": max(same, default=math.inf),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for Eole's environment, kept; default: a temporary one")
    parser.add_argument("--sentences", type=int, default=500, help="held-out sentences that are translated")
    parser.add_argument("--steps", type=int, default=500, help="training steps of each model")
    arguments = common.arguments_of(parser, rounds=1)
    found = common.begin(threads=1)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).absolute()
        python = python_with("Eole", "eole", work)
        text, figures = Text(work, arguments.sentences), {}
        for number, (name, model) in enumerate(TRAINED_BY_EOLE.items()):
            folder = work / f"eole{number}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            train(folder, python, text, model, arguments.steps)
            figures[name] = compared(folder, python, text)
            print(f"{name}: {figures[name]['largest']:.1e}", flush=True)
    header = ["model", "sentences", "same lines, beam 1", "mean score", "largest difference"]
    rows = [
        [name, f"{each['sentences']:,}", f"{each['same_lines']:,}", f"{each['mean']:.2f}", f"{each['largest']:.1e}"]
        for name, each in figures.items()
    ]
    print(f"\n{common.markdown_table(header, rows)}")
    finish(arguments, found, figures)


if __name__ == "__main__":
    main()
