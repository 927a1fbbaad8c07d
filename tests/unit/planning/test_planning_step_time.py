"""Step time: FLOPs against torch's own counter, collectives by hand, properties of the rest; the table of hardware."""

import json
from dataclasses import replace

import pytest
import torch
from flop_counting import flop_counter

from dist_transformer.config.model_size import num_buckets
from dist_transformer.config.schema import Config
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer
from dist_transformer.planning.hardware import (
    ASSUMED,
    DATA_SHEET,
    HARDWARE,
    MEASURED,
    Constant,
    calibrated,
    hardware_of,
)
from dist_transformer.planning.plan import plan_row
from dist_transformer.planning.step_time import MEAN_TOKENS, micro_batch_flops, step_time
from dist_transformer.planning.vocabularies import count_parameters, vocabulary_sizes

H200 = HARDWARE["h200-141g"]


def config_of(lanes=8, max_tokens=8192, **training):
    data = {"lanes": lanes, "max_tokens": max_tokens}
    return Config.model_validate({"data": data, "training": training})


def report_of(folder, medians, nodes=2, num_ranks=16, device="cuda"):
    path = folder / "report.json"
    names = {f"n{number}": {} for number in range(nodes)}
    path.write_text(json.dumps({"medians": medians, "nodes": names, "num_ranks": num_ranks, "device": device}))
    return path


def counted_flops(config, checkpointing):
    size = 64
    model = Transformer(config.model, size, size, 0, activation_checkpointing=checkpointing).train()
    ids = torch.full((3, MEAN_TOKENS), 5)
    with flop_counter() as counter:
        model.loss(ids, ids, ids, 0.1)[0].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head_size", [16, 10])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_the_operations_are_those_that_torch_counts_but_for_attention_scores(checkpointing, head_size, activation):
    """Its counter knows no attention kernel of CPUs, and kept attention is not computed again."""
    sizes = dict(d_model=64, d_ff=96, num_heads=4, num_encoder_layers=2, num_decoder_layers=3)
    sizes |= dict(key_size=head_size, value_size=head_size, activation=activation)
    values = {"data": {}, "model": sizes, "tokenizer": {"vocabulary_size": 64}}
    config = Config.model_validate({**values, "training": {"activation_checkpointing": checkpointing}})
    tokens = 3 * MEAN_TOKENS
    scores = (8 if checkpointing else 6) * 2 * MEAN_TOKENS * 4 * head_size * (2 + 2 * 3) * tokens
    assert micro_batch_flops(config, tokens, tokens) - scores == pytest.approx(
        counted_flops(config, checkpointing), rel=0.01
    )


@pytest.mark.parametrize(
    ("stage", "offload", "halves"),
    [(0, "none", 2), (1, "none", 2), (2, "none", 4 + 1), (3, "none", 3 * 4), (1, "optimizer", 3), (2, "optimizer", 9)],
)
def test_the_collectives_of_a_step_take_the_time_of_a_ring(stage, offload, halves):
    config = config_of(lanes=8, zero_stage=stage, offload=offload, precision="fp16")
    at_once = Constant(1e9, ASSUMED)  # no arithmetic hides anything
    hardware = replace(H200, latency_seconds=Constant(0.0, ASSUMED), half_tflops=at_once)
    found = step_time(config, 2, 2, hardware)
    assert found.micro_batches == 4
    one = 0.5 * 2 * count_parameters(config) / (hardware.link_gb_per_second.value * 1e9)
    assert found.communication_seconds == pytest.approx(halves * one, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_arithmetic_hides_all_but_the_source_embedding_where_it_takes_long_enough(stage):
    """Its gradient comes last, and its weights are needed first."""
    config = config_of(lanes=8, zero_stage=stage, precision="fp16")
    slow, fast = (
        replace(H200, latency_seconds=Constant(0.0, ASSUMED), half_tflops=Constant(tflops, ASSUMED))
        for tflops in (1, 1e9)
    )
    hidden, exposed = (step_time(config, 2, 2, hardware).communication_seconds for hardware in (slow, fast))
    share = vocabulary_sizes(config)[0] * config.model.d_model / count_parameters(config)
    assert hidden == pytest.approx(share * exposed, rel=1e-3)


def test_more_ranks_send_fewer_buckets_because_each_costs_the_latency_of_all():
    assert [num_buckets(n) for n in (1, 8, 16, 32, 64, 1024)] == [16, 16, 8, 4, 4, 4]


def test_over_nodes_the_network_is_the_limit_and_each_rank_adds_latency():
    config = config_of(lanes=64)
    within, over = (step_time(config, 8, per_node, H200) for per_node in (8, 4))
    assert over.communication_seconds > within.communication_seconds
    slow = replace(H200, latency_seconds=Constant(1.0, ASSUMED))
    seconds = [step_time(config, ranks, 64, slow).communication_seconds for ranks in (2, 3)]
    assert seconds[1] - seconds[0] == pytest.approx(num_buckets(3) * 2 * 2 - num_buckets(2) * 2, rel=0.01)
    assert step_time(config, 1, 8, H200).communication_seconds == 0


def test_more_ranks_compute_less_each_and_lanes_that_they_do_not_divide_leave_some_idle():
    config = config_of(lanes=12)
    by_ranks = {ranks: step_time(config, ranks, 8, H200) for ranks in (1, 2, 3, 4, 5, 8, 12)}
    seconds = [time.compute_seconds for time in by_ranks.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert by_ranks[1].compute_seconds == pytest.approx(12 * by_ranks[12].compute_seconds)
    assert by_ranks[5].micro_batches == 3
    assert by_ranks[5].idle_share == pytest.approx(3 / 15)
    assert by_ranks[4].idle_share == 0
    assert len({time.target_tokens for time in by_ranks.values()}) == 1


def test_a_row_says_what_to_look_at_before_starting():
    idle = plan_row(config_of(lanes=12), 1, 8, H200)
    assert "25% of the ranks' time is idle" in idle.warnings[0]
    few = plan_row(config_of(max_tokens=512), 1, 8, H200)
    assert any("few tokens a GPU" in text for text in few.warnings)
    slow = replace(H200, link_gb_per_second=Constant(0.1, ASSUMED))
    assert any("of a step is communication" in text for text in plan_row(config_of(), 1, 8, slow).warnings)
    many = plan_row(config_of(), 2, 8, H200)
    assert many.time is None
    assert many.problem == "more ranks (16) than data.lanes (8): take fewer nodes, fewer GPUs of a node or more lanes"


def test_hours_are_those_of_all_steps_and_node_hours_those_of_all_nodes():
    row = plan_row(config_of(lanes=32, max_steps=7200), 2, 8, H200)
    assert row.time is not None
    assert row.hours == pytest.approx(2 * row.time.seconds)
    assert row.node_hours == pytest.approx(4 * row.time.seconds)
    endless = plan_row(config_of(lanes=32, max_steps=None, max_epochs=3), 2, 8, H200)
    assert (endless.hours, endless.node_hours) == (None, None)


def test_auto_plans_with_the_largest_micro_batch_that_fits():
    small = replace(H200, memory_gb=Constant(6, ASSUMED))
    row = plan_row(config_of(max_tokens="auto"), 1, 8, small)
    assert row.problem is None
    assert 2048 < row.max_tokens < 65_536
    assert plan_row(config_of(max_tokens="auto"), 1, 8, H200).max_tokens == 65_536


@pytest.mark.parametrize("kind", HARDWARE)
def test_every_figure_of_the_table_says_that_this_project_did_not_measure_it(kind):
    constants = vars(hardware_of(kind))
    assert {constant.source for constant in constants.values()} <= {DATA_SHEET, ASSUMED}
    assert all(constant.value > 0 for constant in constants.values())
    assert constants["matmul_share"].source == constants["model_share"].source == ASSUMED


def test_an_unknown_gpu_is_answered_with_all_that_are_known():
    with pytest.raises(UserError, match=r"--gpu: expected one of h200-141g, .*cpu; got 'h300'"):
        hardware_of("h300")


def test_what_a_preflight_measured_takes_the_place_of_the_table(tmp_path):
    medians = {"matmul_tflops": 600.0, "all_reduce_gb_per_second": 80.0, "all_reduce_latency_seconds": 3e-3}
    over_nodes = calibrated(H200, report_of(tmp_path, medians))
    assert over_nodes.half_tflops == Constant(600.0, MEASURED)
    assert over_nodes.achieved_tflops("fp16") == pytest.approx(600 * H200.model_share.value)
    assert over_nodes.achieved_tflops("fp32") == H200.achieved_tflops("fp32")
    assert over_nodes.network_gb_per_second == Constant(10.0, MEASURED)
    assert over_nodes.link_gb_per_second == H200.link_gb_per_second
    assert over_nodes.latency_seconds == Constant(pytest.approx(1e-4), MEASURED)
    within = calibrated(H200, report_of(tmp_path, {"all_reduce_gb_per_second": 80.0}, nodes=1, num_ranks=8))
    assert within.link_gb_per_second == Constant(80.0, MEASURED)
    assert (within.network_gb_per_second, within.half_tflops) == (H200.network_gb_per_second, H200.half_tflops)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"medians": 3}', '{"medians": {"matmul_tflops": "fast"}}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"--calibrate: .*report.json: expected the report.json of a preflight"):
        calibrated(H200, path)


def test_a_report_without_the_figures_or_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match="has none of matmul_tflops"):
        calibrated(H200, report_of(tmp_path, {"matmul_tflops": 0, "disk": 3.0}))
    with pytest.raises(UserError, match="was measured on cpu, which is not what --gpu names"):
        calibrated(H200, report_of(tmp_path, {"matmul_tflops": 1.0}, device="cpu"))
    with pytest.raises(UserError, match="No such file"):
        calibrated(H200, tmp_path / "none.json")
