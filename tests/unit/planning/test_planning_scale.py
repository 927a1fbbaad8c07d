"""Scale: stragglers against drawn ones and by hand, rows against their parts, the command `simulate` and its mistakes."""

import json
import math
import re
from dataclasses import replace

import pytest
from played_runs import drawn_stragglers
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.schema import Config
from dist_transformer.errors import UserError
from dist_transformer.planning.failures import expected_attempt
from dist_transformer.planning.hardware import HARDWARE
from dist_transformer.planning.scale import (
    COPY_GB_PER_SECOND,
    Site,
    conditions_of,
    scale_row,
    straggler_factor,
)
from dist_transformer.planning.step_time import step_time

SITE = Site(1000, 300, 120, 60, None, None, lane_spread=0.05, limit_seconds=math.inf)
CONFIG = Config.model_validate({"data": {"lanes": 64}, "training": {"max_steps": 10_000}})


def row(nodes, config=CONFIG, **changes):
    return scale_row(config, nodes, 8, HARDWARE["h200-141g"], replace(SITE, **changes))


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 32, 2000])
def test_the_slowest_rank_is_expected_as_slow_as_drawn_ones_are(num_ranks, micro_batches):
    expected = straggler_factor(num_ranks, micro_batches, 0.2)
    drawn = drawn_stragglers(num_ranks, micro_batches, 0.2, num_steps=100 if num_ranks == 2000 else 10_000)
    assert drawn == pytest.approx(expected, rel=0.01)


def test_stragglers_by_hand():
    assert straggler_factor(1, 3, 0.5) == pytest.approx(1)
    assert straggler_factor(500, 3, 0) == pytest.approx(1)
    # The larger of two log-normal values: 2 Phi(s / sqrt 2) times the mean.
    deviation = math.sqrt(math.log1p(0.3**2))
    assert straggler_factor(2, 1, 0.3) == pytest.approx(2 * (1 + math.erf(deviation / 2)) / 2)
    factors = [straggler_factor(count, 1, 0.1) for count in (1, 8, 64, 512)]
    assert factors == sorted(factors)
    assert straggler_factor(8, 4, 0.1) < straggler_factor(8, 1, 0.1)


def test_a_row_is_made_of_the_step_its_slowest_rank_and_the_failures_of_all_nodes():
    found, alone = row(2), step_time(CONFIG, 16, 8, HARDWARE["h200-141g"])
    assert found.time.compute_seconds == pytest.approx(alone.compute_seconds * straggler_factor(16, 4, 0.05))
    assert found.time.communication_seconds == alone.communication_seconds
    assert found.conditions.between_failures_seconds == 500 * 3600
    best = expected_attempt(found.conditions, found.interval.best_steps * found.time.seconds).kept_share
    assert found.useful_share == pytest.approx(best * alone.compute_seconds / found.time.seconds)
    assert found.set_share <= found.kept_share
    assert row(2) == found


@pytest.mark.parametrize(
    ("nodes", "longest"), [(1, 100), (16, 50)]
)  # 16 nodes have twice the lanes, and half the steps
def test_no_interval_leaves_a_run_with_fewer_checkpoints_than_are_averaged(nodes, longest):
    settings = {"training": {"max_steps": 2000}, "checkpoints": {"average_last": 20}}
    short = CONFIG.model_validate({**CONFIG.model_dump(), **settings})
    found, free = row(nodes, short).interval, row(nodes).interval
    assert free.best_steps > longest
    assert found.least_steps <= found.best_steps <= found.most_steps == longest


def test_one_node_of_one_rank_waits_for_nobody():
    found = scale_row(CONFIG, 1, 1, HARDWARE["h200-141g"], SITE)
    assert (found.stragglers, found.time.communication_seconds) == (pytest.approx(1), 0)
    assert found.efficiency == pytest.approx(1, abs=0.01)


def test_more_nodes_fail_more_often_and_keep_less():
    rows = [row(nodes, node_hours_between_failures=200) for nodes in (1, 8, 64, 512)]
    for figure in ("kept_share", "efficiency", "useful_share"):
        values = [getattr(each, figure) for each in rows]
        assert values == sorted(values, reverse=True)
    assert [each.conditions.between_failures_seconds for each in rows] == [720_000 / n for n in (1, 8, 64, 512)]


def test_more_ranks_than_lanes_make_larger_steps_and_fewer_of_them():
    site = {"node_hours_between_failures": 1e9, "restart_seconds": 0, "write_seconds": 0, "save_seconds": 0}
    found = row(16, **site)
    assert found.lanes == 128
    assert found.wall_seconds == pytest.approx(5000 * found.time.seconds, rel=1e-3)
    endless = Config.model_validate({"data": {"lanes": 8}, "training": {"max_steps": None, "max_epochs": 2}})
    assert (row(1, endless).wall_seconds, row(1, endless).gave_up_share) == (None, None)


def test_each_rank_copies_its_part_of_a_checkpoint_unless_seconds_are_given():
    few, many = (conditions_of(SITE, 1, ranks, 12 * 10**9) for ranks in (1, 100))
    assert few.save_seconds == pytest.approx(12 / COPY_GB_PER_SECOND)
    assert many.save_seconds == pytest.approx(few.save_seconds / 100)
    assert few.write_seconds == pytest.approx(12 / 0.2)
    assert many.write_seconds == pytest.approx(12 / 2)  # the disk that they share
    given = conditions_of(replace(SITE, save_seconds=0.0, write_seconds=5.0), 1, 1, 10**9)
    assert (given.save_seconds, given.write_seconds) == (0, 5)


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {lanes: 16, train: {demo: train}}\ntraining: {max_steps: 100000}\ncheckpoints: {every_steps: 7}\n"
        "slurm: {ranks_per_node: 8, nodes: 2, time_limit: '10:00:00'}\n",
        encoding="utf-8",
    )
    return str(path)


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def raised_by(*arguments):
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(result.exception, UserError)
    return str(result.exception)


def test_json_has_every_figure_and_the_limit_of_the_job_counts(yaml_file):
    values = json.loads(simulate(yaml_file, "--nodes", "1,4", "--json").stdout)
    assert values["site"]["limit_seconds"] == 36_000 - 180
    one, four = values["simulations"]
    assert one.keys() == four.keys()
    assert [(each["nodes"], each["ranks"], each["lanes"]) for each in (one, four)] == [(1, 8, 16), (4, 32, 32)]
    assert one["useful_share"] == pytest.approx(one["kept_share"] * one["efficiency"])
    assert one["kept_share_as_it_is"] < one["kept_share"]
    unlimited = json.loads(simulate(yaml_file, "--nodes", "1", "--json", "slurm.time_limit=0").stdout)
    assert unlimited["site"]["limit_seconds"] is None
    assert unlimited["simulations"][0]["kept_share"] > one["kept_share"]


def test_the_tables_have_a_line_for_each_number_of_nodes_and_say_what_to_set(yaml_file):
    lines = simulate(yaml_file, "--nodes", "1,2,4", "--node-hours-between-failures", "500").stdout.splitlines()
    tables = [number for number, line in enumerate(lines) if line.split()[:1] == ["nodes"]]
    assert len(tables) == 2
    for table in tables:
        assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["1", "2", "4"]
        assert len({len(line) for line in lines[table : table + 4]}) == 1
    values = json.loads(simulate(yaml_file, "--nodes", "2", "--node-hours-between-failures", "500", "--json").stdout)[
        "simulations"
    ][0]
    advice = f"checkpoints: for 2 nodes set checkpoints.every_steps={values['best_every_steps']};"
    assert any(line.startswith(advice) for line in lines)
    assert any(line.startswith("from 4 nodes on: more ranks than data.lanes=16") for line in lines)
    assert any("limit_seconds 35820" in line for line in lines)
    good = simulate(yaml_file, "--nodes", "2", f"checkpoints.every_steps={values['best_every_steps']}").stdout
    assert f"every_steps={values['best_every_steps']} is good" in good


def test_a_job_that_will_be_given_up_is_said_to_be(yaml_file):
    hopeless = simulate(yaml_file, "--nodes", "1", "--node-hours-between-failures", "0.05", "--write-seconds", "300")
    said = re.search(r"1 node: (\d+)% of the runs have 13 attempts in a row without a checkpoint", hopeless.stdout)
    assert said is not None
    assert int(said[1]) > 90
    assert "given up (4 times slurm.max_restarts_without_progress)" in hopeless.stdout


def test_where_nothing_is_kept_no_interval_is_called_good(yaml_file):
    said = simulate(yaml_file, "--nodes", "1", "--node-hours-between-failures", "0.03", "--write-seconds", "700").stdout
    assert "checkpoints: on 1 node no interval keeps anything" in said
    assert "is good" not in said


def test_an_interval_that_costs_next_to_nothing_is_good_however_free_saves_are(yaml_file):
    free = ["--nodes", "1", "--save-seconds", "0", "--write-seconds", "0", "checkpoints.every_steps=600"]
    assert "every_steps=600 is good" in simulate(yaml_file, *free).stdout


def test_failures_may_be_as_rare_as_never(yaml_file):
    assert simulate(yaml_file, "--nodes", "1", "--node-hours-between-failures", "1e18").exit_code == 0


def test_the_hours_that_an_attempt_may_train_are_a_limit_too(yaml_file):
    given = ["--nodes", "1", "--restart-seconds", "1800", "--json"]
    hours, limit = (
        json.loads(simulate(yaml_file, *given, setting).stdout)["simulations"][0]["kept_share"]
        for setting in ("training.max_hours=4", "slurm.time_limit='04:03:00'")
    )
    assert hours == limit


def test_a_limit_that_leaves_no_time_or_is_none_is_refused(yaml_file):
    assert "give more" in raised_by(yaml_file, "slurm.time_limit=2:00")
    assert "expected hours:minutes:seconds" in raised_by(yaml_file, "slurm.time_limit=1-2-3")
    assert "--nodes: expected whole numbers" in raised_by(yaml_file, "--nodes", "0")
    assert simulate(yaml_file, "--node-hours-between-failures", "0").exit_code == 2
    for option in ("--node-hours-between-failures", "--write-seconds", "--tokens-per-second"):
        assert f"{option}: expected a finite number, at most 1e+18; got inf" in raised_by(yaml_file, option, "inf")
        assert f"{option}: expected a finite number, at most 1e+18; got 1e+308" in raised_by(yaml_file, option, "1e308")
