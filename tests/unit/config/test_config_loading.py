"""The configuration door: every problem at once, each with file, line, key, what was expected, what came, what to do."""

from pathlib import Path

import pytest
import yaml
from config_problems import one_problem_of, problems_of

from dist_transformer.config.loading import flatten, load_config, to_yaml, with_absolute_paths
from dist_transformer.run.read_run import read_run

BASE = """\
run: {name: test}
data:
  train: {demo: train}
model:
  preset: tiny
training:
  max_steps: 5000
"""


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_presets_fill_what_is_not_given_and_given_keys_win(tmp_path):
    model = load_config(write(tmp_path, BASE), ["model.preset=big", "model.dropout=0.1"]).model
    assert (model.d_model, model.d_ff, model.num_heads, model.dropout) == (1024, 4096, 16, 0.1)


def test_the_defaults_are_those_of_the_paper(tmp_path):
    config = load_config(write(tmp_path, "data: {train: {demo: train}}"))
    model, optimizer = config.model, config.optimizer
    assert (model.d_model, model.d_ff, model.num_heads, model.num_encoder_layers, model.dropout) == (
        512,
        2048,
        8,
        6,
        0.1,
    )
    assert (model.norm, model.shared_embeddings, model.tied_output) == ("post", True, True)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.weight_decay) == (0.9, 0.98, 1e-9, 0.0)
    assert (config.schedule.warmup_steps, config.training.label_smoothing, config.training.max_steps) == (
        4000,
        0.1,
        100_000,
    )
    assert (config.decoding.beam_size, config.decoding.length_penalty, config.decoding.max_extra_tokens) == (4, 0.6, 50)


def test_epochs_alone_are_the_end_of_a_run_and_a_schedule_with_an_end_of_its_own_needs_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, epochs = write(tmp_path, "data: {train: {demo: train}}"), "training.max_epochs=20"
    ends = [load_config(own, [*more]).training.max_steps for more in ((epochs,), (epochs, "training.max_steps=7000"))]
    assert ends == [None, 7000]
    for schedule in ("cosine", "linear"):
        ending = [f"schedule.name={schedule}", "optimizer.learning_rate=0.001", epochs]
        assert f"{schedule} ends at training.max_steps, which is not given" in one_problem_of(own, *ending)
    of_before = load_config(own, [*ending, "training.max_steps=100000"])  # a run of a version with this default
    (tmp_path / "runs" / "run").mkdir(parents=True)
    write(tmp_path / "runs" / "run", to_yaml(of_before), "config.yaml")
    assert read_run(tmp_path / "runs" / "run")[0] == of_before


@pytest.mark.parametrize("text", ["1e-9", "1E-9", "1.0e-9", "0.000000001", "+1e-09"])
def test_scientific_notation_reads_as_a_number(tmp_path, text):
    assert load_config(write(tmp_path, f"{BASE}optimizer:\n  epsilon: {text}\n")).optimizer.epsilon == 1e-9
    assert load_config(write(tmp_path, BASE), [f"optimizer.epsilon={text}"]).optimizer.epsilon == 1e-9


def test_what_is_shown_reads_back_as_the_same(tmp_path):
    config = load_config(
        write(tmp_path, BASE), ["slurm.setup=['module load cuda', 'a b']", "tracking.experiment=Ünïcode 'x'"]
    )
    assert load_config(write(tmp_path, to_yaml(config), "shown.yaml")) == config


def test_extends_lays_a_file_over_another_and_lines_name_the_right_one(tmp_path):
    write(tmp_path, BASE, "base.yaml")
    child = write(tmp_path, "extends: base.yaml\nmodel:\n  dropout: 0.2\n", "child.yaml")
    config = load_config(child)
    assert (config.model.dropout, config.model.preset, config.training.max_steps) == (0.2, "tiny", 5000)
    broken = write(tmp_path, "extends: base.yaml\nmodel:\n  dropout: x\n", "broken.yaml")
    assert "broken.yaml:3: model.dropout" in one_problem_of(broken)
    write(tmp_path, BASE.replace("tiny", "tny"), "below.yaml")
    assert "below.yaml:5: model.preset" in one_problem_of(write(tmp_path, "extends: below.yaml\n", "above.yaml"))


def test_a_tilde_is_the_home_in_every_path(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    write(home, BASE, "base.yaml")
    keys = ("run.root", "data.root", "data.prepared", "training.init_from", "tokenizer.source_model")
    config = load_config(
        write(tmp_path, "extends: ~/base.yaml\n"), [f"{key}=~/{key}" for key in keys], check_files=False
    )
    values = flatten(with_absolute_paths(config, None).model_dump())
    assert {key: values[key] for key in keys} == {key: f"{home}/{key}" for key in keys}
    assert (config.run.root, config.tokenizer.source_model) == (f"{home}/run.root", f"{home}/tokenizer.source_model")


def test_extends_in_a_circle_is_refused(tmp_path):
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "leads back to itself" in one_problem_of(tmp_path / "a.yaml")


def test_all_problems_are_reported_together_each_with_its_line(tmp_path):
    text = """\
run: {name: test}
data:
  train: {demo: train}
model: {num_heads: 7}
optimizer:
  learning_rat: 0.1
schedule: {warmup_steps: 900}
training:
  zero_stage: five
slrum: {}
"""
    problems = problems_of(write(tmp_path, text), "slurm.nodes=9", "training.max_steps=100")
    joined = "\n".join(problems)
    assert "run.yaml:6: optimizer.learning_rat: no such key; did you mean `learning_rate`?" in joined
    assert "run.yaml:9: training.zero_stage: input should be 0, 1, 2 or 3; got 'five' (str)" in joined
    assert "run.yaml:10: slrum: no such section; did you mean `slurm`?" in joined
    assert "run.yaml:4: model.num_heads: 7 heads do not divide d_model 512" in joined
    assert "command line: slurm.nodes=9: slurm.nodes: 9 nodes x 1 ranks = 9 ranks, more than data.lanes 8" in joined
    assert len(problems) == 5


def test_a_pipeline_that_is_given_for_a_run_is_told_where_it_goes(tmp_path):
    text = "root: here\nset: {training: {max_steps: 5}}\nnodes:\n  teacher: {kind: train}\n"
    (problem,) = problems_of(write(tmp_path, text))
    assert problem.endswith(
        "run.yaml:3: nodes: of a pipeline; give the file to `pipeline run`, or to `submit --pipeline`"
    )


def test_nodes_in_a_run_file_or_among_its_overrides_are_one_problem_of_all(tmp_path):
    found = problems_of(
        write(tmp_path, "data: {train: {demo: train}}\nnodes: {a: 1}\ntraining: {zero_stage: 7}\n"), "nodes=4"
    )
    assert [problem.split(": ")[1] for problem in found] == ["training.zero_stage", "nodes=4"]
    assert found[1].endswith("nodes: no such section; did you mean `slurm.nodes`?")


def test_a_file_of_another_program_is_told_the_known_keys_once_and_the_section_that_has_a_key(tmp_path):
    text = "data: {src: de, trg: en, train: {demo: train}}\ntraining: {batch_type: token, learning_rate: 0.1, updates: 9}\n"
    problems = problems_of(write(tmp_path, text, "joey.yaml"))
    assert [problem.partition("; known: ")[0].partition("joey.yaml:")[2] for problem in problems] == [
        "1: data.src: no such key",
        "1: data.trg: no such key",
        "2: training.batch_type: no such key",
        "2: training.learning_rate: no such key; did you mean `optimizer.learning_rate`?",
        "2: training.updates: no such key",
    ]
    assert [problem.count("; known: ") for problem in problems] == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["schedule.warmup_steps=6000"], "schedule.warmup_steps: 6000 is above training.max_steps 5000"),
        (["training.max_steps=null"], "give max_steps or max_epochs, else the run never ends"),
        (["schedule.name=cosine"], "cosine needs optimizer.learning_rate"),
        (["training.zero_stage=0"], "0 cannot be used with training.precision: auto, which is fp16 on GPUs"),
        (["training.zero_stage=0", "training.precision=fp16"], "0 cannot be used with fp16"),
        (
            ["data.max_tokens=100"],
            "cannot hold one pair of two sides of data.filters.max_tokens 256; needs at least 512",
        ),
        (["tokenizer.shared=false"], "model.shared_embeddings: true needs tokenizer.shared: true"),
        (["model.tied_output=false"], "false needs model.shared_embeddings: false"),
        (["model.d_model=129", "model.num_heads=3"], "sinusoidal positions (3.5) need an even width, got 129"),
        (["data.train.hub=wmt/wmt14"], "expected one of source+target, path, hub, demo, plugin; got hub and demo"),
        (["data.test={}"], "expected one of source+target, path, hub, demo, plugin; got nothing"),
        (["data.test={source: a.en}"], "aligned text needs both files; target is not given"),
        (["training.max_steps=-1"], "input should be greater than 0; got -1 (int)"),
        (["model.dropout=1.5"], "input should be less than 1; got 1.5 (float)"),
        (["optimizer.learning_rate=fast"], "optimizer.learning_rate: expected a number; got 'fast' (str)"),
    ],
)
def test_a_problem_says_what_was_expected_and_what_came(tmp_path, overrides, expected):
    assert any(expected in problem for problem in problems_of(write(tmp_path, BASE), *overrides))


def test_missing_files_are_named_with_the_folder_they_were_looked_for_in(tmp_path):
    text = BASE.replace("{demo: train}", "{source: train.en, target: train.de}").replace(
        "data:", "data:\n  root: /no/where"
    )
    problems = problems_of(write(tmp_path, text))
    assert [p.split(": ", 2)[1] for p in problems] == ["data.train.source", "data.train.target"]
    assert "no such file: /no/where/train.en (data.root is '/no/where')" in problems[0]


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path):
    problem = one_problem_of(write(tmp_path, BASE + "model:\n  dropout: 0.3\n"))
    assert "run.yaml:8: model is given twice, first at" in problem
    assert "run.yaml:4" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "run.yaml:1: not valid YAML"),
        ("- a\n- b\n", "run.yaml:1: expected `key: value` lines, got seq"),
        ("", "run.yaml:1: data: no training corpus; give data.train, or data.mixture for several"),
        (
            "run: 3\ndata: {train: {demo: train}}\n",
            "run.yaml:1: run: expected `key: value` lines below it; got 3 (int)",
        ),
        ("extends: [a]\n", "extends: expected the path of a YAML file, got ['a']"),
    ],
)
def test_a_file_that_is_not_a_configuration_says_so(tmp_path, text, expected):
    assert any(expected in problem for problem in problems_of(write(tmp_path, text)))


def test_a_folder_is_no_configuration_and_the_file_of_a_run_folder_is_named(tmp_path):
    assert (
        one_problem_of(tmp_path)
        == f"{tmp_path}: is a folder; give a YAML file: that of a run folder is its config.yaml"
    )


def test_a_missing_file_and_a_bad_override_are_named(tmp_path):
    assert "no such file or folder; give the path of a YAML file" in one_problem_of(tmp_path / "none.yaml")
    assert "'oops': expected section.key=value" in one_problem_of(write(tmp_path, BASE), "oops")


def test_yaml_is_never_executed(tmp_path):
    path = write(tmp_path, BASE + "optimizer: !!python/object/apply:os.system ['touch hacked']\n")
    assert "not valid YAML" in one_problem_of(path)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {name: a\x07b}\n", 1),
        ("# fine\nrun: {name: test}\ndata: \x00\n", 3),
        ("a: &a {b: *a}\n", 1),
        ("a: " + "[" * 5000 + "\n", 1),
        ("run: {name: test}\ntraining: {max_steps: !!int five}\n", 2),
        ("run: {name: !!bool maybe}\n", 1),
        ("run: {name: !!timestamp 2024-01-01}\n", 1),
        ("run: {seed: " + "9" * 5000 + "}\n", 1),
    ],
)
def test_what_yaml_cannot_hold_is_refused_with_its_line(tmp_path, text, line):
    assert f"run.yaml:{line}: not valid YAML: " in one_problem_of(write(tmp_path, text))


@pytest.mark.parametrize("key", ["5", "true", "~", "1e3", "[a]", "{a: b}"])
def test_a_key_that_is_no_name_is_refused_with_its_line(tmp_path, key):
    assert "run.yaml:8: expected a name before the colon" in one_problem_of(write(tmp_path, f"{BASE}? {key}\n: {{}}\n"))


def test_a_preset_that_is_no_text_is_refused(tmp_path):
    assert "model.preset: input should be 'tiny'" in one_problem_of(write(tmp_path, BASE), "model.preset=[big]")


@pytest.mark.parametrize("text", ["no", "yes", "off", "On", "12:00:00", "2024-01-01", "010", "1_", ".inf", "=", "<<"])
def test_text_that_yaml_1_1_takes_for_something_else_stays_text(tmp_path, text):
    assert load_config(write(tmp_path, BASE), [f"data.source_language={text}"]).data.source_language == text
    assert load_config(write(tmp_path, f"{BASE}tracking: {{experiment: {text}}}\n")).tracking.experiment == text


@pytest.mark.parametrize("text", ["2024", "1.10", "1_000", "0x1F", "+5", "12e4567", "-0"])
def test_a_number_where_text_is_wanted_is_its_text_as_written(tmp_path, text):
    config = load_config(write(tmp_path, BASE), [f"slurm.environment.A={text}", f"slurm.setup=[{text}]"])
    assert (config.slurm.environment["A"], config.slurm.setup) == (text, (text,))
    assert load_config(write(tmp_path, f"{BASE}tracking: {{experiment: {text}}}\n")).tracking.experiment == text


@pytest.mark.parametrize(("text", "value"), [("100_000", 100_000), ("0x10", 16), ("+7", 7), ("7", 7)])
def test_whole_numbers_are_decimal_or_hexadecimal(tmp_path, text, value):
    assert load_config(write(tmp_path, BASE), [f"run.seed={text}"]).run.seed == value


@pytest.mark.parametrize("text", ["3", "3.0", "3.", "0.3e1", "30e-1"])
def test_a_whole_number_will_do_where_any_number_does(tmp_path, text):
    rate = load_config(write(tmp_path, BASE), [f"optimizer.learning_rate={text}"]).optimizer.learning_rate
    assert (type(rate), rate) == (float, 3.0)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.max_steps=yes", "training.max_steps: expected a whole number; got 'yes' (str)"),
        ("training.max_steps='100'", "training.max_steps: expected a whole number; got '100' (str); remove the quotes"),
        ("training.max_steps=true", "training.max_steps: expected a whole number; got true (true or false)"),
        ("training.max_steps=6e3", "training.max_steps: expected a whole number; got 6e3 (float); write 6000"),
        ("training.max_steps=010", "training.max_steps: expected a whole number; got '010' (str)"),
        ("run.seed=null", "run.seed: expected a whole number; got null (nothing)"),
        ("optimizer.epsilon='1e-9'", "optimizer.epsilon: expected a number; got '1e-9' (str); remove the quotes"),
        ("optimizer.epsilon=.nan", "optimizer.epsilon: expected a number; got '.nan' (str)"),
        ("model.dropout=false", "model.dropout: expected a number; got false (true or false)"),
        ("training.zero_stage=true", "training.zero_stage: input should be 0, 1, 2 or 3; got true (true or false)"),
        ("training.zero_stage=1.0", "training.zero_stage: input should be 0, 1, 2 or 3; got 1.0 (float)"),
        ("data.audit=1", "data.audit: expected true or false; got 1 (int)"),
        ("data.audit=yes", "data.audit: expected true or false; got 'yes' (str)"),
        ("run.name=true", "run.name: expected text; got true (true or false); put it in quotes"),
        ("run.name=[a]", "run.name: expected text; got ['a'] (list)"),
    ],
)
def test_nothing_is_silently_made_into_another_kind(tmp_path, override, expected):
    assert expected in one_problem_of(write(tmp_path, BASE), override)


def test_time_limits_are_read_as_written(tmp_path):
    for limit in ("12:00:00", "90", "1-12", "1-2:30:00"):
        assert load_config(write(tmp_path, BASE), [f"slurm.time_limit={limit}"]).slurm.time_limit == limit


NASTY = [
    *("no", "12:00:00", "2024", "1e3", "null", "~", "2024-01-01", "true", " a: b # c", "", " ", "010", "0x1F", "1_000"),
    *(
        "=",
        "<<",
        ".inf",
        "+1",
        "1.",
        "- a",
        "a\nb\n",
        "'",
        '"',
        "\\",
        "{a",
        "&a",
        "*a",
        "!a",
        "%a",
        "@a",
        "\ta",
        "a\tb",
    ),
    *("a" * 200 + " b", "\x85", "\u2028", "\ufeff", "\x07", "😀", "no ", "#", "a #b", "a:", ":a", "?", "? a", "|", ">"),
]


@pytest.mark.parametrize("text", NASTY)
def test_every_text_is_shown_so_that_it_reads_back_as_itself(tmp_path, text):
    config = load_config(write(tmp_path, BASE))
    slurm = config.slurm.model_copy(update={"setup": (text, f"{text} {text}"), "environment": {text: text}})
    config = config.model_copy(update={"slurm": slurm})
    read = load_config(write(tmp_path, to_yaml(config), "shown.yaml"))
    assert read == config
    assert to_yaml(read) == to_yaml(config)


def test_an_override_of_several_lines_is_one_value(tmp_path):
    config = load_config(write(tmp_path, BASE), ["tracking.experiment=a\nvalue: b", "run.root=c\nd: e"])
    assert (config.tracking.experiment, config.run.root) == ("a\nvalue: b", "c\nd: e")


def test_the_shown_yaml_is_plain_data(tmp_path):
    assert "!!python" not in to_yaml(load_config(write(tmp_path, BASE)))
    assert yaml.safe_load(to_yaml(load_config(write(tmp_path, BASE))))["run"]["name"] == "test"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "slurm.time_limit=2h",
            "expected a time as sbatch takes it: 30 (minutes), 1:00:00 or 2-00:00:00; got '2h' (str)",
        ),
    ],
)
def test_a_time_or_a_size_that_sbatch_would_not_read_is_answered_with_an_example(tmp_path, override, expected):
    key = override.partition("=")[0]
    assert one_problem_of(write(tmp_path, BASE), override) == f"command line: {override}: {key}: {expected}"
