"""Cluster profiles fill what the run's YAML does not give."""

import re
import subprocess
from pathlib import Path

import pytest

from dist_transformer.cli.config_verbs import check
from dist_transformer.cluster.checks import submission_problems
from dist_transformer.cluster.profiles import fill_from_profile, load_profile
from dist_transformer.cluster.script import render_script
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError
from dist_transformer.package_data import share_folder
from dist_transformer.run.folder import RunDir


def _config(tmp_path: Path, slurm: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: {{demo: train}}}}\nslurm: {slurm}\n")
    return load_config(path)


def _profile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return str(path)


def test_a_profile_fills_only_what_the_run_does_not_give(tmp_path: Path) -> None:
    site = _profile(tmp_path, "sbatch: {partition: gpu}\ntime_limit: '1:00:00'\nnodes: 4\n")
    filled = fill_from_profile(_config(tmp_path, f"{{cluster: {site}, time_limit: '2:00:00'}}")).slurm
    assert (filled.sbatch, filled.time_limit, filled.nodes) == ({"partition": "gpu"}, "2:00:00", 4)


def test_a_value_that_equals_the_default_but_is_given_stays(tmp_path: Path) -> None:
    site = _profile(tmp_path, "nodes: 4\n")
    assert fill_from_profile(_config(tmp_path, f"{{cluster: {site}, nodes: 1}}")).slurm.nodes == 1


def test_environments_are_merged_name_by_name(tmp_path: Path) -> None:
    site = _profile(tmp_path, "environment: {A: profile, B: profile}\n")
    filled = fill_from_profile(_config(tmp_path, f"{{cluster: {site}, environment: {{B: run, C: run}}}}")).slurm
    assert filled.environment == {"A": "profile", "B": "run", "C": "run"}


def test_without_a_profile_the_configuration_stays_as_it_is(tmp_path: Path) -> None:
    config = _config(tmp_path, "{nodes: 2}")
    assert fill_from_profile(config) == config


def test_an_unknown_key_is_named_with_its_line_and_the_likely_one(tmp_path: Path) -> None:
    site = _profile(tmp_path, "nodes: 2\nranks_pre_node: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_profile(site)
    assert caught.value.problems == [
        f"{site}:2: ranks_pre_node: no such key in a cluster profile; did you mean `ranks_per_node`?"
    ]


def test_all_problems_of_a_profile_are_reported_at_once(tmp_path: Path) -> None:
    site = _profile(tmp_path, "zzz: 2\nnodes: -1\ntime_limit: long\n")
    with pytest.raises(ConfigError) as caught:
        load_profile(site)
    unknown, nodes, time_limit = caught.value.problems
    assert unknown.startswith(f"{site}:1: zzz: no such key in a cluster profile; known: nodes, ")
    assert nodes == f"{site}:2: nodes: input should be greater than 0; got -1 (int)"
    assert time_limit == (
        f"{site}:3: time_limit: expected a time as sbatch takes it: 30 (minutes), 1:00:00 or 2-00:00:00; got 'long' (str)"
    )


def test_a_profile_never_shows_the_value_of_a_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile(_profile(tmp_path, "environment: {TOKEN: [s3cret]}\n"))
    assert "expected text" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_secret_in_a_profile_is_refused_with_its_line_and_not_printed(tmp_path: Path) -> None:
    site = _profile(tmp_path, "nodes: 2\nenvironment:\n  PGPASSWORD: s3cret\nsetup: [export TOKEN=s3cret]\n")
    with pytest.raises(ConfigError) as caught:
        load_profile(site)
    variable, line = sorted(caught.value.problems)
    assert variable.startswith(f"{site}:3: slurm.environment.PGPASSWORD: looks like a secret")
    assert line.startswith(f"{site}:4: slurm.setup.0: looks like a secret")
    assert "s3cret" not in str(caught.value)


def test_config_check_looks_at_the_profile_and_at_the_ranks_that_it_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    site = _profile(tmp_path, "nodes: 4\nranks_per_node: 2\ngpus_per_node: 2\n")
    path.write_text(f"data: {{train: {{demo: train}}, lanes: 8}}\nslurm: {{cluster: {site}}}\n")
    check(path)
    assert "ranks in a Slurm job: 8." in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"1 problem in the configuration:\n  slurm.nodes: 4 nodes x 2 ranks = 8 ranks, more"
    ):
        check(path, ["data.lanes=4"])
    with pytest.raises(ConfigError, match=r"slurm\.gpus_per_node: 2 GPUs for 1 ranks on each node"):
        check(path, ["slurm.ranks_per_node=1"])
    with pytest.raises(ConfigError, match="no profile 'infinibant'"):
        check(path, ["slurm.cluster=infinibant"])


@pytest.mark.parametrize(
    ("section", "end"), [("", "tokens a step."), ("slurm: {nodes: 1}\n", "tokens a step, ranks in a Slurm job: 1.")]
)
def test_config_check_names_the_ranks_of_a_job_only_where_there_is_a_slurm_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, end: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: {{demo: train}}}}\n{section}")
    check(path)
    assert capsys.readouterr().out.strip().endswith(end)


def test_config_check_sees_what_submit_would_refuse(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "data: {train: {demo: train}}\ntraining: {init_from: gone}\n"
        "slurm: {time_limit: '3:00', sbatch: {N4: true, nodes: 2, exclude: 'n 1'}, container_mounts: [/a],\n"
        "  environment: {RANK: '0'}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        check(path)
    keys = [problem.split(":")[0] for problem in caught.value.problems]
    assert sorted(keys) == sorted(
        ["slurm.time_limit", "slurm.sbatch", "slurm.sbatch.nodes", "slurm.sbatch.exclude", "slurm.container_mounts",
         "slurm.environment.RANK", "training.init_from"]
    )  # fmt: skip


def test_a_profile_cannot_name_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster: no such key in a cluster profile"):
        load_profile(_profile(tmp_path, "cluster: lab\n"))


def test_an_unknown_name_lists_or_guesses_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no profile 'infinibant' in .*; did you mean `infiniband`"):
        load_profile("infinibant")
    with pytest.raises(ConfigError, match="a file of your own is given by its path; known: infiniband, lab, slinky"):
        load_profile("xyz")


SHIPPED = sorted(p.stem for p in (share_folder("slurm") / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_profile_that_we_ship_can_be_submitted_with(tmp_path: Path, name: str) -> None:
    config = fill_from_profile(_config(tmp_path, f"{{cluster: {name}, nodes: 1}}"))
    assert submission_problems(config, RunDir(tmp_path / "run"), num_parameters=1000) == []
    script = render_script("train.sbatch", config.slurm, tmp_path)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_profile_offers_in_a_comment_is_a_setting_too(tmp_path: Path, name: str) -> None:
    text = (share_folder("slurm") / "clusters" / f"{name}.yaml").read_text()
    offered = re.sub(r"^( *)# (?=[a-z_]+: \S)", r"\1", text, flags=re.MULTILINE)
    known, profile = (
        {*found, *(f"sbatch.{key}" for key in found.get("sbatch", ()))}
        for found in (load_profile(name), load_profile(_profile(tmp_path, offered)))
    )
    assert profile >= known
    assert name == "slinky" or profile > known


def test_the_profile_for_pods_asks_for_nothing_that_pods_do_not_have() -> None:
    profile = load_profile("slinky")
    assert not profile.keys() & {"sbatch", "container_image"}
