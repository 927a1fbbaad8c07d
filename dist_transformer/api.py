"""Use from Python: the same work as the verbs, with errors as exceptions. `dist_transformer` itself exports these names."""

import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_transformer.config.loading import load_config as _load_config
from dist_transformer.config.loading import to_yaml
from dist_transformer.config.schema import Config as Config
from dist_transformer.config.slurm_schema import Stage
from dist_transformer.decoding.search_settings import noting_tags, search_settings
from dist_transformer.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from dist_transformer.errors import MachineError as MachineError
from dist_transformer.errors import UserError as UserError
from dist_transformer.files import write_text
from dist_transformer.run.attempts import newest_checkpoint
from dist_transformer.run.evaluations import evaluations_of
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records
from dist_transformer.run.read_run import check_ranks, read_run
from dist_transformer.run.records import read_record, records_of_training


class Run:
    """A run, read from its folder each time that it is asked, while it trains or afterwards.

    Args:
        path: the run folder.

    Raises:
        UserError: the folder is none of a run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._run_dir = RunDir(self.path)
        if not self._run_dir.config.is_file() and not self._run_dir.job.is_file():
            raise UserError(f"{path}: expected a run folder, with config.yaml; `train` and `submit` make it")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, state={self.state!r}, step={self.step})"

    @property
    def state(self) -> str | None:
        """`pending`, `starting`, `running`, `stopped`, `finished` or `failed`, as run.json says; None: not begun."""
        found = read_record(self._run_dir.state).get("state")
        return None if found is None else str(found)

    @property
    def step(self) -> int:
        """The last finished step that run.json or metrics.jsonl knows."""
        newest: dict[str, Any] = next(records_of_training(self._run_dir.metrics), {})
        return max(int(each.get("step", 0)) for each in (read_record(self._run_dir.state), newest))

    @property
    def config(self) -> Config:
        """The resolved configuration of the newest start.

        Raises:
            ConfigError: it cannot be read.
        """
        return _load_config(self._run_dir.config, check_files=False)

    @property
    def model(self) -> Path:
        """The model folder, which is there once the run is finished."""
        return self._run_dir.model

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint, from which the run resumes; None: there is none yet."""
        name = newest_checkpoint(self._run_dir)
        return None if name is None else self._run_dir.checkpoints / name

    @property
    def job_id(self) -> str | None:
        """Id of the newest Slurm job that `submit` made; None: it was not submitted."""
        found = read_record(self._run_dir.job).get("job_id")
        return None if found is None else str(found)

    def metrics(self, event: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the records of metrics.jsonl, oldest first: {"event": "train", "step": 50, "time": ..., "loss": ...}.

        Args:
            event: only records of this kind: `train`, `validation`, `system`, `goodput`.
        """
        return read_records(self._run_dir.metrics, *([] if event is None else [event]))

    def scores(self) -> dict[str, dict[str, Any]]:
        """Returns what `evaluate` has measured of `model`, by the name of the corpus: {"test": {"bleu": 28.4, ...}}.

        Scores of an earlier model are left out.
        """
        return evaluations_of(self._run_dir)[0]


class Translator:
    """Translates with the model of a run folder or a model folder, on a GPU if there is one.

    A forked process (`multiprocessing.Pool`, `gunicorn --preload`) translates with one thread; on a GPU load it there.

    Args:
        folder: a run folder or a model folder.
        settings: settings of the section `decoding` in place of the run's: `beam_size=1`, `length_penalty=0.6`,
            `too_long="split"`.

    Raises:
        UserError: there is no model in the folder, it is incomplete, or a setting has a wrong value.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        from dist_transformer.decoding.loaded_model import LoadedTranslator, model_folder_of

        path = Path(folder)
        self._unchecked: Path | None = path
        self._translator = LoadedTranslator(model_folder_of(path), search_settings(path, **settings))

    def __call__(self, line: str) -> str:
        """Returns the translation of one line; for more of them there is `translate`."""
        if not isinstance(line, str):
            raise UserError(f"a Translator takes a line of text, got {type(line).__name__}: call its translate(lines)")
        return next(self.translate([line]))

    def translate(self, lines: Iterable[str]) -> Iterator[str]:
        """Yields a translation for each line, in order; blank lines stay empty. Reads 2,048 lines ahead, and no more.

        Raises:
            UserError: a line is no text, or longer than `decoding.max_source_tokens`, and `too_long` is "refuse"; or `lines` is
                one text.
        """
        if isinstance(lines, str):
            raise UserError("translate takes lines, got one text, whose letters would be lines: call the Translator")
        texts, folder, self._unchecked = _all_text("a line", lines), self._unchecked, None
        return self._translator.translate(texts if folder is None else noting_tags(folder, texts))


def load_config(path: str | Path, *overrides: str) -> Config:
    """Reads and checks a YAML file, with `section.key=value` overrides.

    Raises:
        ConfigError: with all problems, each with file, line and key, the expected and the given value.
    """
    return _load_config(Path(path), [*_all_text("an override, section.key=value,", overrides)])


def prepare(config: Config | str | Path) -> Path:
    """Filters, tokenizes and shuffles the corpora of a configuration or YAML file, unless that is done; returns the folder.

    Raises:
        UserError: a corpus cannot be read.
        MachineError: the disk is full, or fails.
    """
    from dist_transformer.data.prepare.progress import prepare_with_progress

    with _path_of(config) as path:
        return prepare_with_progress(read_run(path)[0])[0]


def train(config: Config | str | Path, ranks: int = 1) -> Run:
    """Trains, or resumes, a run by processes on this machine, and waits for its end. Call it in the main thread.

    A run that was told to stop (Ctrl-C, USR1, TERM, `dist-transformer stop`) has saved, and has the state `stopped`.

    Args:
        config: a configuration, a YAML file, or a run folder to resume.
        ranks: processes, at most one for each of `data.lanes`.

    Raises:
        UserError: something to be changed; what a rank says of it is on standard error and in train.log.
        MachineError: a rank failed; the same call resumes from the newest checkpoint.
    """
    from dist_transformer.processes.launching import start_local_ranks

    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "train: call it in the main thread, which receives the signals that stop a run; from another thread start "
            "`dist-transformer train` as a process"
        )
    with _path_of(config) as path:
        resolved, run_dir = read_run(path)
        check_ranks(resolved, ranks)
        code = start_local_ranks([str(path)], ranks, are_held=True, leave_together=True)
    if code not in (EXIT_DONE, EXIT_REQUEUE):
        error = UserError if code == EXIT_USER_ERROR else MachineError
        raise error(
            f"{run_dir.path}: training ended with exit code {code}; the reason is on standard error and in train.log"
        )
    return Run(run_dir.path)


def submit(config: Config | str | Path, stages: Sequence[Stage] = ("train",), after: Sequence[str] = ()) -> Run:
    """Checks a run and submits it to Slurm, as jobs that save, requeue and resume by themselves.

    Args:
        config: a configuration, a YAML file, or a run folder to resume.
        stages: jobs that follow each other: some of `prepare`, `train`, `average`, `evaluate`, in this order.
        after: ids of jobs that must have ended well before.

    Raises:
        ConfigError: all problems of the run together.
        UserError: `stages` or `after` is something else, or sbatch refuses the job.
    """
    from dist_transformer.cluster.submit import checked_submission
    from dist_transformer.cluster.submit import submit as submit_jobs

    with _path_of(config) as path:
        submission, _ = checked_submission(path, [], stages, after)
    submit_jobs(submission)
    return Run(submission.run_dir.path)


def evaluate(
    folder: str | Path,
    split: str = "test",
    *,
    source: str | Path | None = None,
    references: Sequence[str | Path] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Translates a test set and returns its sacreBLEU and chrF with signatures; a run folder keeps them in evaluation/, and
    MLflow gets them if it tracks the run.

    Args:
        folder: a run folder, or a model folder together with `source` and `references`.
        split: a corpus of the run's YAML: `test`, `validation`, or a name of `data.more_validation`.
        source, references: files of lines in place of the run's corpus.
        settings: settings of the section `decoding` in place of the run's.

    Raises:
        UserError: there is no model, nothing to score, only one of `source` and `references`, or a setting has a wrong value.
    """
    from dist_transformer.decoding.evaluation import evaluate_model, report_to_mlflow

    if isinstance(references, str | Path):
        raise UserError(f"references: expected a list of files, got {references!r}; put it in brackets")
    texts = None if source is None else Path(source), [*map(Path, references)]
    found = evaluate_model(Path(folder), split, *texts, **settings)
    report_to_mlflow(found)
    return found.scores


def _all_text(what: str, given: Iterable[str]) -> Iterator[str]:
    for each in given:
        if not isinstance(each, str):
            raise UserError(f"expected {what} as text, got {type(each).__name__}: {each!r}")
        yield each


@contextmanager
def _path_of(config: Config | str | Path) -> Iterator[Path]:
    """A YAML file or run folder for the verbs; of a configuration one that is there for the time of the block."""
    if not isinstance(config, Config):
        yield Path(config)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        write_text(path, to_yaml(config))
        yield path
