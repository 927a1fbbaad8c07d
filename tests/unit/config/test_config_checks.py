"""What must hold between settings and on disk, and what must never be written or printed."""

import os
from pathlib import Path

import pytest
from config_problems import one_problem_of, problems_of

from dist_transformer.config.checks import RESERVED_NAMES
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError, UserError

BASE = "run: {name: test}\ndata:\n  train: {demo: train}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def test_the_defaults_hold_together(path):
    assert load_config(path).run.name == "test"


# ------------------------------------------------------------------------------------------------ between settings


def test_more_checkpoints_averaged_than_kept_are_refused(path):
    problem = one_problem_of(path, "checkpoints.keep_last=3", "checkpoints.average_last=4")
    assert "checkpoints.average_last: 4 is above checkpoints.keep_last 3" in problem
    assert load_config(path, ["checkpoints.keep_last=4", "checkpoints.average_last=4"])
    others = ["checkpoints.final_model=ema", "training.ema_decay=0.9"]  # nothing of the last ones is averaged
    assert load_config(path, ["checkpoints.keep_last=3", "checkpoints.average_last=4", *others])


@pytest.mark.parametrize("name", ["a/b", "..", ".", "-x", "a b", "ü", "a\nb", "x/"])
def test_a_run_name_that_is_no_plain_folder_name_is_refused(path, name):
    assert f"run.name: {name!r}: expected letters, digits, '.', '_' and '-'" in one_problem_of(path, f"run.name={name}")


@pytest.mark.parametrize("key", ["run.root", "data.prepared"])
def test_a_folder_whose_path_is_not_utf_8_is_refused_named_or_as_the_current_one(path, key, tmp_path, monkeypatch):
    """The libraries that write a corpus take no such path."""
    problem = "expected a path in UTF-8, got other bytes in it: rename it"
    folder = tmp_path / os.fsdecode(b"b\xe4d")
    assert f"{key}: {str(folder)!r}: {problem}" in one_problem_of(path, f"{key}={folder}")
    folder.mkdir()
    monkeypatch.chdir(folder)
    others = {"run.root": tmp_path, "data.prepared": tmp_path} | {key: "below"}
    given = [f"{name}={value}" for name, value in others.items()]
    assert f"{key}: {str(folder / 'below')!r}: {problem}" in one_problem_of(path.absolute(), *given)


@pytest.mark.parametrize("name", RESERVED_NAMES)
def test_a_run_cannot_take_the_name_of_what_all_runs_share(path, name):
    assert f"run.name: '{name}': is kept in run.root for what all runs share" in one_problem_of(
        path, f"run.name={name}"
    )


VALIDATED = "data.validation={demo: validation}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["checkpoints.final_model=ema"], "checkpoints.final_model: ema needs training.ema_decay"),
        (["checkpoints.final_model=average_best"], "checkpoints.final_model: average_best needs checkpoints.keep_best"),
        (
            ["training.ema_decay=0.0001"],
            "training.ema_decay: 0.0001 is the share of the average that stays; other programs give that of the new weights: "
            "write 1 - 0.0001, which is 0.9999",
        ),
        (["checkpoints.keep_best=2"], "checkpoints.keep_best: needs data.validation"),
        (
            ["tokenizer.character_coverage=0.95"],
            "tokenizer.character_coverage: 0.95, but sentencepiece takes 0.98 to 1",
        ),
        (
            [VALIDATED, "checkpoints.keep_best=2", "checkpoints.every_steps=300", "validation.every_steps=200"],
            "checkpoints.keep_best: checkpoints.every_steps 300 is no multiple of validation.every_steps 200: a checkpoint is "
            "judged by the validation at its step; give a validation.every_steps that divides it",
        ),
    ],
)
def test_a_final_model_of_what_is_not_kept_or_not_known_is_refused(path, overrides, said):
    assert said in one_problem_of(path, *overrides)


MORE = "data.more_validation={news: {demo: test}}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["validation.metric=blue"], "validation.metric: 'blue' is no measure; expected one of loss, nll, perplexity"),
        (["validation.metric=newz/bleu", MORE], "validation.metric: 'newz' is no corpus of data.more_validation"),
        (["validation.metric=newz/bleu"], "validation.metric: 'newz' is no corpus of data.more_validation; there are: none"),
        (["validation.metric=news/accuracy", MORE], "validation.metric: 'accuracy' is no measure"),
        (["validation.metric=bleu", "validation.translate=false"], "bleu needs validation.translate: true"),
        (["validation.metric=news/chrf", MORE, "validation.translate=false"], "chrf needs validation.translate: true"),
        (["validation.metric=plugin"], "validation.metric: plugin needs validation.plugin"),
        (["validation.plugin=json:load", "validation.translate=false"], "validation.plugin: scores translations"),
        (["validation.patience=3"], "validation.patience: is about loss of data.validation, which is not given"),
        (["validation.target=30", "validation.metric=bleu"], "validation.target: is about bleu of data.validation"),
        (["checkpoints.keep_best=1", MORE], "checkpoints.keep_best: needs data.validation: the best are those of the best loss"),
        (["data.more_validation={test: {demo: test}}"], "data.more_validation.test: 'test' is the name of data.test"),
        (["data.more_validation={train: {demo: test}}"], "data.more_validation.train: 'train' is the name of data.train"),
        (["data.more_validation={a/b: {demo: test}}"], "data.more_validation.a/b: 'a/b': expected letters, digits"),
        (["data.more_validation={..: {demo: test}}"], "'..': expected letters, digits, '.', '_' and '-', not dots alone"),
        (["tracking.register_as=a", "tracking.alias=a b"], "tracking.alias: 'a b': expected letters, digits"),
        (["data.more_validation={news: {path: no.tsv}}"], "data.more_validation.news.path: no such file: ./no.tsv"),
        (["data.more_validation={news: {}}"], "data.more_validation.news: expected one of source+target, path, hub, demo"),
    ],
)  # fmt: skip
def test_a_validation_that_cannot_be_measured_is_refused(path, overrides, said):
    assert said in one_problem_of(path, *overrides)


def test_what_is_measured_can_decide_about_the_end_and_the_best(path):
    every = ["validation.patience=3", "validation.target=1", "checkpoints.keep_best=1", MORE]
    for metric in ("news/token_accuracy", "news/bleu", "news/loss"):
        assert load_config(path, [*every, f"validation.metric={metric}"]).validation.metric == metric
    for metric in ("perplexity", "chrf", "plugin"):
        given = [VALIDATED, *every, "validation.plugin=json:load", f"validation.metric={metric}"]
        assert load_config(path, given).validation.metric == metric


def test_every_final_model_can_be_had(path):
    best = [VALIDATED, "checkpoints.keep_best=2", "checkpoints.every_steps=400", "validation.every_steps=200"]
    for name in ("average_last", "average_best", "ema"):
        given = [*best, "training.ema_decay=0.99", f"checkpoints.final_model={name}"]
        assert load_config(path, given).checkpoints.final_model == name


def test_checkpoints_to_keep_that_are_never_written_are_refused(path):
    said = "checkpoints.keep_every_steps: 700 is no multiple of checkpoints.every_steps 200"
    assert said in one_problem_of(path, "checkpoints.keep_every_steps=700", "checkpoints.every_steps=200")
    assert load_config(path, ["checkpoints.keep_every_steps=800", "checkpoints.every_steps=200"])


def test_fp32_cannot_be_switched_to_bf16_but_a_run_that_has_been_may_say_so(path):
    policy = "divergence.policy=switch_to_bf16"
    assert "switch_to_bf16 is for training.precision: fp16" in one_problem_of(path, policy, "training.precision=fp32")
    for precision in ("fp16", "bf16"):
        assert load_config(path, [policy, f"training.precision={precision}"])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("precision=bf16", "training.precision: fp32, got bf16"),
        ("zero_stage=3", "training.zero_stage: 0 or 1 or 2, got 3"),
        ("offload=optimizer", "training.offload: none, got optimizer"),
        ("communication_dtype=bf16", "training.communication_dtype: auto or fp32, got bf16"),
        ("lanes_per_pass=2", "training.lanes_per_pass: 1, got 2"),
    ],
)
def test_same_bits_cannot_be_had_with_what_depends_on_the_layout(path, other, said):
    given = ["training.same_bits=true", "training.precision=fp32"]
    assert load_config(path, given)
    assert f"training.same_bits: true needs {said}" in one_problem_of(path, *given, f"training.{other}")


@pytest.mark.parametrize(("offload", "stage"), [("none", 0), ("optimizer", 1), ("optimizer_and_parameters", 3)])
def test_what_the_stage_does_not_shard_cannot_be_offloaded(path, offload, stage):
    given = ["training.precision=fp32", f"training.offload={offload}"]
    for lower in range(stage):
        said = f"training.offload: {offload} needs training.zero_stage {stage} or above, got {lower}"
        assert said in one_problem_of(path, *given, f"training.zero_stage={lower}")
    assert load_config(path, [*given, f"training.zero_stage={stage}"])


@pytest.mark.parametrize("given", [("zero_stage=3",), ("zero_stage=2", "offload=optimizer")])
def test_where_no_rank_can_compute_a_micro_batch_alone_none_is_audited(path, given):
    given = [f"training.{setting}" for setting in given]
    assert "training.audit_share: needs training.zero_stage 0, 1 or 2" in one_problem_of(
        path, *given, "training.audit_share=0.03"
    )
    assert load_config(path, given)
    assert load_config(path, ["training.audit_share=0.03"])


def test_a_size_that_is_still_to_be_found_is_no_number_yet(path):
    assert load_config(path, ["data.max_tokens=512", "data.filters.max_tokens=96"]).data.token_budget() == 512
    with pytest.raises(UserError, match=r"data\.max_tokens is auto.*Give a number here"):
        load_config(path, ["data.max_tokens=auto"]).data.token_budget()


# --------------------------------------------------------------------------------------------------------- on disk


def test_a_missing_tokenizer_model_is_named_with_the_folder_it_was_looked_for_in(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = one_problem_of(path, "tokenizer.source_model=sub/a.model", "data.root=/elsewhere")
    assert f"tokenizer.source_model: no such file: {tmp_path}/sub/a.model; expected a sentencepiece model" in problem
    (tmp_path / "sub").mkdir()
    problem = one_problem_of(path, "tokenizer.source_model=sub")
    assert f"tokenizer.source_model: is a folder: {tmp_path}/sub; expected a sentencepiece model: RUN/model/" in problem
    separate = ["tokenizer.shared=false", "model.shared_embeddings=false", "model.tied_output=false"]
    (tmp_path / "a.model").touch()
    models = ["tokenizer.source_model=a.model", "tokenizer.target_model=b.model"]
    assert "tokenizer.target_model: no such file" in one_problem_of(path, *separate, *models)
    (tmp_path / "b.model").touch()
    assert load_config(path, [*separate, *models])


def test_models_are_not_looked_for_where_files_are_not_to_be_checked(path):
    assert load_config(path, ["tokenizer.source_model=none.model"], check_files=False)


def test_a_home_folder_and_a_name_too_long_for_the_disk_are_looked_for_like_any_other(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.tsv").touch()
    assert load_config(path, ["data.train={path: ~/text.tsv, demo: null}"])
    for name in ("a" * 5000, "~no-such-user/text.tsv"):
        assert "data.train.path: no such file" in one_problem_of(path, f"data.train={{path: {name}, demo: null}}")


# --------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize("name", ["HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "wandb_api_key"])
@pytest.mark.parametrize("override", ["slurm.environment.{}=hunter2", "slurm.environment={{{}: hunter2}}"])
def test_a_secret_in_the_environment_is_refused_and_not_printed(path, override, name):
    problem = one_problem_of(path, override.format(name))
    assert f"slurm.environment.{name}: looks like a secret" in problem
    assert "`export` it in the shell that calls train or submit" in problem
    assert "hunter2" not in problem


def test_a_secret_in_a_file_is_refused_with_its_line(path):
    path.write_text(f"{BASE}slurm:\n  environment:\n    A: b\n    HF_TOKEN: hunter2\n", encoding="utf-8")
    problem = one_problem_of(path)
    assert "run.yaml:7: slurm.environment.HF_TOKEN: looks like a secret" in problem
    assert "hunter2" not in problem


def test_a_secret_of_a_wrong_kind_is_not_printed_either(path):
    for override in ("slurm.environment={HF_TOKEN: [hunter2]}", "slurm.environment=HF_TOKEN=hunter2"):
        assert "hunter2" not in "\n".join(problems_of(path, override))


def test_an_alias_needs_the_name_of_a_registered_model(path):
    assert "tracking.register_as" in one_problem_of(path, "tracking.alias=champion")
    assert load_config(path, ["tracking.alias=champion", "tracking.register_as=en-de"]).tracking.alias == "champion"


@pytest.mark.parametrize("alias", ["latest", "Latest", "v3"])
def test_an_alias_that_mlflow_keeps_for_itself_is_refused(path, alias):
    assert "keeps for itself" in one_problem_of(path, f"tracking.alias={alias}", "tracking.register_as=en-de")


@pytest.mark.parametrize("address", ["foo://bar", "login01:5000", "mlflow.db", "http://"])
def test_a_tracking_address_that_mlflow_cannot_know_is_refused(path, address):
    assert "tracking.uri: expected http://HOST:PORT" in one_problem_of(path, f"tracking.uri={address}")


@pytest.mark.parametrize(
    "address", ["http://n1:5000", "https://mlflow.example.org/team", "sqlite:////runs/mlflow.db", "databricks",
                "postgresql+psycopg2://db/mlflow"],
)  # fmt: skip
def test_addresses_that_mlflow_knows_are_taken(path, address):
    assert load_config(path, [f"tracking.uri={address}"]).tracking.uri == address


@pytest.mark.parametrize("name", ["en/de", "en:de", "it's"])
def test_a_name_that_the_registry_would_refuse_is_refused_at_once(path, name):
    assert "tracking.register_as" in one_problem_of(path, f'tracking.register_as="{name}"')


ADDRESSES = [
    "http://someone:pa55word@127.0.0.1:9",
    "http://pa55word@127.0.0.1:9",
    "https://someone:pa@55word@host/path",
    "postgresql+psycopg2://someone:pa/55word@db/mlflow",
    "postgresql://db/mlflow?user=someone&password=pa55word",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_credentials_in_the_tracking_address_are_refused_and_not_printed(path, address):
    overrides = [[f"tracking.uri={address}"], [f"tracking={{uri: '{address}'}}"]]
    path.with_name("file.yaml").write_text(f"{BASE}tracking:\n  uri: '{address}'\n", encoding="utf-8")
    for problem in (
        *(one_problem_of(path, *given) for given in overrides),
        one_problem_of(path.with_name("file.yaml")),
    ):
        assert "tracking.uri: holds a user or password" in problem
        assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in problem
        assert "a tracking server in front" in problem
        assert "55word" not in problem


@pytest.mark.parametrize(
    "override",
    [
        "tracking={{uri: '{}', enabled: perhaps}}",  # another problem at the same place
        "tracking.uri=['{}']",
        "tracking.uri:{}",
        "tracking.url={}",
        "data.train={{path: '{}'}}",
        "run.name={}",
    ],
)
@pytest.mark.parametrize("address", ADDRESSES)
def test_no_message_about_another_mistake_repeats_a_password(path, override, address):
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override.format(address)])
    assert "55word" not in str(caught.value)


@pytest.mark.parametrize("address", ["http://127.0.0.1:5000", "sqlite:////a@b/mlflow.db", "https://host:5000/team@x"])
def test_an_address_without_credentials_is_taken(path, address):
    assert load_config(path, [f"tracking.uri={address}"]).tracking.uri == address


def test_a_pattern_that_names_no_parameter_is_refused_before_there_is_a_model(path):
    problem = one_problem_of(path, "training.freeze=['*embedding*', 'encoder.*']")
    assert "training.freeze: 'encoder.*' names no parameter. Parameters are encoder_layers." in problem
    path.write_text(f"{BASE}training:\n  freeze: [encoder_layers.9.*]\n", encoding="utf-8")
    assert "run.yaml:5: training.freeze: 'encoder_layers.9.*' names no parameter" in one_problem_of(path)
    assert load_config(path, ["model.num_encoder_layers=10"])
    assert load_config(path, ["training.freeze=['*.gate.weight']", "model.activation=swiglu"])


def test_freezing_all_parameters_is_refused_whatever_names_a_shared_one_has(path):
    layers = "'encoder_layers.*', 'decoder_layers.*'"
    for all_of_them in ("['*']", f"[{layers}, 'target_embedding.weight']", f"[{layers}, 'source*']"):
        assert "so that there is nothing to train" in one_problem_of(path, f"training.freeze={all_of_them}")
    assert load_config(path, [f"training.freeze=[{layers}]"])
    assert load_config(path, [f"training.freeze=[{layers}, 'source*']", "model.shared_embeddings=false"])


def test_every_setting_is_described():
    schema = Config.model_json_schema()["$defs"]
    assert [
        f"{name}.{key}"
        for name, section in schema.items()
        for key, value in section["properties"].items()
        if not value.get("description")
    ] == []


# ------------------------------------------------------------------------------------------------ sizes and positions


def test_heads_that_do_not_divide_the_width_need_both_sizes(path):
    for overrides in ([], ["model.key_size=16"], ["model.value_size=16"]):
        problem = one_problem_of(path, "model.num_heads=7", *overrides)
        assert "7 heads do not divide d_model 512; take another number, or give model.key_size and" in problem
    assert load_config(path, ["model.num_heads=7", "model.key_size=16", "model.value_size=16"])


def test_learned_positions_and_their_number_come_together(path):
    assert "got none with model.positions learned" in one_problem_of(path, "model.positions=learned")
    assert "got 512 with model.positions sinusoidal" in one_problem_of(path, "model.max_positions=512")


def test_sentences_longer_than_the_learned_positions_are_refused(path):
    learned = ["model.positions=learned", "data.filters.max_tokens=100"]
    problem = one_problem_of(path, *learned, "model.max_positions=99")
    assert "model.max_positions: 99 learned positions cannot take a sentence of data.filters.max_tokens 100" in problem
    assert load_config(path, [*learned, "model.max_positions=100"])


def test_rotary_positions_need_keys_of_an_even_size(path):
    problem = one_problem_of(path, "model.positions=rotary", "model.key_size=5")
    assert "rotary turns pairs: heads need keys of an even size, got 5; give an even model.key_size" in problem
    assert load_config(path, ["model.positions=rotary", "model.key_size=6"])


def test_an_odd_width_needs_learned_positions(path):
    odd = ["model.d_model=63", "model.key_size=8", "model.value_size=8"]
    assert "sinusoidal positions (3.5) need an even width, got 63" in one_problem_of(path, *odd)
    assert load_config(path, [*odd, "model.positions=learned", "model.max_positions=256"])
