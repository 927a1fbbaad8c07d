"""Training, loading and refusing sentencepiece models."""

import io
import resource
from collections.abc import Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import pytest
import sentencepiece

from dist_transformer import files
from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer import tokenizer as tokenizer_module
from dist_transformer.data.tokenizer.model_file import read_pieces_file
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer, training_parts, with_sampling_seed
from dist_transformer.errors import DataError, MachineError

PAIRS = list(islice(demo_pairs("test"), 600))
SENTENCES = [side for pair in PAIRS for side in pair]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "source.model"
    train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=300), path)
    return path


def foreign_model(path: Path, **options: int) -> Path:
    """A model trained without our conventions."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=writer, vocab_size=301, minloglevel=2, **options
    )
    path.write_bytes(writer.getvalue())
    return path


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("training_sentences", [10_000, 500])
def test_training_twice_gives_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, training_sentences: int
):
    monkeypatch.setattr(tokenizer_module, "TRAINING_SENTENCES", training_sentences)
    settings = TokenizerConfig(type=kind, vocabulary_size=300)
    for name in ("first", "second"):
        train_tokenizer(iter(SENTENCES), settings, tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_text_comes_back_from_its_ids(model: Path):
    tokenizer = Tokenizer.load(model)
    for (source, target), source_ids, target_ids in zip(
        PAIRS,
        tokenizer.encode_source([source for source, _ in PAIRS]),
        tokenizer.encode_target([target for _, target in PAIRS], num_threads=2),
        strict=True,
    ):
        assert source_ids[-1] == target_ids[-1] == tokenizer.eos_id
        assert tokenizer.bos_id not in source_ids + target_ids
        assert tokenizer.decode_source(source_ids) == source
        assert tokenizer.decode_target(target_ids) == target


def test_decoding_leaves_out_padding_begin_end_and_ids_beyond_the_pieces(model: Path):
    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode_target(["sieben Uhr"])[0]
    beyond = tokenizer.target_vocabulary + 3
    assert tokenizer.decode_target([tokenizer.bos_id, *ids, tokenizer.pad_id, beyond]) == "sieben Uhr"


def test_the_vocabulary_is_rounded_up_to_a_multiple_of_eight(tmp_path: Path):
    train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=297), tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    assert tokenizer.source_vocabulary == tokenizer.target_vocabulary == 304
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)


def test_long_sentences_are_cut_between_words_and_those_that_are_always_dropped_left_out():
    words, ideographs = " ".join(["двенадцать", "слов\n"] * 400), "字" * 3000
    for text in (words, ideographs):
        parts = training_parts(text, 256)
        assert "".join(parts) == text
        assert max(map(len, parts)) <= 512
    assert {word for part in training_parts(words, 256) for word in part.split()} == {"двенадцать", "слов"}
    assert training_parts("x" * 4192, 1) == ["x" * 4192]
    assert training_parts("x" * 4193, 65) == []


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_every_character_of_a_long_line_has_a_piece(tmp_path: Path, kind: str):
    texts = [*SENTENCES, "съешь ещё этих мягких французских булок " * 200]
    parts = (part for text in texts for part in training_parts(text, 8000))
    train_tokenizer(parts, TokenizerConfig(type=kind, vocabulary_size=300), tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    source, target = tokenizer.encode_source(texts[-2:]), tokenizer.encode_target(["булок ☃ ☃"])
    assert tokenizer.num_unknown(source, target) == (0, 2)


def test_training_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=300), tmp_path / "model")
    assert capfd.readouterr() == ("", "")


def test_too_large_a_bpe_vocabulary_is_refused_with_a_size_that_works(tmp_path: Path):
    with pytest.raises(DataError, match=r"vocabulary_size: 50000 pieces cannot be made .* Set .* to (\d+)") as error:
        train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=50_000), tmp_path / "model")
    assert not list(tmp_path.iterdir())
    possible = int(str(error.value).split("vocabulary_size to ")[1].split()[0])
    train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=possible), tmp_path / "model")
    assert Tokenizer.load(tmp_path / "model").source_vocabulary == possible


def test_too_large_a_unigram_vocabulary_takes_what_there_is(tmp_path: Path):
    settings = TokenizerConfig(type="unigram", vocabulary_size=50_000)
    train_tokenizer(iter(SENTENCES), settings, tmp_path / "model")
    vocabulary = Tokenizer.load(tmp_path / "model").source_vocabulary
    assert vocabulary < 50_000
    assert vocabulary % 8 == 0


def test_too_small_a_vocabulary_for_the_characters_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"vocabulary_size: 8 pieces are fewer than the \d+ that the characters"):
        train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=8), tmp_path / "model")


def test_training_on_nothing_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="cannot train a bpe model"):
        train_tokenizer(iter([]), TokenizerConfig(vocabulary_size=300), tmp_path / "model")


def test_an_error_of_the_text_passes_through_training(tmp_path: Path):
    def broken() -> Iterator[str]:
        yield from SENTENCES[:10]
        raise DataError("line 11 is bad")

    with pytest.raises(DataError, match=r"^line 11 is bad$"):
        train_tokenizer(broken(), TokenizerConfig(vocabulary_size=300), tmp_path / "model")


def test_a_disk_that_is_full_or_fails_is_no_fault_of_the_text(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*model'"):
            train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=300), tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_does_not_give_a_model_is_no_damage_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0,))
    with pytest.raises(MachineError, match=r"^/proc/self/mem: cannot be read now .*Input/output error"):
        Tokenizer.load(Path("/proc/self/mem"))


def test_a_missing_model_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere\.model: no such file, expected a sentencepiece model"):
        Tokenizer.load(tmp_path / "nowhere.model")


@pytest.mark.parametrize("kept_share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_model_is_named(tmp_path: Path, model: Path, kept_share: float):
    content = model.read_bytes()
    (tmp_path / "cut.model").write_bytes(content[: int(kept_share * len(content))])
    with pytest.raises(DataError, match=r"cut\.model: not a complete sentencepiece model"):
        Tokenizer.load(tmp_path / "cut.model")


def test_another_kind_of_file_is_named(tmp_path: Path):
    (tmp_path / "text.model").write_text("this is text\n" * 100)
    expected = (
        r"text\.model: not a complete sentencepiece model, expected .*: copy it again\. Word lists, .* are not read"
    )
    for load in (Tokenizer.load, read_pieces_file):
        with pytest.raises(DataError, match=expected) as error:
            load(tmp_path / "text.model")
        assert "Internal" not in str(error.value)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_model_without_begin_or_end_is_named(tmp_path: Path, name: str):
    path = foreign_model(tmp_path / "odd.model", **{f"{name}_id": -1})
    with pytest.raises(DataError, match=rf"odd\.model: the model has no {name} piece"):
        Tokenizer.load(path)


def test_a_taken_model_without_padding_gets_the_id_after_its_last_piece(tmp_path: Path):
    tokenizer = Tokenizer.load(foreign_model(tmp_path / "taken.model"))
    assert tokenizer.pad_id == 301
    assert tokenizer.source_vocabulary == 304
    assert tokenizer.decode_target([*tokenizer.encode_target(["acht Uhr"])[0], tokenizer.pad_id]) == "acht Uhr"


def test_two_models_that_disagree_on_the_end_are_refused(tmp_path: Path, model: Path):
    other = foreign_model(tmp_path / "other.model", eos_id=3, pad_id=0, unk_id=2)
    with pytest.raises(DataError, match=r"eos_id 2, but .*other\.model has 3"):
        Tokenizer.load(model, other)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def either_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("kinds") / "source.model"
    train_tokenizer(iter(SENTENCES), TokenizerConfig(type=request.param, vocabulary_size=304), path)
    return Tokenizer.load(path)


def sampled(tokenizer: Tokenizer, seed: int, lists: list[list[str]]) -> list[list[int]]:
    encode = lambda: [ids for sentences in lists for ids in tokenizer.encode_source(sentences, sampling=0.3)]  # noqa: E731
    return with_sampling_seed(seed, encode)


def test_sampled_pieces_are_those_of_the_seed_and_spell_the_same_text(either_kind: Tokenizer):
    first = sampled(either_kind, 7, [SENTENCES])
    assert first == sampled(either_kind, 7, [SENTENCES])
    assert first != sampled(either_kind, 8, [SENTENCES])
    assert first != either_kind.encode_source(SENTENCES)
    assert [either_kind.decode_source(ids) for ids in first] == SENTENCES
    assert all(ids[-1] == either_kind.eos_id for ids in first)


def test_sampling_goes_on_from_list_to_list(either_kind: Tokenizer):
    assert sampled(either_kind, 7, [SENTENCES[:50], SENTENCES[50:300]]) == sampled(either_kind, 7, [SENTENCES[:300]])
    assert len({tuple(ids) for ids in sampled(either_kind, 7, [[SENTENCES[0]]] * 20)}) > 1


def test_sampled_pieces_are_the_same_in_another_process(either_kind: Tokenizer, tmp_path: Path):
    with get_context("spawn").Pool(1) as other_process:
        assert other_process.apply(sampled, (either_kind, 7, [SENTENCES])) == sampled(either_kind, 7, [SENTENCES])


def test_no_sampling_is_plain_encoding_whatever_the_seed(either_kind: Tokenizer):
    plain = either_kind.encode_target(SENTENCES, num_threads=2)
    assert with_sampling_seed(2, lambda: either_kind.encode_target(SENTENCES, sampling=0.0)) == plain
