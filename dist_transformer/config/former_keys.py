"""Settings of earlier versions: files, run folders and checkpoints that have them are read where the program does what they
ask for, else refused with what stands in their place.

divergence: {patience_steps: 20}  ->  nothing: a constant of this value; any other one is refused
slurm: {partition: gpu}           ->  refused: write slurm.sbatch: {partition: ...}
"""

from typing import Any

from dist_transformer.config.yaml_positions import Marked

CONSTANTS: dict[str, dict[str, Any]] = {
    "divergence": {"window_steps": 200, "deviations": 8.0, "patience_steps": 20, "learning_rate_factor": 0.5, "max_rollbacks": 3},
    "checkpoints": {"save_attempts": 3, "stop_on_failed_save": False},
    "data": {"read_attempts": 8, "stall_seconds": 300, "batch_shapes": "free"},
    "tokenizer": {"training_sentences": 2_000_000},
    "validation": {"samples": 6, "comet": None},
    "decoding": {"n_best": 1, "sampling": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1,
                 "no_repeat_ngram_size": 0, "too_long": "refuse"},
    "training": {"dry_run": True, "loss_scale_window": 1000, "initial_loss_scale": 65_536, "threads_per_rank": 0,
                 "max_target_tokens": None, "compile_layers": False},
    "optimizer": {"no_decay": []},
    "tracking": {"close_seconds": 10, "upload_megabytes": 2000, "system_metrics": True},
    "slurm": {"preflight_seconds": 180, "preflight_tolerance": 0.8, "partition": None, "account": None, "qos": None,
              "constraint": None, "exclude": [], "gres": None, "memory": None, "cpu_bind": "cores", "extra_sbatch": [],
              "extra_srun": []},
}  # fmt: skip
"""Settings that went, and the value that each had where nobody gave one."""

_SAID = {
    **{
        name: f"give `translate` the option --{name.replace('_', '-')}. Remove it here"
        for name in CONSTANTS["decoding"]
    },
    "no_repeat_ngram_size": "give `translate` the option --no-repeat-ngram. Remove it here",
    "max_target_tokens": "give training.max_steps or max_epochs. Remove it",
    "compile_layers": "it gained nothing, and GPUs have kernels of their own now. Remove it",
    "no_decay": "vectors never decay, matrices always. Remove it",
    "system_metrics": "they are always recorded. Remove it",
    "stop_on_failed_save": "training always continues, and tries again at the next checkpoint. Remove it",
    "stall_seconds": "it is always half of training.hang_seconds. Remove it",
    "dry_run": "it is always made. Remove it",
    "threads_per_rank": "set the variable OMP_NUM_THREADS, in a job by slurm.environment. Remove it here",
    **{
        name: f"write slurm.sbatch: {{{name}: ...}}"
        for name in ("partition", "account", "qos", "constraint", "exclude", "gres")
    },
    "comet": "write validation.plugin: examples/comet_score.py:score, a file in which you name the model (docs/plugins.md)",
    "memory": "write slurm.sbatch: {mem: ...}",
    "cpu_bind": "write slurm.srun: {cpu-bind: ...}",
    "extra_sbatch": "write slurm.sbatch: {option: value}",
    "extra_srun": "write slurm.srun: {option: value}",
}


def take_former_keys(marked: Marked) -> tuple[Marked, list[str]]:
    """The configuration without former keys, and a problem for each that asks for what the program does not do."""
    values = {name: dict(part) if isinstance(part, dict) else part for name, part in marked.values.items()}
    sections = {name: part for name, part in values.items() if isinstance(part, dict)}
    problems = []
    for name, key, constant in ((name, *each) for name, part in CONSTANTS.items() for each in part.items()):
        if key in sections.get(name, ()) and sections[name].pop(key) != constant:
            said = _SAID.get(key, f"it is always {constant}. Remove it")
            problems.append(f"{marked.place((name, key))}: {name}.{key}: is no setting any more: {said}")
    return Marked(values, marked.where), problems


def current_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that an earlier version kept, by the keys of this one; what it alone could do is left out."""
    return take_former_keys(Marked(values))[0].values
