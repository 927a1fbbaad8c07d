"""configs/: the models of the paper's Table 2 say what its sections 5.1 to 5.4 and 6.1 say, and so does the network built."""

from pathlib import Path

import pytest
import torch

from dist_transformer.config.loading import load_config
from dist_transformer.config.model_size import count_by_part, head_sizes
from dist_transformer.config.schema import Config
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.schedule import learning_rate

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
REAL_SHARE = 0.93
"""Of a micro-batch: the rest is padding (docs/architecture.md)."""
# language; N, d_model, d_ff, h, d_k, d_v; dropout; steps; pieces; checkpoints averaged; seconds a step on eight P100 (5.2)
MODELS = {
    "wmt14_en_de_base": ("de", (6, 512, 2048, 8, 64, 64), 0.1, 100_000, 37_000, 5, 0.4),
    "wmt14_en_de_big": ("de", (6, 1024, 4096, 16, 64, 64), 0.3, 300_000, 37_000, 20, 1.0),
    "wmt14_en_fr_base": ("fr", (6, 512, 2048, 8, 64, 64), 0.1, 100_000, 32_000, 5, 0.4),
    "wmt14_en_fr_big": ("fr", (6, 1024, 4096, 16, 64, 64), 0.1, 300_000, 32_000, 20, 1.0),
}


def config_of(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", check_files=False)


def tokens_of_a_side(config: Config) -> float:
    """Real tokens of a step on one side; source and target sides are about as long."""
    return config.data.lanes * config.data.token_budget() * REAL_SHARE / 2


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_table_2_is_trained_as_the_paper_says(name):
    language, sizes, dropout, steps, pieces, averaged, seconds = MODELS[name]
    config = config_of(name)
    model = config.model
    assert model.num_encoder_layers == model.num_decoder_layers
    assert (model.num_encoder_layers, model.d_model, model.d_ff, model.num_heads, *head_sizes(model)) == sizes
    assert (model.norm, model.norm_type, model.activation, model.positions) == ("post", "layer", "relu", "sinusoidal")
    assert model.shared_embeddings
    assert model.tied_output
    assert (model.dropout, config.training.label_smoothing) == (dropout, 0.1)
    assert config.training.max_steps == steps
    assert (config.tokenizer.vocabulary_size, config.tokenizer.shared) == (pieces, True)
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (config.optimizer.weight_decay, config.training.gradient_clip_norm) == (0, 0)
    assert tokens_of_a_side(config) == pytest.approx(25_000, rel=0.01)
    assert (config.checkpoints.average_last, config.checkpoints.final_model) == (averaged, "average_last")
    assert config.checkpoints.keep_last >= averaged
    assert config.checkpoints.every_steps * seconds == 10 * 60
    decoding = config.decoding
    assert (decoding.beam_size, decoding.length_penalty, decoding.max_extra_tokens) == (4, 0.6, 50)
    for corpus in (config.data.train, config.data.validation, config.data.test):
        assert corpus is not None
        assert (corpus.hub, corpus.subset) == ("wmt/wmt14", f"{language}-en")
    assert (config.data.source_language, config.data.target_language) == ("en", language)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [1, 100, 4_000, 4_001, 100_000])
def test_its_learning_rate_is_equation_3(name, step):
    config = config_of(name)
    expected = config.model.d_model**-0.5 * min(step**-0.5, step * 4_000**-1.5)
    assert learning_rate(config, step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_network_has_as_many_parameters_as_the_formula_says(name):
    config = config_of(name)
    pieces = config.tokenizer.vocabulary_size
    with torch.device("meta"):
        network = Transformer(config.model, pieces, pieces, 0)
    counted = count_by_part(config.model, pieces, pieces).total
    assert sum(parameter.numel() for parameter in network.parameters()) == counted


def test_large_batches_are_those_of_ott_et_al():
    """16 times the tokens of a step, the learning rate that fairseq's scaling_nmt example gives for them, and for the rest
    the paper's big model: 402,000 target tokens of theirs are within 1 %."""
    config, big = config_of("wmt14_en_de_big_scaling"), config_of("wmt14_en_de_big")
    assert config.model == big.model
    assert config.data.lanes == 16 * big.data.lanes
    assert tokens_of_a_side(config) == pytest.approx(402_000, rel=0.01)
    assert max(learning_rate(config, step) for step in (3_999, 4_000, 4_001)) == learning_rate(config, 4_000) == 0.001
    assert learning_rate(config, 16_000) == pytest.approx(0.0005)


def test_transformer_tiny_is_the_published_setting_for_multi30k():
    config = config_of("multi30k_tiny")
    model = config.model
    sizes = (model.num_encoder_layers, model.num_decoder_layers, model.d_model, model.d_ff, model.num_heads)
    assert sizes == (4, 4, 128, 256, 4)
    assert (model.dropout, config.training.label_smoothing) == (0.3, 0.1)
    assert (config.optimizer.learning_rate, config.schedule.warmup_steps, config.training.max_steps) == (
        0.005,
        2000,
        8000,
    )
    assert (config.tokenizer.vocabulary_size, config.tokenizer.shared) == (10_000, True)
    assert (config.checkpoints.average_last, config.decoding.beam_size) == (10, 5)
    assert tokens_of_a_side(config) / REAL_SHARE == 4096
