"""Options of sbatch and srun, variables, gres, nodes and containers that are refused before anything reaches Slurm."""

from pathlib import Path

import pytest
from cluster_helpers import config_of

from dist_transformer.cluster.checks import submission_problems
from dist_transformer.run.folder import RunDir


def _problems(run_dir: RunDir, num_parameters: int = 1000, **settings: object) -> list[str]:
    return submission_problems(config_of(**settings), run_dir, num_parameters)


@pytest.mark.parametrize("name", ["N4", "-N4", "--nodelist", "cpus_per_gpu", "a b", "a=b", "$(x)", ""])
def test_a_name_that_is_no_option_is_refused(run_dir: RunDir, name: str) -> None:
    for key in ("sbatch", "srun"):
        assert _problems(run_dir, **{key: {name: "1"}}) == [
            f"slurm.{key}: {name!r}: expected a long option of {key} without its dashes: nodelist, mem-per-cpu"
        ]


def test_an_option_of_two_lines_is_refused(run_dir: RunDir) -> None:
    assert _problems(run_dir, srun={"comment": "a\nb"}) == [
        "slurm.srun.comment: 'a\\nb': an option cannot hold a line break"
    ]


@pytest.mark.parametrize(
    ("name", "option", "instead"),
    [
        ("nodes", "nodes", "use slurm.nodes"),
        ("node", "nodes", "use slurm.nodes"),
        ("ntasks-per-node", "ntasks-per-node", "use slurm.ranks_per_node"),
        ("ntasks", "ntasks", "use slurm.nodes and slurm.ranks_per_node"),
        ("cpus-per-task", "cpus-per-task", "use slurm.cpus_per_rank"),
        ("gpus-per-node", "gpus-per-node", "use slurm.gpus_per_node, and slurm.sbatch.gres for their kind"),
        ("time", "time", "use slurm.time_limit"),
        ("signal", "signal", "use slurm.signal_seconds"),
        ("sig", "signal", "use slurm.signal_seconds"),
        ("job-name", "job-name", "use run.name"),
        ("array", "array", "use a node for each run: submit --pipeline"),
        ("dependency", "dependency", "use submit --after"),
        *(
            (name, name, "the batch script relies on it; remove it")
            for name in ("requeue", "open-mode", "output", "error", "chdir")
        ),
    ],
)
def test_an_option_that_submit_sets_is_refused_with_what_says_it(
    run_dir: RunDir, name: str, option: str, instead: str
) -> None:
    assert _problems(run_dir, sbatch={name: "1"}) == [f"slurm.sbatch.{name}: --{option} is set by submit; {instead}"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nodes", "2", "expected 1, as the job has, got 2; use slurm.nodes"),
        ("ntasks", "4", "expected 2, as the job has, got 4; use slurm.nodes and slurm.ranks_per_node"),
        ("cpus-per-task", "4", "expected 1, as the job has, got 4; use slurm.cpus_per_rank"),
        ("export", "NONE", "expected ALL among NONE, as ranks need the variables of the job"),
        ("export", "ALL_PROXY=x", "expected ALL among ALL_PROXY=x, as ranks need the variables of the job"),
    ],
)
def test_an_option_of_srun_that_would_contradict_the_job_is_refused(
    run_dir: RunDir, name: str, value: object, message: str
) -> None:
    """srun would refuse it after each wait in the queue, or hide the job's variables from the ranks."""
    job = {"nodes": 1, "ranks_per_node": 2, "cpus_per_rank": 1}
    assert _problems(run_dir, srun={name: value}, **job) == [f"slurm.srun.{name}: {message}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("export", "ALL"), ("export", "ALL,UCX_TLS=rc"), ("export", ["ALL", "UCX_TLS=rc"]), ("job-name", "ranks"), ("mpi", "pmix"),
     ("gres", "gpu:8"), ("time", "1:00"),
     ("nodes", False), ("ntasks", []), ("cpus-per-task", "3"), ("ntasks", "2"), ("export", "X=1,all")],
)  # fmt: skip
def test_an_option_of_srun_that_fits_the_job_is_taken(run_dir: RunDir, name: str, value: object) -> None:
    assert _problems(run_dir, srun={name: value}, nodes=1, ranks_per_node=2, cpus_per_rank=3) == []


@pytest.mark.parametrize("name", ["wait", "quiet", "test-only", "test"])
def test_an_option_without_an_answer_at_once_is_refused_unless_it_is_off(run_dir: RunDir, name: str) -> None:
    needed = "submit needs the id of the job from sbatch, and at once: remove it (=null)"
    assert _problems(run_dir, sbatch={name: True}) == [f"slurm.sbatch.{name}: {needed}"]
    assert _problems(run_dir, sbatch={name: None}) == _problems(run_dir, sbatch={name: False}) == []


def test_another_cluster_is_refused(run_dir: RunDir) -> None:
    needed = "`status` would not find the job; remove it, and submit from a login node of that cluster"
    assert _problems(run_dir, sbatch={"clusters": "b"}) == [f"slurm.sbatch.clusters: {needed}"]


@pytest.mark.parametrize("name", ["time-min", "time-m"])
def test_a_limit_that_slurm_may_shorten_is_refused(run_dir: RunDir, name: str) -> None:
    """In the end each attempt would be told to save as soon as it trains."""
    needed = "a requeue keeps the shortened limit; remove it (=null), or lower slurm.time_limit"
    assert _problems(run_dir, sbatch={name: "10"}) == [f"slurm.sbatch.{name}: {needed}"]


@pytest.mark.parametrize(("name", "option"), [("exclud", "exclude"), ("gre", "gres")])
def test_an_option_that_is_read_here_is_written_out(run_dir: RunDir, name: str, option: str) -> None:
    assert _problems(run_dir, sbatch={name: "1"}) == [
        f"slurm.sbatch.{name}: is short for --{option}; write slurm.sbatch.{option}"
    ]


@pytest.mark.parametrize("name", ["nodelist", "exclusive", "mem-per-cpu", "ntasks-per-core", "gpu-bind"])
def test_an_option_whose_name_begins_like_one_that_submit_sets_is_taken(run_dir: RunDir, name: str) -> None:
    assert _problems(run_dir, sbatch={name: "1"}) == []


def test_memory_that_sbatch_would_not_read_is_answered_with_an_example(run_dir: RunDir) -> None:
    assert _problems(run_dir, sbatch={"mem": "120 GB"}) == [
        "slurm.sbatch.mem: '120 GB': expected a number with K, M, G or T: 120G"
    ]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("2X", "", "expected a variable's name"),
        ("A B", "", "expected a variable's name"),
        ("A;touch x", "", "expected a variable's name"),
        ("RANK", "0", "is set by the batch script"),
        ("SLURM_CONF", "x", "is set by the batch script"),
        ("MASTER_ADDR", "x", "is set by the batch script"),
        ("HF_TOKEN", "x", "looks like a secret"),
        ("MLFLOW_TRACKING_PASSWORD", "x", "looks like a secret"),
        ("AWS_SECRET_ACCESS_KEY", "x", "looks like a secret"),
        ("A", "x\0y", "a variable cannot hold a zero byte"),
    ],
)
def test_variables_that_cannot_or_must_not_be_written_are_refused(
    run_dir: RunDir, name: str, value: str, expected: str
) -> None:
    [problem] = _problems(run_dir, environment={name: value})
    assert problem.startswith(f"slurm.environment.{name}: {expected}")


def test_gres_needs_the_number_of_gpus_too(run_dir: RunDir) -> None:
    [problem] = _problems(run_dir, sbatch={"gres": "gpu:h200:8"})
    assert problem.startswith("slurm.sbatch.gres: 'gpu:h200:8' is given, but slurm.gpus_per_node is 0")
    assert _problems(run_dir, sbatch={"gres": "gpu:h200:8"}, gpus_per_node=8, ranks_per_node=8) == []


@pytest.mark.parametrize(
    ("gres", "is_sound"),
    [("gpu:h200:8", False), ("gpu", False), ("gpu:h200", False), ("gpu:3,nvme:4", False), ("gpu:4", True),
     ("nvme:400,gpu:a:3,gpu:b", True), ("nvme:400", True), ("shard:8", True), ("mps:100", True)],
)  # fmt: skip
def test_gres_has_as_many_gpus_as_the_ranks_are_said_to_get(run_dir: RunDir, gres: str, is_sound: bool) -> None:
    problems = _problems(run_dir, sbatch={"gres": gres}, gpus_per_node=4, ranks_per_node=4)
    expected = (
        [] if is_sound else [f"slurm.sbatch.gres: {gres!r} is given, but slurm.gpus_per_node is 4 (0: CPU training)"]
    )
    assert [problem.split("; ")[0] for problem in problems] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpus-per-task", "1"), ("gpus-per-t", "h200:1"), ("gpus-per-socket", "2"), ("tres-per-task", "cpu=2,gres/gpu:1")],
)
def test_gpus_by_another_option_need_their_number_too(run_dir: RunDir, name: str, value: str) -> None:
    """The run would train on a GPU, and be told that it trains on CPUs."""
    number = "slurm.gpus_per_node is 0 (0: CPU training)"
    assert _problems(run_dir, sbatch={name: value}) == [
        f"slurm.sbatch.{name}: {value!r} is given, but {number}; use slurm.gpus_per_node, and slurm.sbatch.gres for their kind"
    ]
    assert _problems(run_dir, sbatch={name: value}, gpus_per_node=1) == []
    assert _problems(run_dir, sbatch={name: None}) == _problems(run_dir, sbatch={"tres-per-task": "cpu=2"}) == []


@pytest.mark.parametrize("nodes", ["n7", "n[1-3,7]", "gpu-a.site", "rack1[01-12]b", "n1,n[2-3]", ["n1", "n2"], []])
def test_nodes_to_keep_away_from_are_named_as_slurm_names_them(run_dir: RunDir, nodes: object) -> None:
    assert _problems(run_dir, sbatch={"exclude": nodes}) == []


@pytest.mark.parametrize("nodes", ["n1,", "n1 n2", "$(x)", "n[1"])
def test_what_names_no_node_is_refused(run_dir: RunDir, nodes: str) -> None:
    [problem] = _problems(run_dir, sbatch={"exclude": ["n9", nodes]})
    assert (
        problem
        == f"slurm.sbatch.exclude: {nodes!r}: expected nodes as Slurm names them: n7, or several as in 'n[1-3,7]'"
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"container_mounts": ["/a"]}, "slurm.container_mounts: are given without slurm.container_image"),
        ({"container_image": "--x"}, "slurm.container_image: '--x': expected the path or address of an image"),
        ({"container_image": ""}, "slurm.container_image: '': expected the path or address of an image"),
        ({"container_image": "i", "container_mounts": ["a"]}, "slurm.container_mounts: 'a': expected /folder"),
        ({"container_image": "i", "container_mounts": ["/a,/b"]}, "slurm.container_mounts: '/a,/b': expected /folder"),
        (
            {"container_image": "i", "container_runtime": "apptainer", "srun": {"container-name": "x"}},
            "slurm.srun: container-... is pyxis', but slurm.container_runtime is apptainer",
        ),
        (
            {"container_image": "i", "srun": {"container-image": "j"}},
            "slurm.srun.container-image: slurm.container_image is given too",
        ),
    ],
)
def test_container_keys_that_contradict_each_other_are_refused(
    run_dir: RunDir, settings: dict[str, object], expected: str
) -> None:
    [problem] = _problems(run_dir, **settings)
    assert problem.startswith(expected)


@pytest.mark.parametrize("mount", ["/a", "/a b", "/a:/b", "/a:/b:ro"])
def test_mounts_may_be_renamed_and_read_only(run_dir: RunDir, mount: str) -> None:
    assert _problems(run_dir, container_image="i", container_mounts=[mount]) == []


def test_a_run_folder_that_no_container_can_be_shown_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a,b" / "run")
    [problem] = _problems(run_dir, container_image="i")
    assert problem.startswith(f"slurm.container_image: '{tmp_path}/a,b' must be seen inside")
    assert _problems(run_dir) == []
