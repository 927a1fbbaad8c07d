"""Every setting by name. A new one must earn its place: most users never need it, and all of them read past it."""

import typing
from collections.abc import Iterator

from pydantic import BaseModel

from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.config.schema import Config

SETTINGS = """
checkpoints.average_last checkpoints.every_steps checkpoints.final_model checkpoints.keep_best
checkpoints.keep_every_steps checkpoints.keep_last data.audit data.filters.bad_encoding
data.filters.drop_identical data.filters.max_length_ratio data.filters.max_tokens data.filters.plugin data.filters.rules
data.filters.scores data.lanes
data.loader_workers data.max_quarantined_row_groups data.max_tokens data.mixture.corpora
data.mixture.schedule.after_epochs
data.mixture.schedule.from_step data.mixture.schedule.weights data.mixture.temperature data.mixture.weights
data.modifiers data.more_validation data.normalization data.on_bad_row_group data.on_the_fly data.prepared data.reslice_from
data.root data.row_group_rows data.source_language data.target_language data.test data.train.columns
data.train.demo data.train.filters data.train.hub data.train.languages
data.train.path data.train.plugin data.train.revision data.train.source data.train.split
data.train.subset data.train.tags data.train.target data.validation data.window_rows decoding.beam_size
decoding.length_penalty decoding.max_extra_tokens decoding.max_source_tokens decoding.max_tokens
divergence.policy model.activation model.attention_gain
model.d_ff model.d_model model.dropout model.final_norm model.key_size model.layer_drop model.max_positions
model.norm model.norm_type model.num_decoder_layers model.num_encoder_layers model.num_heads model.output_bias
model.plugin model.positions model.preset model.shared_embeddings model.tied_output model.value_size optimizer.beta1
optimizer.beta2 optimizer.epsilon optimizer.learning_rate optimizer.matrices optimizer.weight_decay run.name
run.root run.seed schedule.name schedule.warmup_steps slurm.cluster slurm.container_image
slurm.container_mounts slurm.container_runtime slurm.cpus_per_rank slurm.environment slurm.gpu_memory_gb
slurm.gpus_per_node slurm.max_restarts_without_progress slurm.nodes slurm.preflight slurm.ranks_per_node
slurm.sbatch slurm.setup slurm.signal_seconds slurm.spare_nodes slurm.srun slurm.time_limit
tokenizer.character_coverage tokenizer.normalization tokenizer.sampling tokenizer.shared
tokenizer.source_model tokenizer.target_model
tokenizer.type tokenizer.vocabulary_size tracking.alias tracking.enabled tracking.experiment
tracking.register_as tracking.uri training.activation_checkpointing
training.audit_share training.communication_dtype training.ema_decay training.freeze
training.gradient_clip_norm training.guided_alignment training.hang_seconds training.init_from
training.init_partially
training.label_smoothing training.lanes_per_pass training.log_every_steps training.max_epochs
training.max_hours training.max_steps training.offload training.precision
training.same_bits training.zero_stage validation.beam_size validation.every_steps
validation.max_sentences validation.metric validation.patience validation.plugin validation.target validation.translate
"""
"""All keys; the ones of a corpus, which every corpus has, stand below data.train only."""


def sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names, also in `| None`, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from sections_in(part)


def keys_of(section: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{above}{name}"
        inner = [each for each in sections_in(field.annotation) if each is not CorpusConfig or key == "data.train"]
        if not inner:
            yield key
        for each in inner:
            yield from keys_of(each, f"{key}.")


def test_the_list_of_settings_is_the_one_that_was_agreed_on():
    found, agreed = sorted(keys_of(Config)), SETTINGS.split()
    new, gone = {*found} - {*agreed}, {*agreed} - {*found}
    assert not new, (
        f"new: {sorted(new)}. A setting must earn its place: say why no value fits everyone, else make it a constant of the "
        "module that uses it, or an option of the command; then add it to this list. "
        "What exists must stay usable at its default: of model, recipe_of_checkpoint of run/resume_checks.py; of data.filters, a "
        "corpus or tokenizer, leave it out of data/recipe.py; any that a pipeline counts, "
        "_as_counted_before of pipeline/state.py"
    )
    assert not gone, (
        f"gone: {sorted(gone)}. Files that have them must still be read: config/former_keys.py; then remove them"
    )
    assert found == agreed
    assert len(found) < 150
