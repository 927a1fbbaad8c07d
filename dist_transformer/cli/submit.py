"""submit: check everything on the login node, then hand the job to Slurm."""

from typing import Annotated

import typer

from dist_transformer.cli.arguments import Overrides, RunArgument, read_run, with_absolute_paths
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.cluster.submit import plan_submission, submit
from dist_transformer.config.loading import to_yaml
from dist_transformer.config.sizes import parameter_count


def submit_command(
    run: RunArgument,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, submit nothing.")] = False,
) -> None:
    """Check a run and submit it as a Slurm job that saves, requeues and goes on by itself."""
    config, run_dir = read_run(run, overrides)
    config = fill_from_profile(config)
    size = config.tokenizer.vocabulary_size
    parameters = parameter_count(config.model, size, size)
    text = to_yaml(with_absolute_paths(config, None))
    submission = plan_submission(config, text, run_dir, parameters, dry_run=dry_run)
    if dry_run:
        print(f"# command\n{submission.command}\n")
        for path, text in submission.files.items():
            print(f"# {path}\n{text}")
        return
    job_id = submit(submission)
    path = submission.run_dir.path
    print(f"submitted job {job_id}; run folder {path}")
    print(f"watch:  squeue --job {job_id};  tail -f {path / 'train.log'}")
    print(f"stop:   touch {submission.run_dir.stop_file}  (saves first);  scancel {job_id}  (ends it for good)")
