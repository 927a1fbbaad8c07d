"""The benchmarks still run, and their raw figures are what their tables say. Sizes are tiny: no figure means anything."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import NOT_INHERITED, Command, without

from dist_transformer.data.sources.demo_corpus import demo_pairs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FEW_STEPS = [
    *("--preset", "tiny", "--vocabulary", "200", "--max-tokens", "128", "--pairs", "400"),
    *("--steps", "1", "--stages", "1"),
]
Run = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, quick_client: Path) -> Run:
    """Runs a benchmark in tmp_path; what it printed, and its raw figures, which it wrote to the file `raw`."""

    def run(script: str, raw: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
        command = Command(tmp_path, quick_client)
        code, printed = command.program(BENCHMARKS / script, *arguments, "--rounds", "1", "--json", raw)
        assert code == 0, printed
        return printed, json.loads(raw.read_text(encoding="utf-8"))["figures"]

    return run


@pytest.mark.slow
def test_the_loader_benchmark_loads_every_pair_and_compares_layouts_speed_and_resume(run: Run, tmp_path: Path) -> None:
    sizes = ["--pairs", "2000", "--lanes", "2", "--max-tokens", "1024", "--row-group-rows", "256"]
    text = ["--text-pairs", "400", "--text-vocabulary", "300"]
    windows = ["--windows", "200", "1000", "--window-rows", "500", "--peer-rows", "200", "--peers"]
    printed, figures = run("loader.py", tmp_path / "loader.json", *sizes, *text, *windows)
    assert printed.count("| --- |") == 3
    small, large = figures["batching"]["200"], figures["batching"]["1000"]
    assert 0 < large["padding"] < small["padding"] < 1
    assert small["straggler"] >= 1
    for loading, pairs in (
        ("prepared, in the training process", 2000),
        ("prepared, 1 worker", 2000),
        ("BPE on the fly, 1 worker", 400),
    ):
        assert figures["throughput"][loading][0]["pairs"] == pytest.approx(pairs, rel=0.2)  # but for two first steps
        assert figures["resume"][loading][0]["wall_seconds"] > 0
    assert figures["throughput"]["datasets, rows streamed in the training process"][0]["pairs"] == 200


@pytest.mark.slow
def test_the_memory_benchmark_samples_an_epoch_and_draws_it(run: Run, tmp_path: Path) -> None:
    sizes = ["--pairs", "3000", "--lanes", "2", "--max-tokens", "1024", "--window-rows", "200", "--workers", "1"]
    printed, figures = run("loader_memory.py", tmp_path / "memory.json", *sizes, "--plot", str(tmp_path / "memory.png"))
    assert printed.count("| --- |") == 1
    samples = figures["memory"]["1 worker"]
    assert (samples[0]["pairs"], samples[-1]["pairs"]) == (0, 3000)
    assert all(sample["trainer"] > 0 for sample in samples)
    assert samples[-1]["workers"] > 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_benchmark_of_silent_errors_audits_without_an_alarm_and_finds_the_wrong_rank(
    run: Run, tmp_path: Path
) -> None:
    sizes = ["--audits", "8", "--runs", "1", "--share", "1"]
    printed, figures = run("silent_errors.py", tmp_path / "silent.json", *sizes)
    assert "8 audits of 2 ranks, 0 alarms" in printed
    [[step, ranks]] = figures["found"]
    assert 0 < step <= figures["limit"]
    assert ranks == [1]


@pytest.mark.slow
def test_the_benchmark_of_cleaning_finds_the_noise_of_each_rule(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("lingua")
    printed, figures = run("cleaning.py", tmp_path / "cleaning.json", "--pairs", "2000")
    assert printed.count("| --- |") == 2
    recall = {rule: found for rule, _, _, _, found in figures["rules"]}
    for rule in (
        "language",
        "duplicates",
        "held_out",
        "markup",
        "letters",
        "digits",
        "punctuation",
        "repeated",
        "numbers",
    ):
        assert recall[rule] > 0.95, rule
    assert all(speed > 0 for speeds in figures["pairs_per_second"].values() for speed in speeds)


@pytest.mark.slow
def test_the_plan_benchmark_plans_every_pair(run: Run, tmp_path: Path) -> None:
    sizes = ["--pairs", "3000000", "--lanes", "3", "--window-rows", "20000"]
    printed, figures = run("plan.py", tmp_path / "plan.json", *sizes)
    assert printed.count("| --- |") == 1
    (sample,) = figures["plan"]["3"]
    assert sample["rows"] == 3_000_000
    assert sample["windows"] == 3 * 50
    assert sample["plan_seconds"] > 0
    assert sample["megabytes"] > 0


@pytest.mark.slow
def test_the_step_benchmark_compares_networks_of_one_size_and_judges_a_real_run(run: Run, tmp_path: Path) -> None:
    sizes = ["--preset", "tiny", "--vocabulary", "200", "--max-tokens", "512", "--steps", "1", "--stages", "0", "2"]
    of_run = ["--run-steps", "30", "--run-pairs", "500", "--loss-tokens", "2048"]
    printed, figures = run("step.py", tmp_path / "step.json", *sizes, *of_run)
    assert printed.count("\n| --- |") == 2
    budgets = figures["budgets"]
    assert len(budgets) == 6
    for what in ("waiting for data, of a step", "padding, of the tokens", "tracking and logging, of the time"):
        assert 0 < budgets[what]["figure"] < 1
    assert budgets["checkpoints, one in 10 minutes"]["figure"] > 0
    assert budgets["start to the first step"]["figure"] > 0
    assert budgets["memory of the loss"]["budget"] == pytest.approx(2048 * 200 * 4 / 1e6)
    assert len(set(figures["parameters"].values())) == 1
    plain = ["torch.nn.Transformer", "torch.nn.Transformer, our dropout"]
    stages = [*plain, "ours, ZeRO 0", "ours, ZeRO 2"]
    assert sorted(figures["steps"]) == sorted(f"{name}, {p}" for name in stages for p in ("fp32", "bf16"))
    for (sample,) in figures["steps"].values():
        phases = sum(sample[phase] for phase in ("forward", "backward", "update"))
        assert 0 < phases <= sample["cpu_seconds"]


@pytest.mark.slow
def test_the_benchmark_of_limits_sets_each_part_beside_its_limit(run: Run, tmp_path: Path) -> None:
    sizes = ["--preset", "tiny", "--vocabulary", "800", "--max-tokens", "512", "--steps", "1", "--sentences", "2"]
    sizes += ["--checkpoint-size", "tiny", "--pairs", "1000", "--precisions", "fp32"]
    printed, figures = run("limits.py", tmp_path / "limits.json", *sizes)
    assert printed.count("| --- |") == 1
    assert len(figures["limits"]) == 8
    for (sample,) in figures["limits"].values():
        assert sample["share"] == pytest.approx(sample["seconds_at_limit"] / sample["seconds"])
        assert 0 < sample["share"] < 50  # more than 1 where the limit was measured in a worse moment


@pytest.mark.slow
def test_the_benchmark_of_ranks_gives_both_sides_the_same_tokens(run: Run, tmp_path: Path) -> None:
    printed, figures = run("ranks.py", tmp_path / "ranks.json", *FEW_STEPS)
    assert printed.count("| --- |") == 1
    samples = [sample for (sample,) in figures["ZeRO 1"].values()]
    assert len({sample["target_tokens"] for sample in samples}) == 1
    assert all(0 < sample["update"] < sample["wall_seconds"] for sample in samples)


@pytest.mark.slow
def test_the_benchmark_of_same_bits_trains_on_the_same_tokens_with_and_without(run: Run, tmp_path: Path) -> None:
    printed, figures = run("same_bits.py", tmp_path / "same_bits.json", *FEW_STEPS)
    assert printed.count("| --- |") == 1
    for case in ("1 rank", "2 ranks, ZeRO 1"):
        (ours,), (plain,) = figures[case]["same bits"], figures[case]["plain"]
        assert ours["target_tokens"] == plain["target_tokens"] > 0


@pytest.fixture
def slow_links() -> None:
    """Skips where links with a limit cannot be made: that takes root, iproute2 and a kernel with namespaces and tbf.

    Where the tests of Slurm must run, which takes the same, it fails instead.
    """
    space = f"dtprobe{os.getpid()}"
    limit = f"tc -n {space} qdisc add dev lo root tbf rate 1gbit burst 512kb latency 100ms"
    try:
        for command in (f"ip netns add {space}", limit):
            subprocess.run(command.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"no links with a limit here: {error}"
        pytest.fail(reason) if os.environ.get("DIST_TRANSFORMER_REQUIRE_SLURM") == "1" else pytest.skip(reason)
    finally:
        subprocess.run(["sh", "-c", f"ip netns del {space}"], check=False, capture_output=True)


@pytest.mark.slow
def test_the_benchmark_of_networks_trains_the_same_lanes_over_each(run: Run, tmp_path: Path, slow_links: None) -> None:
    printed, figures = run("network.py", tmp_path / "network.json", *FEW_STEPS)
    assert printed.count("| --- |") == 1
    samples = {name: sample for name, (sample,) in figures["ZeRO 1"].items()}
    assert set(samples) == {"over the link", "without a limit", "alone"}
    assert samples["over the link"]["target_tokens"] == samples["without a limit"]["target_tokens"] > 0


@pytest.mark.slow
def test_a_step_starts_no_more_operations_than_were_counted_and_asks_a_device_for_one_number(
    run: Run, tmp_path: Path
) -> None:
    printed, figures = run("launches.py", tmp_path / "launches.json", "--presets", "base", "--width", "64")
    assert printed.count("| --- |") == 1
    most = {"fp32": (620, 0), "bf16": (650, 8), "fp16": (650, 6)}
    assert set(figures) == {f"base {precision}" for precision in most}
    for precision, (operations, casts) in most.items():
        parts = figures[f"base {precision}"]
        update = parts.pop("update")
        assert update["operations"] <= 40
        assert update["waits"] == 1
        assert len(parts) == 3
        for part in parts.values():
            assert 300 < part["operations"] <= operations
            assert part["casts"] <= casts
            assert part["waits"] == 0


@pytest.mark.slow
def test_muon_starts_few_operations_for_all_matrices(run: Run, tmp_path: Path) -> None:
    sizes = ["--presets", "base", "--width", "64", "--matrices", "muon"]
    _, figures = run("launches.py", tmp_path / "launches.json", *sizes)
    assert {parts["update"]["waits"] for parts in figures.values()} == {1}
    assert max(parts["update"]["operations"] for parts in figures.values()) <= 100


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_gives_figures_on_a_cpu_too(run: Run, tmp_path: Path) -> None:
    levers = ["as trained", "6 times the tokens in a micro-batch, with padding"]
    sizes = [
        "--device",
        "cpu",
        "--presets",
        "tiny",
        "--precisions",
        "bf16",
        "--vocabulary",
        "200",
        "--levers",
        levers[1],
    ]
    sizes += ["--max-tokens", "256", "--batches", "1", "--pairs", "200", "--output", str(tmp_path / "gpu.md")]
    _, figures = run("gpu.py", tmp_path / "gpu.json", *sizes)
    assert list(figures) == [f"`tiny`, bf16, {lever}" for lever in levers]
    for name, found in figures.items():
        assert found["slowest"] == found["tokens_per_second"] == found["fastest"] > 0
        assert f"| {name} | {found['tokens_per_second']:,.0f} |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_checkpoint_benchmark_saves_and_resumes_in_both_ways(run: Run, tmp_path: Path, ranks: int) -> None:
    sizes = ["--sizes", "tiny", "--stages", "1", "--ranks", str(ranks), "--max-tokens", "64"]
    printed, figures = run("checkpoint.py", tmp_path / "checkpoint.json", *sizes, "--folder", str(tmp_path))
    assert printed.count("| --- |") == 1
    ((ours,), (theirs,)) = figures["checkpoint"]["tiny, ZeRO 1"].values()
    for figure in ("still_seconds", "resume_seconds"):
        assert ours[figure] > 0
        assert theirs[figure] > 0
    assert ours["still_seconds"] == pytest.approx(ours["begin_seconds"] + ours["finish_seconds"])
    # steps beside the writing thread may by chance be the faster ones: what is lost may come out below zero
    assert ours["lost_seconds"] == pytest.approx(ours["still_seconds"] + ours["slowed_seconds"])
    assert ours["megabytes"] == pytest.approx(figures["parameters"]["tiny"] * 12 / 1e6, rel=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"]


@pytest.mark.slow
def test_the_tracking_benchmark_compares_a_followed_run_with_one_that_is_not_and_with_mlflow(
    run: Run, tmp_path: Path
) -> None:
    sizes = ["--situations", "healthy", "dead", "--steps", "3", "--direct-steps", "2", "--cut-seconds", "1"]
    printed, figures = run("tracking.py", tmp_path / "tracking.json", *sizes)
    assert printed.count("| --- |") == 1
    assert list(figures) == ["healthy", "dead"]
    for cases in figures.values():
        for (sample,) in (cases["ours"], cases["metrics.jsonl only"]):
            assert 0 < sample["median_seconds"] <= sample["p99_seconds"] <= sample["max_seconds"]
            assert sample["median_seconds"] < sample["step_seconds"]
    assert figures["healthy"]["mlflow.log_metrics"]["calls"] == 2
    assert figures["dead"]["mlflow.log_metrics"]["calls"] == 0


@pytest.mark.slow
def test_the_comparison_of_losses_trains_the_demo_model_in_each_way(run: Run, tmp_path: Path) -> None:
    sizes = ["--precisions", "fp32", "--stages", "1", "--ranks", "2", "--steps", "2", "--max-tokens", "200"]
    printed, figures = run("same_losses.py", tmp_path / "losses.json", *sizes)
    assert printed.count("| --- |") == 1
    assert figures["fp32 1 2"]["difference"] < 1e-5
    assert len(figures["fp32 1 2"]["losses"]) == 2


@pytest.mark.slow
def test_the_speedrun_counts_the_cost_of_an_entry(run: Run, tmp_path: Path) -> None:
    for name, split in (("train", "train"), ("val", "validation"), ("test_2016_flickr", "test")):
        pairs = [pair for _, pair in zip(range(300), demo_pairs(split), strict=False)]
        for side, language in enumerate(("en", "de")):
            (tmp_path / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    entry = tmp_path / "short.yaml"
    short = {"tokenizer": {"vocabulary_size": 300}, "training": {"max_steps": 2}, "schedule": {"warmup_steps": 1},
             "validation": {"every_steps": 1}, "checkpoints": {"every_steps": 1, "average_last": 2},
             "data": {"max_tokens": 512}}  # fmt: skip
    entry.write_text(json.dumps({"extends": str(BENCHMARKS / "speedrun" / "muon.yaml"), **short}), encoding="utf-8")
    where = ["--data", str(tmp_path), "--work", str(tmp_path / "work"), "--seeds", "2", "--cores", "0"]
    printed, figures = run("speedrun.py", tmp_path / "speedrun.json", str(entry), *where)
    assert "NOT the published setting" in printed
    assert "| short |" in printed
    (result,) = figures["short"]
    assert result["seed"] == 2
    assert 0 < result["cpu_seconds"] < result["seconds"] * 1.1  # on one core
    assert list(result["validation_nll"]) == ["1", "2"]
    assert 0 <= result["bleu"] < 40.6


@pytest.mark.slow
def test_the_decoding_benchmark_finds_the_same_translations_with_every_engine(run: Run, tmp_path: Path) -> None:
    sizes = ["--presets", "tiny", "--vocabulary", "600", "--sentences", "4", "--batches", "1", "4", "--beams", "1"]
    printed, figures = run("decode.py", tmp_path / "decode.json", *sizes, "--threads", "1")
    assert printed.count("| 100% |") == 6
    for rounds in figures["tiny"].values():
        assert all(samples[0]["tokens_per_second"] > 0 for samples in rounds.values())
        assert set(rounds) == {"ours", "Hugging Face generate", "CTranslate2"}


@pytest.mark.slow
def test_training_is_that_of_torchs_transformer_and_of_hugging_faces_marian_step_by_step(
    run: Run, tmp_path: Path
) -> None:
    tolerances = {"GELU, fp32": 1e-5, "ReLU, fp64": 1e-12}
    _, figures = run("twins.py", tmp_path / "twins.json", "--steps", "100", "--cases", *tolerances)
    for case, allowed in tolerances.items():
        ours, *twins = figures[case].values()
        assert len(twins) == 2
        assert ours[-1] < ours[0] - 1
        for losses in twins:
            assert losses == pytest.approx(ours, rel=allowed)


@pytest.mark.slow
def test_the_edits_of_the_start_benchmark_are_of_text_that_is_in_the_package(tmp_path: Path) -> None:
    each = "for name, edits in start.WITHOUT.items(): start._copy(pathlib.Path(sys.argv[1]), name, edits)"
    code = f"import start, pathlib, sys\n{each}"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, cwd=BENCHMARKS, env=without(NOT_INHERITED), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
