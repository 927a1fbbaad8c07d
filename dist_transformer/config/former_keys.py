"""Settings of earlier versions, and what stands in their place: files, run folders and checkpoints that have them are read.

slurm: {partition: gpu, extra_sbatch: [--exclusive]}  ->  slurm: {sbatch: {partition: gpu, exclusive: true}}
divergence: {patience_steps: 20}                      ->  nothing: a constant of this value; any other one is refused
"""

import re
from typing import Any

from dist_transformer.config.yaml_positions import Marked

CONSTANTS: dict[str, dict[str, Any]] = {
    "divergence": {"window_steps": 200, "deviations": 8.0, "patience_steps": 20, "learning_rate_factor": 0.5, "max_rollbacks": 3},
    "checkpoints": {"save_attempts": 3, "stop_on_failed_save": False},
    "data": {"read_attempts": 8, "stall_seconds": 300, "batch_shapes": "free"},
    "tokenizer": {"training_sentences": 2_000_000},
    "validation": {"samples": 6},
    "decoding": {"n_best": 1, "sampling": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1},
    "training": {"dry_run": True, "loss_scale_window": 1000, "initial_loss_scale": 65_536, "threads_per_rank": 0},
    "tracking": {"close_seconds": 10, "upload_megabytes": 2000},
    "slurm": {"preflight_seconds": 180, "preflight_tolerance": 0.8},
}  # fmt: skip
"""Settings that are constants of the program now, and the value that each had where nobody gave one."""

_SAID = {
    **{
        name: f"give `translate` the option --{name.replace('_', '-')}. Remove it here"
        for name in CONSTANTS["decoding"]
    },
    "stop_on_failed_save": "training always continues, and tries again at the next checkpoint. Remove it",
    "stall_seconds": "it is always half of training.hang_seconds. Remove it",
    "dry_run": "it is always made. Remove it",
    "threads_per_rank": "set the variable OMP_NUM_THREADS, in a job by slurm.environment. Remove it here",
}
OPTIONS: dict[str, tuple[str, str]] = {
    **{name: ("sbatch", name) for name in ("partition", "account", "qos", "constraint", "exclude", "gres")},
    "memory": ("sbatch", "mem"),
    "cpu_bind": ("srun", "cpu-bind"),
}
"""Keys of `slurm` that are options of a command now: their mapping, and their name in it."""
OPTION_LISTS = {"extra_sbatch": "sbatch", "extra_srun": "srun"}
"""Lists of --option=value in `slurm` that are entries of a mapping now."""


def with_moved_keys(marked: Marked) -> Marked:
    """One file or override with the former keys of `slurm` in the places that they have now, before others are laid over it.

    What cannot be moved, as it is given in both ways or is no option, stays for `take_former_keys`.
    """
    if not isinstance(marked.values.get("slurm"), dict):
        return marked
    slurm, where = dict(marked.values["slurm"]), dict(marked.where)
    for former in [key for key in slurm if key in OPTIONS or key in OPTION_LISTS]:
        mapping, entries = _entries(former, slurm[former])
        options = slurm.get(mapping, {})
        if entries is None or not isinstance(options, dict) or entries.keys() & options.keys():
            continue
        place = marked.place(("slurm", former))
        del slurm[former]
        slurm[mapping] = {**options, **entries}
        where = {("slurm", mapping): place, **where, **{("slurm", mapping, name): place for name in entries}}
    return Marked({**marked.values, "slurm": slurm}, where)


def take_former_keys(marked: Marked) -> tuple[Marked, list[str]]:
    """The configuration without former keys, and a problem for each that asks for what the program does not do."""
    values = {name: dict(part) if isinstance(part, dict) else part for name, part in marked.values.items()}
    sections = {name: part for name, part in values.items() if isinstance(part, dict)}
    problems = []
    for name, key, constant in ((name, *each) for name, part in CONSTANTS.items() for each in part.items()):
        if key in sections.get(name, ()) and sections[name].pop(key) != constant:
            said = _SAID.get(key, f"it is always {constant}. Remove it")
            problems.append(f"{marked.place((name, key))}: {name}.{key}: is no setting any more: {said}")
    slurm = sections.get("slurm", {})
    for key in [key for key in slurm if key in OPTIONS or key in OPTION_LISTS]:
        del slurm[key]
        problems.append(f"{marked.place(('slurm', key))}: slurm.{key}: {_why_not_moved(key)}")
    return Marked(values, marked.where), problems


def current_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that an earlier version kept, by the keys of this one; what it alone could do is left out."""
    return take_former_keys(with_moved_keys(Marked(values)))[0].values


def _why_not_moved(former: str) -> str:
    if former in OPTIONS:
        return f"is slurm.{'.'.join(OPTIONS[former])} now, which is given too. Keep that one"
    mapping = f"slurm.{OPTION_LISTS[former]}"
    return (
        f"is {mapping} now: expected --option or --option=value, one an entry, and none of them in {mapping} too. Write "
        f"{mapping}: {{option: value}}"
    )


def _entries(former: str, value: Any) -> tuple[str, dict[str, Any] | None]:
    """The mapping that a former key of `slurm` belongs to, and its entries; none where it is no list of options."""
    if former in OPTIONS:
        mapping, name = OPTIONS[former]
        return mapping, {name: None if value == [] else value}  # no node excluded
    options = value if isinstance(value, list) else [None]
    found = [re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.*))?", str(option), re.DOTALL) for option in options]
    entries = {match[1]: True if match[2] is None else match[2] for match in found if match}
    return OPTION_LISTS[former], entries if all(found) else None
