"""Names of a model's parameters, computed without torch, and the patterns of the configuration that match them:
`encoder_layers.0.feed_forward.inner.weight`. A test compares them with the model's own.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from dist_transformer.config.model_size import feed_forward_matrices, has_final_norm, norm_tensors
from dist_transformer.config.schema import ModelConfig, TrainingConfig

NUM_NAMES_SHOWN = 5
_EMBEDDINGS = ["source_embedding.weight", "target_embedding.weight"]


def all_parameter_names(config: ModelConfig) -> list[str]:
    """Returns all names of all parameters, sorted; a shared parameter has two."""
    feed_forward = ["inner", "outer", "gate"][: feed_forward_matrices(config)]
    self_attention, cross_attention = ["query_key_value", "output"], ["query", "key_value", "output"]
    norm = norm_tensors(config)
    encoder = {"self_attention": self_attention, "feed_forward": feed_forward}
    names = [*_EMBEDDINGS, *(["output_bias"] if config.output_bias else [])]
    names += [] if config.tied_output else ["output.weight"]
    if config.positions == "learned":
        names += ["source_positions.table.weight", "target_positions.table.weight"]
    if has_final_norm(config):
        names += [f"{side}_norm.{name}" for side in ("encoder", "decoder") for name in norm]
    for stack, num_layers, parts in (
        ("encoder_layers", config.num_encoder_layers, encoder),
        ("decoder_layers", config.num_decoder_layers, {**encoder, "cross_attention": cross_attention}),
    ):
        for layer, part in ((layer, part) for layer in range(num_layers) for part in parts):
            names += [f"{stack}.{layer}.{part}.{product}.{n}" for product in parts[part] for n in ("weight", "bias")]
            names += [f"{stack}.{layer}.{part}_residual.norm.{n}" for n in norm]
    return sorted(names)


def check_patterns(training: TrainingConfig, model: ModelConfig) -> Iterator[str]:
    """Yields a problem for each pattern of `training.freeze` that matches no parameter, and if it freezes all."""
    if not training.freeze or model.plugin is not None:  # whose names the engine knows
        return
    names = all_parameter_names(model)
    yield from unknown_patterns(training.freeze, names)
    free = [name for name in names if not is_named(name, training.freeze)]
    if model.shared_embeddings and not {*_EMBEDDINGS} <= {*free}:
        free = [name for name in free if name not in _EMBEDDINGS]
    if not free:
        yield all_frozen(training.freeze, names)


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """True if any of the shell patterns matches this parameter."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unknown_patterns(patterns: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yields a message for each pattern that matches none of these parameters."""
    for pattern in patterns:
        if not any(is_named(name, [pattern]) for name in names):
            yield (
                f"training.freeze: {pattern!r} names no parameter. Parameters are {_some(names, pattern)}; patterns are those "
                "of the shell: '*embedding*'"
            )


def all_frozen(patterns: Sequence[str], names: Sequence[str]) -> str:
    """Returns the message for patterns that freeze all parameters."""
    return (
        f"training.freeze: {', '.join(patterns)} freeze all {len(names)} parameters, so that there is nothing to train. "
        f"Parameters are {_some(names)}: leave some of them free"
    )


def _some(names: Sequence[str], pattern: str = "") -> str:
    """Lists the names nearest to the pattern, then some from all over the model."""
    near = get_close_matches(pattern.replace("*", ""), names, NUM_NAMES_SHOWN, cutoff=0.3)
    others = [name for name in names[:: max(1, len(names) // NUM_NAMES_SHOWN)] if name not in near]
    shown = [*near, *others][:NUM_NAMES_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
