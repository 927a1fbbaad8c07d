"""Reports to MLflow at each start of a run: parameters, the tags by which runs are found, and the data. Rank 0."""

import logging
import os
import platform
from pathlib import Path
from typing import Any

from dist_transformer import __version__
from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.loading import flatten, to_yaml, with_absolute_paths
from dist_transformer.config.model_size import count_by_part
from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest, json_digest
from dist_transformer.data.sources.files import corpus_fingerprint, has_address
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import DataError, MachineError
from dist_transformer.run.snapshot import git_commit
from dist_transformer.tracking.tracker import Tracker
from dist_transformer.training.run import Run

log = logging.getLogger(__name__)

_SLURM_TAGS = {"job_id": "SLURM_JOB_ID", "nodes": "SLURM_STEP_NODELIST", "restart": "SLURM_RESTART_COUNT",
               "partition": "SLURM_JOB_PARTITION", "cluster": "SLURM_CLUSTER_NAME"}  # fmt: skip


def start_tracker(run: Run, origin: dict[str, str]) -> Tracker:
    """Starts the tracker of a run. `origin`: tags with the origin of the initial weights and changed settings."""
    config, prepared, manifest = run.config, run.data.folder, run.manifest
    tracker = Tracker(run.run_dir, config.tracking, config.run.name, Path(config.run.root), run.run_id)
    config = with_absolute_paths(config, prepared)  # the same whether the YAML file or the run folder was given
    tags = {**_tags(config, run.ranks, manifest), **origin}
    settings = flatten(config.model_dump(mode="json"))
    parameters = {key: str(value) for key, value in settings.items() if value is not None}
    tracker.start(parameters, tags, to_yaml(config), _datasets(config, prepared, manifest))
    return tracker


def _tags(config: Config, ranks: Ranks, manifest: Manifest) -> dict[str, str]:
    parameters = count_by_part(config.model, manifest.source_vocabulary, manifest.target_vocabulary).total
    commit = git_commit()
    return {
        "languages": f"{config.data.source_language}-{config.data.target_language}",
        "model": config.model.preset,
        "num_parameters": str(parameters),
        "num_ranks": str(ranks.num_ranks),
        "num_nodes": str(-(-ranks.num_ranks // ranks.ranks_per_node)),
        "host": platform.node(),
        "device": ranks.device.type,
        "zero_stage": str(config.training.zero_stage),
        "precision": config.training.precision,
        "data_digest": manifest.digest,
        "version": __version__,
        **({"git_commit": commit} if commit else {}),
        **{f"slurm.{key}": os.environ[name] for key, name in _SLURM_TAGS.items() if name in os.environ},
    }


def _datasets(config: Config, prepared: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Describes each prepared corpus, and the held-out ones that are read as text."""
    splits = [
        {
            "name": name,
            "context": "training" if name in manifest.training else "validation",
            "digest": manifest.digest,
            "source": str(prepared),
            "rows": split.rows,
            "source_tokens": split.source_tokens,
            "target_tokens": split.target_tokens,
        }
        for name, split in manifest.splits.items()
    ]
    corpora = [(name, "validation", corpus) for name, corpus in config.data.more_validation.items()]
    if config.data.test is not None:
        corpora.append(("test", "test", config.data.test))
    named = [
        {
            "name": name,
            "context": context,
            "digest": _digest(corpus, config.data),
            "source": corpus.model_dump_json(exclude_defaults=True),
        }
        for name, context, corpus in corpora
    ]
    return [*splits, *named]


def _digest(corpus: CorpusConfig, data: DataConfig) -> str:
    """Returns a digest of a corpus's files if they are on a disk, else of its description, without network access."""
    if (corpus.source or corpus.path) and not has_address(corpus, data):
        try:
            return json_digest(corpus_fingerprint(corpus, data))
        except (DataError, MachineError) as error:
            log.warning("tracking   %s", error)
    return json_digest(corpus.model_dump(mode="json"))
