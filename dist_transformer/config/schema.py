"""All settings of a run with type, unit and default. Defaults are defined here, in data_schema.py and in
slurm_schema.py, nowhere else.

Each part of the program receives only its own section, frozen. The defaults of `model`, `optimizer`, `schedule` and
`training` are those of Vaswani et al. (2017), "Attention Is All You Need"; descriptions name departures from the paper.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dist_transformer.config.data_schema import DataConfig, TokenizerConfig
from dist_transformer.config.section import Bool, Fraction, Int, Number, PathStr, PositiveInt, Section, Str, ZeroStage
from dist_transformer.config.slurm_schema import SlurmConfig


class RunConfig(Section):
    """Name, folder and seed of the run."""

    name: Str = Field("run", min_length=1, description="Name of the run folder, the job and the MLflow run.")
    root: PathStr = Field("runs", description="Folder of run folders; the run folder is <root>/<name>.")
    seed: Int = Field(1, ge=0, description="Seed of initialisation, data order and dropout.")


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(d_model=128, d_ff=256, num_heads=4, num_encoder_layers=4, num_decoder_layers=4, dropout=0.3),
    "small": dict(d_model=256, d_ff=1024, num_heads=4, num_encoder_layers=3, num_decoder_layers=3, dropout=0.1),
    "base": dict(d_model=512, d_ff=2048, num_heads=8, num_encoder_layers=6, num_decoder_layers=6, dropout=0.1),
    "big": dict(d_model=1024, d_ff=4096, num_heads=16, num_encoder_layers=6, num_decoder_layers=6, dropout=0.3),
}
"""`base` and `big` are Table 3 of the paper; `tiny` is the published small setting for Multi30k (Wu et al., 2021)."""
ENDLESS = ("inverse_sqrt", "constant")
"""Schedules that need no last step."""


class ModelConfig(Section):
    """The encoder-decoder of the paper (section 3). `preset` fills the sizes that are not given."""

    preset: Literal["tiny", "small", "base", "big"] = Field("base", description="Fills every size that is not given.")
    plugin: Str | None = Field(
        None, description="A network of your own, which gets this section: FILE.py:NAME, MODULE:NAME or an entry point."
    )
    d_model: PositiveInt = Field(512, description="Width of embeddings and layers.")
    d_ff: PositiveInt = Field(2048, description="Inner width of the feed-forward networks.")
    num_heads: PositiveInt = Field(
        8, description="Attention heads; must divide d_model, or key_size and value_size are given."
    )
    key_size: PositiveInt | None = Field(
        None, description="Size of a head's queries and keys; none: d_model / num_heads (3.2.2)."
    )
    value_size: PositiveInt | None = Field(
        None, description="Size of a head's values; none: d_model / num_heads (3.2.2)."
    )
    num_encoder_layers: PositiveInt = Field(6, le=1000, description="Layers of the encoder.")
    num_decoder_layers: PositiveInt = Field(6, le=1000, description="Layers of the decoder.")
    dropout: Fraction = Field(0.1, description="5.4: on outputs of sub-layers and on sums of embeddings and positions.")
    norm: Literal["post", "pre", "deepnorm"] = Field(
        "post",
        description="Norm after the residual sum (3.1); before the sub-layer (Xiong et al., 2020); or after a sum whose "
        "residual is weighted, for deep stacks (DeepNorm: Wang et al., 2022).",
    )
    norm_type: Literal["layer", "rms"] = Field(
        "layer", description="Layer norm (the paper's), or root mean square norm (Zhang and Sennrich, 2019)."
    )
    final_norm: Bool | None = Field(
        None, description="A norm after the last layer of the encoder and of the decoder; none: with norm pre only."
    )
    attention_gain: Number = Field(
        1.0, gt=0.0, description="Gain of the Xavier bounds that queries, keys and values begin in; fairseq's: 0.7071."
    )
    activation: Literal["relu", "gelu", "silu", "swiglu"] = Field(
        "relu",
        description="Of the feed-forward networks: equation 2's; GELU (Hendrycks and Gimpel, 2016); SiLU, also called swish "
        "(Marian's); SwiGLU (Shazeer, 2020), whose third matrix asks for two thirds of the usual d_ff.",
    )
    positions: Literal["sinusoidal", "learned", "rotary", "marian"] = Field(
        "sinusoidal",
        description="3.5: sinusoids, of any length; a learned vector for each (Table 3, row E); queries and keys of "
        "self-attention turned by their positions (Su et al., 2021); or all as in Marian, for its .npz files: its sinusoids, "
        "a zero vector in place of the embedded start symbol, and 1e-6 as the layer norms' epsilon.",
    )
    max_positions: PositiveInt | None = Field(
        None, description="Longest sentence in tokens that learned positions can take; the others have no limit."
    )
    layer_drop: Fraction = Field(
        0.0, description="Share of layers that a sentence skips in training (LayerDrop: Fan et al., 2020); 0: none."
    )
    shared_embeddings: Bool = Field(
        True, description="One matrix for both embeddings and the output projection (3.4); needs tokenizer.shared."
    )
    tied_output: Bool = Field(True, description="The output projection is the target embedding (3.4).")
    output_bias: Bool = Field(False, description="A trained bias for each piece of the output (Marian's).")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", "base")
        return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **given}


class OptimizerConfig(Section):
    """The optimizer: Adam (5.3); for the layers' matrices, Muon on request."""

    matrices: Literal["adam", "muon"] = Field(
        "adam", description="What updates the layers' matrices: the paper's Adam, or Muon, which needs fewer steps."
    )

    learning_rate: Number | None = Field(
        None, gt=0.0, description="Peak learning rate; none: the paper's, (d_model * warmup_steps) ** -0.5."
    )
    beta1: Fraction = Field(0.9, description="5.3: 0.9.")
    beta2: Fraction = Field(0.98, description="5.3: 0.98.")
    epsilon: Number = Field(1e-9, gt=0.0, description="5.3: 1e-9.")
    weight_decay: Number = Field(0.0, ge=0.0, description="Decoupled weight decay (not the paper's); matrices only.")


class ScheduleConfig(Section):
    """Learning rate by step."""

    name: Literal["inverse_sqrt", "cosine", "linear", "constant"] = Field(
        "inverse_sqrt", description="5.3 is inverse_sqrt with no learning rate given (`noam` elsewhere)."
    )
    warmup_steps: PositiveInt = Field(4000, description="Steps of linear growth to the peak.")


class TrainingConfig(Section):
    """Length of the training, precision, sharding and the training step."""

    max_steps: PositiveInt | None = Field(
        100_000, description="Last step; none, also with max_epochs alone: another end."
    )
    max_epochs: PositiveInt | None = Field(None, description="Epochs after which the run ends; none: no such limit.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="fp16: half weights, fp32 masters. bf16: layers in bf16, fp32 masters; autocast in stages 0 and 3, with "
        "offload and with freeze. auto: fp16 on GPUs, fp32 on CPUs.",
    )
    zero_stage: ZeroStage = Field(
        1, description="DeepSpeed ZeRO stage: what is sharded over the ranks. One rank alone: 1 and 2 are 0 in fp32."
    )
    communication_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Gradients are sent to other ranks in this type; auto: fp16 in fp16, else fp32."
    )
    lanes_per_pass: PositiveInt = Field(
        1,
        description="Lanes of a rank that one forward and backward pass computes together: faster where a lane does not fill "
        "a GPU. The same global batches and loss, but other dropout masks.",
    )
    same_bits: Bool = Field(
        False,
        description="Sum the gradients of lanes in fixed point: the same bits of every weight on any number of ranks in stages "
        "0 to 2, on one kind of CPU with one number of threads a rank. Needs precision fp32.",
    )
    label_smoothing: Fraction = Field(0.1, description="5.4: 0.1.")
    guided_alignment: Number = Field(
        0.0,
        ge=0.0,
        description="Weight of a second loss: cross-attention of the last layer but one learns the alignment of tokens that is "
        "found in the training text; 0: none.",
    )
    gradient_clip_norm: Number = Field(0.0, ge=0.0, description="Clip the global gradient norm; 0: never (the paper).")
    log_every_steps: PositiveInt = Field(50, description="A line in the log, metrics.jsonl and MLflow.")
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = Field(
        "none",
        description="What ZeRO keeps in the CPU's memory: Adam's state and the fp32 masters (stages 1 to 3), the "
        "weights too (stage 3).",
    )
    activation_checkpointing: Bool = Field(
        False, description="Compute each layer again in the backward pass instead of keeping its activations."
    )
    ema_decay: Fraction | None = Field(
        None,
        gt=0.0,
        description="Keep an exponential moving average of the weights (not the paper's): 0.9999; none: do not. It becomes "
        "the model by checkpoints.final_model: ema; validations take the weights themselves.",
    )
    freeze: tuple[Str, ...] = Field(
        (), description="Shell patterns of parameters that are not trained: 'encoder_layers.*', '*embedding*'."
    )
    init_from: PathStr | None = Field(
        None, description="Start with the weights of a run folder, a checkpoint or a model folder (once, at step 0)."
    )
    init_partially: Bool = Field(
        False, description="Take what fits of init_from, and say name by name what did not; false: all must fit."
    )
    audit_share: Number = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Share of micro-batches that another rank computes a second time, to compare the gradients, in stages 0 to "
        "2; memory at rest is checked too; 0: neither.",
    )
    max_hours: Number | None = Field(
        None,
        gt=0.0,
        description="Save and stop (exit code 75) this long after the start of the process; a submitted job then requeues "
        "itself and trains on.",
    )
    hang_seconds: PositiveInt = Field(600, description="No progress for so long ends the rank with stacks in the log.")

    @model_validator(mode="after")
    def _end_by_epochs_alone(self) -> Self:
        if self.max_epochs is not None and "max_steps" not in self.model_fields_set:
            self.__dict__["max_steps"] = None  # the section is frozen
        return self


class DivergenceConfig(Section):
    """Reaction to divergence of training: the loss stays far above its moving average, gradients stay non-finite, or
    fp16's loss scale is at its floor. The run always resumes from the newest checkpoint before the divergence.
    """

    policy: Literal["stop", "lower_learning_rate", "switch_to_bf16"] = Field(
        "stop", description="After the return to the last good checkpoint: end with exit code 2, or continue by itself."
    )


class ValidationConfig(Section):
    """Loss and scores on the validation corpora during training, and early stopping by them.

    The measures of data.validation are loss, nll, perplexity, token_accuracy, and with `translate` bleu, chrf, plugin;
    those of data.more_validation have the corpus in front: newstest2013/bleu.
    """

    every_steps: PositiveInt = Field(1000, description="Measured at every such step and at the end.")
    translate: Bool = Field(True, description="Translate the corpora too: BLEU and chrF of real output, and samples.")
    beam_size: PositiveInt = Field(
        1, description="Beam of these translations; 1: greedy. The rest of the search is as in `decoding`."
    )
    max_sentences: PositiveInt | None = Field(
        None, description="Translate only so many sentences of each corpus, the first ones; none: all."
    )
    plugin: Str | None = Field(
        None,
        description="A measure of your own, `plugin`, of the translations: FILE.py:NAME, MODULE:NAME or an entry point.",
    )
    metric: Str = Field(
        "loss", description="The measure that tells the best checkpoint, and that `patience` and `target` are about."
    )
    patience: PositiveInt | None = Field(
        None, description="The run ends after so many validations in a row without a better `metric`; none: never."
    )
    target: Number | None = Field(None, description="The run ends when `metric` has reached this; none: never.")


class CheckpointConfig(Section):
    """Checkpoints to resume from, and the model at the end."""

    every_steps: PositiveInt = Field(1000, description="A checkpoint at every such step, at a stop and at the end.")
    keep_last: PositiveInt = Field(5, description="Newest checkpoints kept.")
    keep_best: Int = Field(0, ge=0, description="Checkpoints that are best by validation.metric kept besides.")
    keep_every_steps: PositiveInt | None = Field(
        None, description="The checkpoint of every such step is never deleted; none: keep_last and keep_best decide."
    )
    average_last: PositiveInt = Field(
        5, description="Checkpoints averaged into the final model folder (6.1: 5 for base, 20 for big)."
    )
    final_model: Literal["average_last", "average_best", "ema"] = Field(
        "average_last",
        description="What the final model folder is: the average of the last checkpoints (6.1), of the keep_best ones, or "
        "the moving average of training.ema_decay.",
    )


class BeamConfig(Section):
    """Search of `translate`, `evaluate` and validation: the beam of 6.1."""

    beam_size: PositiveInt = Field(4, description="6.1: 4. 1: greedy.")
    length_penalty: Number = Field(0.6, ge=0.0, le=10.0, description="alpha of Wu et al. (2016); 6.1: 0.6.")
    max_extra_tokens: Int = Field(50, ge=0, description="Longest output: input length + this (6.1: 50).")
    max_tokens: PositiveInt = Field(8192, description="Source tokens times beam in one batch of the search.")
    max_source_tokens: Int = Field(2048, ge=2, description="Longest line, in source tokens, translated at once.")


class DecodingConfig(BeamConfig):
    """All settings of a search: those of a run, and those that a command or the loader of a served model adds."""

    no_repeat_ngram_size: Int = Field(
        0, ge=0, description="No n-gram of so many tokens occurs twice in a translation; 0: no such limit."
    )
    too_long: Literal["refuse", "split"] = Field(
        "refuse", description="A longer line ends the command, or is cut between sentences or words and joined again."
    )
    n_best: PositiveInt = Field(1, description="Translations given for each line, best first; at most the beam.")
    sampling: Bool = Field(False, description="Draw each token, n_best times for each line, in place of a beam search.")
    temperature: Number = Field(1.0, gt=0.0, description="Of sampling: logits are divided by it.")
    top_k: Int = Field(0, ge=0, description="Sampling draws from so many likeliest tokens; 0: from all.")
    top_p: Number = Field(
        1.0, gt=0.0, le=1.0, description="Sampling draws from the likeliest tokens that together have this probability."
    )
    seed: Int = Field(1, ge=0, description="Of sampling: with the number of the line it decides what is drawn.")

    @property
    def rows_per_sentence(self) -> int:
        """Hypotheses of a sentence that are decoded at once."""
        return self.n_best if self.sampling else self.beam_size


class TrackingConfig(Section):
    """Tracking in MLflow."""

    enabled: Bool = Field(True, description="False: only metrics.jsonl and its like, and no report at the end.")
    uri: Str | None = Field(
        None,
        description="Tracking address; none: that of the variable MLFLOW_TRACKING_URI, else sqlite in "
        "<run.root>/mlflow.db. A user and password belong into MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD: they are never written into a run folder.",
    )
    experiment: Str = Field("dist-transformer", min_length=1, max_length=500, description="Experiment of new runs.")
    register_as: Str | None = Field(
        None,
        pattern=r"^[^/:']+$",
        description="Name in MLflow's model registry under which the final model is registered.",
    )
    alias: Str | None = Field(None, description="Alias that the registered version gets; needs `register_as`.")


class Config(Section):
    """The configuration of one run."""

    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    divergence: DivergenceConfig = Field(default_factory=DivergenceConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    decoding: BeamConfig = Field(default_factory=BeamConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
