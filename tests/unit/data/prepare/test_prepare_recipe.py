"""The recipe of a prepared corpus names its folder; a folder of another recipe or text is refused with what differs."""

from pathlib import Path

import pytest
from prepare_helpers import NUM_TRAIN, PAIRS, config_of, in_fixed_folder, mixture_of, read_split, write_text
from web_server import web_server

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import MANIFEST_NAME, Manifest
from dist_transformer.data.prepare.preparation import prepare, prepared_folder
from dist_transformer.data.prepare.progress import prepare_with_progress
from dist_transformer.data.recipe import not_held_out, recipe_without_corpora
from dist_transformer.data.sources import files, retries
from dist_transformer.errors import DataError, MachineError

pytestmark = pytest.mark.usefixtures("small_pieces")


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path)
    manifest = prepare(config)
    written = (prepared_folder(config) / MANIFEST_NAME).stat().st_mtime_ns
    stages: list[str] = []
    assert prepare(config, progress=lambda stage, done, total: stages.append(stage)) == manifest
    assert stages == []
    assert (prepared_folder(config) / MANIFEST_NAME).stat().st_mtime_ns == written


def test_a_new_setting_at_its_default_is_not_in_the_recipe():
    recipe = recipe_without_corpora(Config.model_validate({"data": {"train": {"demo": "train"}}}))
    filters = {"max_tokens": 256, "max_length_ratio": 9.0, "drop_identical": False, "bad_encoding": "raise"}
    model = {"type": "bpe", "vocabulary_size": 37_000, "shared": True, "character_coverage": 1.0}
    expected = {
        "filters": {**filters, "rules": {"held_out": 1}, "scores": {}},
        "tokenizer": {**model, "training_sentences": 2_000_000},
    }
    assert {key: recipe[key] for key in expected} == expected, (
        "every prepared corpus would be refused as of another recipe: leave a new setting out of data/recipe.py at its "
        "default, as inline_tags is"
    )


def test_the_default_folder_is_named_by_the_recipe(tmp_path: Path):
    write_text(tmp_path)
    folders = {prepared_folder(config_of(tmp_path)), prepared_folder(config_of(tmp_path, run={"seed": 4}))}
    folders.add(prepared_folder(config_of(tmp_path, tokenizer={"vocabulary_size": 248})))
    (tmp_path / "train.en").write_text("other\n")
    folders.add(prepared_folder(config_of(tmp_path)))
    assert len(folders) == 4


def test_a_folder_of_another_recipe_is_refused_with_what_differs(tmp_path: Path):
    write_text(tmp_path)
    prepare(config_of(tmp_path, data=in_fixed_folder(tmp_path)))
    other = config_of(
        tmp_path, data=in_fixed_folder(tmp_path, filters={"max_tokens": 77}), tokenizer={"vocabulary_size": 248}
    )
    with pytest.raises(DataError, match="prepared with other settings") as error:
        prepare(other)
    assert "filters.max_tokens: 256 in the folder, 77 now" in str(error.value)
    assert "tokenizer.vocabulary_size: 240 in the folder, 248 now" in str(error.value)
    assert "seed" not in str(error.value)


def test_files_of_another_text_are_named_and_a_run_with_checkpoints_is_given_a_way(tmp_path: Path):
    for number in range(12):
        write_text(tmp_path, PAIRS[:100])
        for side in ("en", "de"):
            (tmp_path / f"train.{side}").rename(tmp_path / f"part{number:02}.{side}")
    config = config_of(tmp_path, data=in_fixed_folder(tmp_path, train={"source": "part*.en", "target": "part*.de"}))
    prepare(config)
    for side in ("en", "de"):
        (tmp_path / f"part00.{side}").rename(tmp_path / f"part50.{side}")
    with (tmp_path / "part03.en").open("a") as file, (tmp_path / "part03.de").open("a") as other:
        print("one more", file=file)
        print("noch eins", file=other)
    with pytest.raises(DataError) as error:
        prepare(config)
    assert str(error.value).splitlines()[1:] == [
        "  data.train.files: 2 removed (part00.de, part00.en); 2 added (part50.de, part50.en); "
        "2 changed (part03.de, part03.en)",
        "Put it back; or set another data.prepared, or delete this one if no run needs it. To train a run further on it: "
        "another run.name, training.init_from=RUN, tokenizer.source_model=RUN/model/source.model (docs/finetuning.md).",
    ]
    for number in range(12):
        for side in ("en", "de"):
            (tmp_path / f"other{number:02}.{side}").write_bytes((tmp_path / f"part11.{side}").read_bytes())
    others = in_fixed_folder(tmp_path, train={"source": "other*.en", "target": "other*.de"})
    with pytest.raises(DataError, match=r"24 added \(other00\.de, .*, other04\.en\)"):
        prepare(config_of(tmp_path, data=others))
    corpora = mixture_of(news={"source": "other*.en", "target": "other*.de"})
    with pytest.raises(DataError, match=r"\n  data\.mixture\.corpora\.news\.files: 24 added"):
        prepare(config_of(tmp_path, data={**others, **corpora}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.de", "validation.en"])
def test_a_text_that_changes_while_it_is_prepared_is_refused_and_then_prepared_anew(
    tmp_path: Path, whole: Manifest, name: str
):
    write_text(tmp_path)
    config, text = config_of(tmp_path, data=in_fixed_folder(tmp_path)), (tmp_path / name).read_text(encoding="utf-8")

    def change(stage: str, done: int, total: int | None) -> None:
        if stage == "train" and done:
            (tmp_path / name).write_text(text.upper(), encoding="utf-8")

    with pytest.raises(DataError, match=rf"mine: its text changed while it was prepared:\n.*1 changed \({name}\)"):
        prepare(config, progress=change)
    assert not (tmp_path / "mine" / MANIFEST_NAME).exists()
    (tmp_path / name).write_text(text, encoding="utf-8")
    manifest = prepare(config)
    assert manifest.digest == whole.digest
    assert read_split(tmp_path / "mine", manifest, "train")[:9] == read_split(tmp_path / "mine", whole, "train")[:9]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_text_at_an_address_that_changes_while_it_is_prepared_is_refused(tmp_path: Path, ranges: bool):
    write_text(tmp_path)
    with web_server(tmp_path, ranges) as server:
        config = config_of(tmp_path, data=in_fixed_folder(tmp_path, root=server.address))

        def change(stage: str, done: int, total: int | None) -> None:
            if stage == "validation":
                write_text(tmp_path, PAIRS[:NUM_TRAIN][::-1])

        with pytest.raises(DataError, match=r"changed while it was prepared:\n.*2 changed \(train\.de, train\.en\)"):
            prepare(config, progress=change)


def test_a_preparation_ends_with_a_warning_if_the_server_of_its_text_does_not_answer_at_the_end(
    tmp_path: Path, whole: Manifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    write_text(tmp_path)
    with web_server(tmp_path) as server:
        data = in_fixed_folder(tmp_path, root=server.address)

        def fail(stage: str, done: int, total: int | None) -> None:
            server.failures = 1000 if stage == "report" else 0

        assert prepare(config_of(tmp_path, data=data), progress=fail).digest == whole.digest
    assert "whether its text has changed is not known" in caplog.text


def test_a_complete_folder_serves_without_the_text(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path, data=in_fixed_folder(tmp_path))
    manifest = prepare(config)
    (tmp_path / "train.en").unlink()
    assert prepare(config) == manifest
    with pytest.raises(DataError, match=r"seed: 3 in the folder, 9 now"):
        prepare(config_of(tmp_path, data=in_fixed_folder(tmp_path), run={"seed": 9}))


def test_a_complete_folder_serves_while_its_text_at_an_address_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    write_text(tmp_path)
    with web_server(tmp_path) as server:
        data = in_fixed_folder(tmp_path, root=server.address)
        config = config_of(tmp_path, data=data)
        manifest = prepare(config)
        (tmp_path / "train.en").unlink()
        assert prepare(config) == manifest
        assert "used as it is; whether its text has changed is not known" in caplog.text
        assert "train.en: no such file" in caplog.text
        caplog.clear()
        with pytest.raises(DataError, match=r"train\.en: no such file.*\n.*data\.prepared=FOLDER"):
            prepare(config_of(tmp_path, data={**data, "prepared": None}))
    assert prepare(config) == manifest
    assert "ClientConnectorError" in caplog.text
    assert not_held_out(config.data, manifest.recipe) == []
    with pytest.raises(DataError, match=r"seed: 3 in the folder, 9 now"):
        prepare(config_of(tmp_path, data=data, run={"seed": 9}))
    with pytest.raises(MachineError, match=r"ClientConnectorError.*\n.*data\.prepared=FOLDER"):
        prepare(config_of(tmp_path, data={**data, "prepared": None}))


def test_a_local_text_that_contradicts_the_settings_is_refused_also_under_a_complete_folder(tmp_path: Path):
    write_text(tmp_path)
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").rename(tmp_path / f"part0.{side}")
    config = config_of(tmp_path, data=in_fixed_folder(tmp_path, train={"source": "part*.en", "target": "part*.de"}))
    prepare(config)
    (tmp_path / "part1.en").write_text("more\n")
    with pytest.raises(DataError, match="2 files fit the source, but 1 the target"):
        prepare(config)


def test_each_process_looks_into_each_file_once_and_the_last_at_the_end_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_text(tmp_path)
    looked_into: list[str] = []
    fingerprint = files.file_fingerprint
    monkeypatch.setattr(files, "file_fingerprint", lambda file: (looked_into.append(file), fingerprint(file))[1])
    for data in ({}, in_fixed_folder(tmp_path)):
        config = config_of(tmp_path, data={**config_of(tmp_path).data.model_dump(), **data})
        results = []
        for rank in ("", "", "0", "1"):
            monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
            looked_into.clear()
            results.append(prepare_with_progress(config))
            assert len(looked_into) == (4 if results[1:] else 8)
        assert all(result == results[0] for result in results)
