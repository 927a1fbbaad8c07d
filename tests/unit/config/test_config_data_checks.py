"""What must hold between the settings of the data: corpora, mixtures, tags, patterns of files."""

import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.config.loading import load_config
from dist_transformer.config.paths import is_pattern, local_files, located
from dist_transformer.errors import ConfigError

MIXTURE = """\
run: {name: test}
data:
  mixture:
    corpora:
      news: {demo: train}
      web:
        demo: train
        tags: [<2de>, <web>]
    weights:
      news: 3
      web: 0.5
    schedule:
      - from_step: 10
        weights: {news: 1, web: 0}
      - from_step: 20
        weights: {news: 0, web: 1}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), list(overrides))
    return caught.value.problems


def one_problem_of(folder: Path, text: str, *overrides: str) -> str:
    [problem] = problems_of(folder, text, *overrides)
    return problem


def test_a_mixture_is_read_as_it_is_written(tmp_path):
    data = load_config(write(tmp_path, MIXTURE)).data
    assert list(data.training_corpora()) == ["news", "web"]
    assert data.training_corpora()["web"].tags == ("<2de>", "<web>")
    assert [stage.from_step for stage in data.mixture.schedule] == [10, 20]


# --------------------------------------------------------------------------------------------- train and mixture


def test_a_run_has_a_training_corpus_in_one_place(tmp_path):
    assert "run.yaml:2: data: no training corpus; give data.train, or data.mixture" in one_problem_of(
        tmp_path, "run: {name: test}\ndata: {}\n"
    )
    problem = one_problem_of(tmp_path, MIXTURE, "data.train.demo=train")
    assert "run.yaml:3: data.mixture: stands beside data.train" in problem


def test_all_problems_of_a_mixture_are_reported_at_once_each_with_its_line(tmp_path):
    text = """\
run: {name: test}
data:
  mixture:
    temperature: 5
    corpora:
      validation: {demo: train}
      a b: {demo: train}
      web:
        demo: train
        path: x.tsv
        tags: [<2 de>, '']
    weights:
      validation: -1
      wbe: 3
    schedule:
      - from_step: 10
        weights: {validation: 0, a b: 0, web: 0}
      - from_step: 10
        weights: {web: 1}
"""
    expected = [
        "run.yaml:6: data.mixture.corpora.validation: 'validation' is the name of data.validation",
        "run.yaml:7: data.mixture.corpora.a b: 'a b': expected letters, digits, '.', '_' and '-'",
        "run.yaml:8: data.mixture.corpora.web: expected one of source+target, path, hub, demo, plugin; got path and demo",
        "run.yaml:11: data.mixture.corpora.web.tags.0: '<2 de>': a tag is one word",
        "run.yaml:11: data.mixture.corpora.web.tags.1: '': a tag is one word",
        "run.yaml:13: data.mixture.weights.validation: expected 0 or more, got -1",
        "run.yaml:14: data.mixture.weights.wbe: no such corpus in data.mixture.corpora; there are validation, a b, web",
        "run.yaml:12: data.mixture.weights: no weight for a b, web; give one for each corpus",
        "run.yaml:4: data.mixture.temperature: 5.0 stands beside data.mixture.weights",
        "run.yaml:17: data.mixture.schedule.0.weights: all weights are 0",
        "run.yaml:18: data.mixture.schedule.1.from_step: 10 does not come after the 10 before it",
        "run.yaml:19: data.mixture.schedule.1.weights: no weight for validation, a b; give one for each corpus",
        "run.yaml:10: data.mixture.corpora.web.path: no such file: ./x.tsv (data.root is '.')",
    ]
    problems = problems_of(tmp_path, text)
    assert [line for line in expected if not any(line in problem for problem in problems)] == []
    assert len(problems) == len(expected)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("{weights: {news: 1, web: 1}}", "0: expected either from_step: STEP or after_epochs: {CORPUS: NUMBER}, of one corpus"),
        ("{from_step: 5, after_epochs: {news: 1}, weights: {news: 1, web: 1}}", "0: expected either from_step: STEP or"),
        ("{after_epochs: {news: 1, web: 1}, weights: {news: 1, web: 1}}", "0: expected either from_step: STEP or"),
        ("{after_epochs: {nws: 1}, weights: {news: 1, web: 1}}", "0.after_epochs.nws: no such corpus in data.mixture.corpora"),
        ("{after_epochs: {news: 0}, weights: {news: 1, web: 1}}", "0.after_epochs.news: 0.0 does not come after the 0 before"),
        ("{after_epochs: {web: 2}, weights: {news: 1, web: 1}}, {after_epochs: {web: 2}, weights: {news: 1, web: 1}}",
         "1.after_epochs.web: 2.0 does not come after the 2.0 before it; stages stand in their order"),
        ("{from_step: 9, weights: {news: 1, web: 0}}, {after_epochs: {web: 2}, weights: {news: 1, web: 1}}",
         "1.after_epochs.web: has weight 0 until then, so it would never come; give it more before"),
    ],
)  # fmt: skip
def test_a_stage_begins_at_a_step_or_after_epochs_of_a_corpus_that_come(tmp_path, schedule, expected):
    text = MIXTURE[: MIXTURE.index("    schedule")] + f"    schedule: [{schedule}]\n"
    assert f"data.mixture.schedule.{expected}" in one_problem_of(tmp_path, text)


def test_stages_by_steps_and_by_epochs_may_follow_each_other(tmp_path):
    stages = "{after_epochs: {web: 1.5}, weights: {news: 1, web: 1}}, {from_step: 9, weights: {news: 1, web: 0}}"
    text = MIXTURE[: MIXTURE.index("    schedule")] + f"    schedule: [{stages}]\n"
    mixture = load_config(write(tmp_path, text)).data.mixture
    assert [stage.after_epochs for stage in mixture.schedule] == [{"web": 1.5}, None]


def test_a_temperature_alone_and_weights_alone_are_taken(tmp_path):
    text = MIXTURE[: MIXTURE.index("    weights")]
    assert load_config(write(tmp_path, text), ["data.mixture.temperature=5"]).data.mixture.temperature == 5.0
    assert load_config(write(tmp_path, text)).data.mixture.weights is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tags:", "tgas:", "run.yaml:8: data.mixture.corpora.web.tgas: no such key; did you mean `tags`?"),
        ("web: 0.5", "web: x", "run.yaml:11: data.mixture.weights.web: expected a number; got 'x' (str)"),
        ("from_step: 20", "step: 20", "run.yaml:15: data.mixture.schedule.1.step: no such key; did you mean `from_step`"),
        ("{news: 1, web: 0}", "half", "run.yaml:14: data.mixture.schedule.0.weights: expected `key: value` lines below it"),
        ("{demo: train}", "demo", "run.yaml:5: data.mixture.corpora.news: expected `key: value` lines below it"),
        ("[<2de>, <web>]", "<2de>", "run.yaml:8: data.mixture.corpora.web.tags: expected a list; got '<2de>' (str)"),
        ("schedule:", "scedule:", "run.yaml:12: data.mixture.scedule: no such key; did you mean `schedule`?"),
    ],
)  # fmt: skip
def test_a_mistake_inside_a_mixture_is_named_by_its_whole_path(tmp_path, old, new, expected):
    assert any(expected in problem for problem in problems_of(tmp_path, MIXTURE.replace(old, new, 1)))


# ------------------------------------------------------------------------------------------------ corpora and ends


@pytest.mark.parametrize(
    ("corpus", "expected"),
    [
        ("{source: a, target: b, columns: [en, de]}", "data.train.columns: aligned text has no columns; remove it"),
        ("{demo: train, columns: [en, de]}", "data.train.columns: the demonstration corpus has no columns"),
        ("{demo: train, subset: de-en}", "data.train.subset: is for a dataset of the Hub (`hub`); remove it"),
        ("{demo: train, revision: main}", "data.train.revision: is for a dataset of the Hub"),
        ("{demo: train, tags: ['<2de> ']}", "data.train.tags.0: '<2de> ': a tag is one word, such as <2de>"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(tmp_path, corpus, expected):
    text = f"run: {{name: test}}\ndata: {{train: {corpus}}}\n"
    assert any(expected in problem for problem in problems_of(tmp_path, text))


def test_sampling_needs_tokenization_on_the_fly(tmp_path):
    text = "run: {name: test}\ndata: {train: {demo: train}}\n"
    assert "tokenizer.sampling: 0.1 needs data.on_the_fly: true" in one_problem_of(
        tmp_path, text, "tokenizer.sampling=0.1"
    )
    assert load_config(write(tmp_path, text), ["tokenizer.sampling=0.1", "data.on_the_fly=true"])


def test_modifiers_need_tokenization_on_the_fly_and_have_names_and_shares(tmp_path):
    text = "run: {name: test}\ndata: {train: {demo: train}}\n"
    problem = one_problem_of(tmp_path, text, "data.modifiers.typos=0.1")
    assert (
        "data.modifiers.typos: 0.1 needs data.on_the_fly: true (`prepare` tokenizes only once); set it, or" in problem
    )
    on_the_fly = "data.on_the_fly=true"
    problem = one_problem_of(tmp_path, text, "data.modifiers={uper_case: 0.1}", on_the_fly)
    assert (
        "data.modifiers.uper_case: no such modifier; there are no_final_punctuation, upper_case, title_case" in problem
    )
    problem = one_problem_of(tmp_path, text, "data.modifiers.noise=1.5", on_the_fly)
    assert "data.modifiers.noise: expected a share of the rows, 0 to 1; got 1.5" in problem
    assert load_config(write(tmp_path, text), ["data.modifiers={noise: 1, typos: 0}", on_the_fly])
    assert load_config(write(tmp_path, text), ["data.modifiers={noise: 0}"])


@pytest.mark.parametrize("end", ["max_steps=5000", "max_epochs=1"])
def test_any_one_end_of_a_run_is_enough(tmp_path, end):
    text = "run: {name: test}\ndata: {train: {demo: train}}\n"
    assert load_config(write(tmp_path, text), ["training.max_steps=null", f"training.{end}"])


# ----------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("address", ["s3://bucket/train-*.tsv", "https://host/train.jsonl.gz", "memory://a/b.parquet"])
def test_addresses_are_left_to_those_who_read_them(tmp_path, address):
    text = f"run: {{name: test}}\ndata: {{train: {{path: '{address}'}}}}\n"
    assert load_config(write(tmp_path, text)).data.train.path == address
    relative = "run: {name: test}\ndata: {root: 's3://bucket/text', train: {path: train.tsv}}\n"
    assert load_config(write(tmp_path, relative))


@pytest.mark.parametrize("address", ["sftp://me:pa55word@host/a.tsv", "https://host/a.tsv?token=pa55word"])
def test_a_password_in_the_address_of_a_corpus_is_refused_and_not_printed(tmp_path, address):
    text = "run: {name: test}\ndata: {train: {path: a.tsv}}\n"
    for override in (f"data.train.path={address}", f"data.root={address}"):
        problem = one_problem_of(tmp_path, text, override)
        assert "holds a password or token, and would be written into the run folder" in problem
        assert "55word" not in problem
    assert load_config(write(tmp_path, text), ["data.train.path=sftp://me@host/a.tsv"])


def test_patterns_and_file_addresses_are_looked_for_on_the_disk(tmp_path):
    text = "run: {{name: test}}\ndata:\n  root: {root}\n  train: {{source: 'a*.en', target: 'a*.de'}}\n"
    for name in ("a1.en", "a2.en", "a1.de"):
        (tmp_path / name).touch()
    problem = one_problem_of(tmp_path, text.format(root=tmp_path))
    assert "run.yaml:4: data.train.target: 1 files fit, but 2 fit data.train.source; file n of one side" in problem
    (tmp_path / "a2.de").touch()
    for root in (str(tmp_path), f"file://{tmp_path}"):
        assert load_config(write(tmp_path, text.format(root=root)))
    for key in ("source", "target"):
        problem = one_problem_of(tmp_path, text.format(root=tmp_path), f"data.train.{key}=b*.txt")
        assert f"data.train.{key}: no file fits {tmp_path}/b*.txt (data.root is '{tmp_path}')" in problem


def test_files_of_a_pattern_come_in_the_order_of_their_names_and_never_from_another_folder(tmp_path):
    root = tmp_path / "a[1]*"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "a1x").mkdir()
    for name in ("b.tsv", "a.tsv", "10.tsv", "2.tsv", "sub/c.tsv", "d[1].tsv", "d1.tsv"):
        (root / name).touch()
    (tmp_path / "a1x" / "e.tsv").touch()
    assert local_files(str(root), "[ab].tsv") == [f"{root}/a.tsv", f"{root}/b.tsv"]
    assert local_files(str(root), "?*.tsv")[:2] == [f"{root}/10.tsv", f"{root}/2.tsv"]
    assert local_files(str(root), "**/c.tsv") == [f"{root}/sub/c.tsv"]
    assert local_files(str(root), "**/**/c.tsv") == [f"{root}/sub/c.tsv"]  # once, though it fits in two ways
    assert local_files(str(root), "d[1].tsv") == [f"{root}/d[1].tsv"]  # is there as it is written
    assert local_files(str(root), "s*") == []  # a folder is no file


@pytest.mark.parametrize(
    ("root", "name", "expected"),
    [
        (".", "a/b.tsv", "./a/b.tsv"),
        ("/data", "/other/b.tsv", "/other/b.tsv"),
        ("/data", "s3://bucket/b.tsv", "s3://bucket/b.tsv"),
        ("s3://bucket/text/", "b.tsv", "s3://bucket/text/b.tsv"),
        ("s3://bucket/text", "/other/b.tsv", "/other/b.tsv"),
        ("s3://bucket", "file:///other/b.tsv", "/other/b.tsv"),
        ("file:///data", "b.tsv", "/data/b.tsv"),
        ("/data", "zip://b.tsv::a.zip", "zip://b.tsv::/data/a.zip"),
        ("/data", "zip://b.tsv::simplecache::/other/a.zip", "zip://b.tsv::simplecache::/other/a.zip"),
        ("s3://bucket", "zip://b.tsv::a.zip", "zip://b.tsv::s3://bucket/a.zip"),
        ("/data", "simplecache::file:///other/b.tsv", "simplecache::file:///other/b.tsv"),
    ],
)
def test_a_name_is_found_from_its_root(root, name, expected):
    assert located(root, name) == expected


def test_the_question_mark_of_a_web_address_is_no_pattern():
    assert not is_pattern("https://host/a.tsv?download=1")
    assert is_pattern("s3://bucket/a?.tsv")


def test_checking_a_configuration_with_addresses_imports_nothing_heavy(tmp_path):
    path = write(tmp_path, "run: {name: test}\ndata: {train: {path: 's3://bucket/*.parquet'}}\n")
    code = (
        "import sys, pathlib; from dist_transformer.config.loading import load_config; "
        f"load_config(pathlib.Path({str(path)!r})); "
        "print(sorted({'fsspec', 'numpy', 'pyarrow', 'torch', 'datasets', 'aiohttp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --------------------------------------------------------------------------------------------------------- filters

FILTERED = """\
run: {name: test}
data:
  train:
    demo: train
  filters:
    max_tokens: 64
    rules:
      letters: 0.5
"""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "rules.leters=0.5",
            "data.filters.rules.leters: no such rule; there are markup, letters, digits, punctuation, near_dup",
        ),
        ("rules.letters=50", "letters: expected a share from 0 to 1, true (0.5) or false; got 50"),
        ("rules.letters=half", "letters: expected a share from 0 to 1, true (0.5) or false; got 'half'"),
        ("rules.letters=null", "letters: expected a share from 0 to 1, true (0.5) or false; got None"),
        ("rules.numbers=2.5", "numbers: expected a whole number from 1, true (3) or false; got 2.5"),
        ("rules.repeated=1", "repeated: expected a whole number from 2, true (5) or false; got 1"),
        ("rules=[letters]", "data.filters.rules: expected `key: value` lines below it; got ['letters'] (list)"),
        ("scores={a: high}", "data.filters.scores.a: expected a number; got 'high' (str)"),
    ],
)
def test_a_rule_that_is_none_or_a_threshold_that_is_none_is_named(tmp_path, override, expected):
    assert expected in one_problem_of(tmp_path, FILTERED, f"data.filters.{override}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.filters.rules.leters=0.5", "data.train.filters.rules.leters: no such rule; there are markup"),
        (
            "train.filters.leters=0.5",
            "data.train.filters.leters: Extra inputs are not permitted; got 0.5; it has the keys max_t",
        ),
        ("train.filters.max_tokens=many", "data.train.filters.max_tokens: Input should be a valid integer; got 'many'"),
        (
            "train.filters.max_tokens=65",
            "data.train.filters.max_tokens: 65 is above data.filters.max_tokens 64, which holds",
        ),
        (
            "train.filters.max_length_ratio=10",
            "data.train.filters.max_length_ratio: 10 is above data.filters.max_length_rat",
        ),
        (
            "train.filters.plugin=a.py:b",
            "data.train.filters.plugin: is one for all corpora; give it as data.filters.plugin",
        ),
        (
            "filters.scores={a: 1}",
            "data.train.filters.scores: are columns of a table, or files beside text files; this corpus",
        ),
        (
            "validation={demo: test, filters: {max_tokens: 9}}",
            "data.validation.filters: is for training corpora, whose pairs",
        ),
    ],
)
def test_what_a_corpus_cannot_have_as_filters_of_its_own_is_named(tmp_path, override, expected):
    assert expected in one_problem_of(tmp_path, FILTERED, f"data.{override}")


def test_two_equal_languages_cannot_be_told_apart(tmp_path):
    overrides = ["data.source_language=de_AT", "data.target_language=de-CH", "data.filters.rules.language=20"]
    problem = one_problem_of(tmp_path, FILTERED, *overrides)
    assert "data.filters.rules.language: compares de_AT with de-CH, which are one language; set it to false" in problem
    assert load_config(write(tmp_path, FILTERED), [*overrides[:2], "data.filters.rules.language=false"])
    own = one_problem_of(tmp_path, FILTERED, "data.train.languages=[fr, fr_CA]", "data.filters.rules.lingua=true")
    assert "data.train.filters.rules.lingua: compares fr with fr_CA" in own


def test_a_missing_file_of_scores_is_told_as_one_of_text(tmp_path):
    for name in ("a", "b", "there"):
        (tmp_path / name).write_text("1\n")
    files = [
        f"data.root={tmp_path}",
        "data.train={source: a, target: b}",
        "data.filters.scores={x.scores: 0.5, there: 1}",
    ]
    problem = one_problem_of(tmp_path, FILTERED.replace("    demo: train\n", "    {}\n"), *files)
    assert (
        f"data.train.filters.scores.x.scores: no such file: {tmp_path}/x.scores (data.root is {str(tmp_path)!r})"
        in problem
    )
    columns = ["data.train={path: t.tsv}", "data.filters.scores={'2': 0.5}"]
    assert "data.train.path: no such file" in one_problem_of(
        tmp_path, FILTERED.replace("    demo: train\n", "    {}\n"), *columns
    )


def test_a_corpus_without_languages_of_its_own_is_dumped_as_before_they_were_a_setting(tmp_path):
    path = write(tmp_path, FILTERED)
    assert "languages" not in load_config(path, []).data.model_dump()["train"]
    assert load_config(path, ["data.train.languages=[de, en]"]).data.model_dump()["train"]["languages"] == ("de", "en")


def test_filters_of_a_corpus_are_merged_rule_by_rule(tmp_path):
    own = "data.train.filters={rules: {digits: true, letters: false, held_out: 9}, max_tokens: 32}"
    data = load_config(write(tmp_path, FILTERED), [own]).data
    filters = data.filters_of(data.train)
    assert (filters.max_tokens, filters.thresholds()) == (32, {"held_out": 9, "digits": 0.4})
    assert data.filters.thresholds() == {"held_out": 1, "letters": 0.5}
    assert data.filters_of(data.train.model_copy(update={"filters": {}})) is data.filters
