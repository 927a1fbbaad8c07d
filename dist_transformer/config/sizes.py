"""How large a model is, from its configuration alone: plain arithmetic, so that no command needs torch to tell."""

from dist_transformer.config.models import ModelConfig


def parameter_count(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> int:
    """Trainable parameters of the network, each tied matrix counted once."""
    d_model, d_ff = config.d_model, config.d_ff
    norm = 2 * d_model
    attention = 4 * (d_model * d_model + d_model) + norm
    feed_forward = 2 * d_model * d_ff + d_ff + d_model + norm
    encoder = config.num_encoder_layers * (attention + feed_forward)
    decoder = config.num_decoder_layers * (2 * attention + feed_forward)
    final_norms = 2 * norm if config.norm == "pre" else 0
    return (
        encoder + decoder + final_norms + _num_vocabulary_rows(config, source_vocabulary, target_vocabulary) * d_model
    )


def _num_vocabulary_rows(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> int:
    embeddings = source_vocabulary if config.shared_embeddings else source_vocabulary + target_vocabulary
    return embeddings if config.tied_output else embeddings + target_vocabulary
