"""The toolkits: how each is installed, told to do the same work, and read.

Factors say how many tokens of a toolkit's own batch size come to one real target token: one counts the longer side, another
both, most count padding, one does not sort by length. They were measured on the invented text; the race reports what came
out.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml
from corpus import LONGEST_PIECES, SIDES
from protocol import (
    BETAS,
    DROPOUT,
    EPSILON,
    LABEL_SMOOTHING,
    NEVER,
    PEAK_LEARNING_RATE,
    SEED,
    WARMUP_STEPS,
    Mark,
    Peer,
    Task,
    printed_mark,
)

TORCH = ("torch==2.13.0", "numpy", "sentencepiece", "sacrebleu", "pyyaml", "packaging", "six", "setuptools<81")
PRINT_MARKS = Path(__file__).with_name("print_marks.py")
MARIAN_TOKENS = 0.96
OPENNMT_TOKENS = 1.2
JOEY_TOKENS = 2.1
SOCKEYE_TOKENS = 1.3
MAX_LENGTH = LONGEST_PIECES + 2
"""No sentence of the corpus is so long; Sockeye needs batches of eight such."""


def start_marian(task: Task, python: Path) -> list[str]:
    vocabulary = task.folder / "vocabulary.yml"
    pieces = {piece: number for number, piece in enumerate(["</s>", "<unk>", *task.corpus.pieces])}
    vocabulary.write_text(json.dumps(pieces, ensure_ascii=False, indent=0)[1:-1].replace(",\n", "\n"), encoding="utf-8")
    sizes = task.sizes
    options = {
        "model": task.folder / "model.npz", "tempdir": task.folder, "type": "transformer", "seed": SEED,
        "dim-emb": sizes["d_model"], "transformer-dim-ffn": sizes["d_ff"], "transformer-heads": sizes["num_heads"],
        "enc-depth": task.layers, "dec-depth": task.layers, "transformer-ffn-activation": "relu",
        "transformer-dropout": DROPOUT, "label-smoothing": LABEL_SMOOTHING, "cost-type": "ce-mean-words",
        "learn-rate": PEAK_LEARNING_RATE, "lr-warmup": WARMUP_STEPS, "lr-decay-inv-sqrt": WARMUP_STEPS, "clip-norm": 0,
        "mini-batch": 1000, "mini-batch-words": int(task.tokens * MARIAN_TOKENS), "mini-batch-round-up": "false",
        "maxi-batch": 100, "max-length": MAX_LENGTH, "cpu-threads": task.threads, "workspace": 2000,
        "after-batches": NEVER, "disp-freq": task.steps_per_mark, "save-freq": NEVER,
    }  # fmt: skip
    lists = {
        "train-sets": [task.corpus.cut("train", side) for side in SIDES],
        "vocabs": [vocabulary, vocabulary],
        "dim-vocabs": [len(pieces), len(pieces)],
        "optimizer-params": [*BETAS, EPSILON],
    }
    flags = ["tied-embeddings-all", "output-omit-bias", "sync-sgd"]
    return [str(python.with_name("pymarian")), "train", *_command_line(options, lists, flags)]


MARIAN_LINE = re.compile(r"Up\. (\d+) .* Cost ([\d.]+) : Time ([\d.]+)s : ([\d.]+) words/s")


def marian_mark(line: str, task: Task) -> Mark | None:
    """Ep. 1 : Up. 5 : Sen. 432 : Cost 9.3445 : Time 24.37s : 451.39 words/s : gNorm 3.6261. Words are target labels."""
    found = MARIAN_LINE.search(line)
    return found and Mark(int(found[1]), float(found[3]) * float(found[4]), float(found[2]))


def start_eole(task: Task, python: Path) -> list[str]:
    sizes = task.sizes
    config = {
        **_opennmt_files(task), **_opennmt_common(task),
        "training": {
            **_opennmt_training(task, "model_path"), "compute_dtype": "fp32", "use_amp": False,
            "log_attention_entropy": False, "param_init": 0, "param_init_method": "xavier_uniform",
        },
        "model": {
            "architecture": "transformer", "layers": task.layers, "hidden_size": sizes["d_model"],
            "heads": sizes["num_heads"], "transformer_ff": sizes["d_ff"], "share_embeddings": True,
            "share_decoder_embeddings": True, "add_qkvbias": True, "add_ffnbias": True,
            "embeddings": {
                "word_vec_size": sizes["d_model"], "position_encoding": True,
                "position_encoding_type": "SinusoidalInterleaved",
            },
        },
    }  # fmt: skip
    return [str(python.with_name("eole")), "train", "-config", _yaml(task, config)]


def start_opennmt(task: Task, python: Path) -> list[str]:
    sizes = task.sizes
    config = {
        **_opennmt_files(task), **_opennmt_common(task), **_opennmt_training(task, "save_model"), "model_dtype": "fp32",
        "param_init": 0, "param_init_glorot": True,
        "encoder_type": "transformer", "decoder_type": "transformer", "enc_layers": task.layers, "dec_layers": task.layers,
        "hidden_size": sizes["d_model"], "word_vec_size": sizes["d_model"], "transformer_ff": sizes["d_ff"],
        "heads": sizes["num_heads"], "position_encoding": True, "share_embeddings": True,
        "share_decoder_embeddings": True, "add_qkvbias": True,
    }  # fmt: skip
    return [str(python.with_name("onmt_train")), "-config", _yaml(task, config)]


def _opennmt_files(task: Task) -> dict[str, str]:
    vocabulary = task.folder / "vocabulary.txt"
    vocabulary.write_text("".join(f"{piece}\t1\n" for piece in task.corpus.pieces), encoding="utf-8")
    return {"src_vocab": str(vocabulary), "tgt_vocab": str(vocabulary)}


def _opennmt_common(task: Task) -> dict[str, Any]:
    paths = {
        name: str(task.corpus.cut("train", side)) for name, side in zip(("path_src", "path_tgt"), SIDES, strict=True)
    }
    return {
        "data": {"corpus": {**paths, "transforms": [], "weight": 1}}, "share_vocab": True, "seed": SEED,
        "save_data": str(task.folder / "data"), "overwrite": True, "report_every": task.steps_per_mark,
    }  # fmt: skip


def _opennmt_training(task: Task, model: str) -> dict[str, Any]:
    """`model`: what the toolkit calls the file of the model."""
    return {
        model: str(task.folder / "model"), "world_size": 1, "gpu_ranks": [], "num_workers": 0, "bucket_size": 20_000,
        "batch_type": "tokens", "batch_size": int(task.tokens * OPENNMT_TOKENS), "normalization": "tokens",
        "accum_count": [1], "accum_steps": [0], "train_steps": NEVER, "valid_steps": NEVER,
        "save_checkpoint_steps": NEVER, "optim": "adam", "adam_beta1": BETAS[0], "adam_beta2": BETAS[1],
        "decay_method": "noam", "warmup_steps": WARMUP_STEPS,
        "learning_rate": PEAK_LEARNING_RATE * math.sqrt(task.sizes["d_model"] * WARMUP_STEPS), "max_grad_norm": 0,
        "label_smoothing": LABEL_SMOOTHING, "dropout": [DROPOUT], "attention_dropout": [0.0],
        "dropout_steps": [0],
    }  # fmt: skip


OPENNMT_LINE = re.compile(r"Step +(\d+)/.* ppl: +([\d.]+);.* bsz: +\d+/ *(\d+)/")


def opennmt_mark(line: str, task: Task) -> Mark | None:
    """Step 5/ 200; acc: 0.1; ppl: 8520.1; xent: 9.05; lr: 0.00001; sents: 300; bsz: 1755/1803/60; ... of Eole too.

    The logarithm of the perplexity is the loss with more digits."""
    found = OPENNMT_LINE.search(line)
    return found and Mark(int(found[1]), int(found[3]) * task.steps_per_mark, math.log(float(found[2])))


def start_joey(task: Task, python: Path) -> list[str]:
    sizes = task.sizes
    vocabulary = task.folder / "vocabulary.txt"
    vocabulary.write_text("".join(f"{piece}\n" for piece in task.corpus.pieces), encoding="utf-8")
    side = {
        "max_length": MAX_LENGTH,
        "level": "word",
        "voc_file": str(vocabulary),
        "voc_limit": 100_000,
        "lowercase": False,
    }
    stack = {
        "type": "transformer", "num_layers": task.layers, "num_heads": sizes["num_heads"],
        "embeddings": {"embedding_dim": sizes["d_model"], "scale": True, "dropout": DROPOUT},
        "hidden_size": sizes["d_model"], "ff_size": sizes["d_ff"], "dropout": DROPOUT, "layer_norm": "post",
    }  # fmt: skip
    data = {split: str(task.corpus.folder / f"{name}.pieces") for split, name in (("train", "train"), ("dev", "valid"))}
    config = {
        "name": "race", "joeynmt_version": "2.3.0", "model_dir": str(task.folder / "model"), "use_cuda": False,
        "fp16": False, "random_seed": SEED,
        "data": {
            **data, "dataset_type": "plain", "src": {"lang": "source", **side}, "trg": {"lang": "target", **side},
        },
        "testing": {"beam_size": 1, "eval_metrics": [], "max_output_length": 1},
        "training": {
            "optimizer": "adam", "adam_betas": list(BETAS), "normalization": "tokens", "loss": "crossentropy",
            "scheduling": "warmupinversesquareroot", "learning_rate": PEAK_LEARNING_RATE,
            "learning_rate_warmup": WARMUP_STEPS, "learning_rate_min": 1e-10, "label_smoothing": LABEL_SMOOTHING,
            "batch_type": "token", "batch_size": int(task.tokens * JOEY_TOKENS), "batch_multiplier": 1, "epochs": 1000,
            "updates": NEVER, "validation_freq": NEVER, "logging_freq": task.steps_per_mark,
            "overwrite": True, "shuffle": True, "early_stopping_metric": "ppl",
        },
        "model": {
            "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform", "tied_embeddings": True,
            "tied_softmax": True, "encoder": stack, "decoder": stack,
        },
    }  # fmt: skip
    path = _yaml(task, config)
    return [str(python), "-P", str(PRINT_MARKS), "joeynmt", str(task.steps_per_mark), "train", path, "--skip-test"]


def start_sockeye(task: Task, python: Path) -> list[str]:
    vocabulary = task.folder / "vocabulary.json"
    numbers = {piece: n for n, piece in enumerate(["<pad>", "<unk>", "<s>", "</s>", *task.corpus.pieces])}
    vocabulary.write_text(json.dumps(numbers, ensure_ascii=False), encoding="utf-8")
    both = "{0}:{0}".format
    sizes, corpus = task.sizes, task.corpus
    options = {
        "source": corpus.cut("train", "source"), "target": corpus.cut("train", "target"),
        "validation-source": corpus.cut("valid", "source"), "validation-target": corpus.cut("valid", "target"),
        "source-vocab": vocabulary, "target-vocab": vocabulary, "output": task.folder / "model", "dtype": "float32",
        "num-layers": both(task.layers), "transformer-model-size": both(sizes["d_model"]),
        "transformer-attention-heads": both(sizes["num_heads"]),
        "transformer-feed-forward-num-hidden": both(sizes["d_ff"]), "transformer-dropout-attention": 0.0,
        "transformer-dropout-act": 0.0, "transformer-preprocess": ":", "transformer-postprocess": "drn:drn",
        "transformer-dropout-prepost": DROPOUT, "label-smoothing": LABEL_SMOOTHING,
        "weight-tying-type": "src_trg_softmax", "batch-type": "max-word", "batch-size": int(task.tokens * SOCKEYE_TOKENS),
        "max-seq-len": both(MAX_LENGTH), "optimizer": "adam", "optimizer-betas": "{}:{}".format(*BETAS),
        "optimizer-eps": EPSILON, "learning-rate-scheduler-type": "inv-sqrt-decay",
        "learning-rate-warmup": WARMUP_STEPS, "initial-learning-rate": PEAK_LEARNING_RATE * math.sqrt(WARMUP_STEPS),
        "max-updates": NEVER, "checkpoint-interval": NEVER, "decode-and-evaluate": 0, "seed": SEED,
    }  # fmt: skip
    flags = ["overwrite-output", "use-cpu", "shared-vocab"]
    start = [str(python), "-P", str(PRINT_MARKS), "sockeye", str(task.steps_per_mark)]
    return [*start, *_command_line(options, {}, flags)]


def _command_line(options: dict[str, Any], lists: dict[str, list[Any]], flags: list[str]) -> list[str]:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += [word for name, values in lists.items() for word in (f"--{name}", *map(str, values))]
    return words + [f"--{flag}" for flag in flags]


def _yaml(task: Task, config: dict[str, Any]) -> str:
    path = task.folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return str(path)


OPENNMT_DIFFERS = "pre-norm; more dropout (inner feed-forward)"

TOOLKITS = (
    Peer("Marian", (("pymarian==1.12.42",),), (), start_marian, marian_mark, ""),
    Peer("Eole", (TORCH, ("eole==0.6.4", "aiohttp", "torch==2.13.0")), (), start_eole, opennmt_mark, OPENNMT_DIFFERS),
    Peer(
        "OpenNMT-py",
        (
            TORCH,
            ("--no-deps", "OpenNMT-py==3.5.1"),
            (
                "configargparse", "pyonmttok", "spacy", "pyahocorasick", "rapidfuzz", "fasttext-wheel", "ctranslate2",
                "tensorboard",
            ),
        ),
        (), start_opennmt, opennmt_mark, OPENNMT_DIFFERS,
    ),
    Peer(
        "Sockeye", (TORCH, ("--no-deps", "sockeye==3.1.34"), ("portalocker",)), (), start_sockeye, printed_mark,
        "",
    ),
    Peer(
        "JoeyNMT", (TORCH, ("joeynmt==2.3.0", "importlib_metadata", "torch==2.13.0")), (), start_joey, printed_mark,
        "more dropout (attention, inner feed-forward); no sorting by length",
    ),
)  # fmt: skip
