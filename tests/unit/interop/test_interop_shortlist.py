"""Shortlists: which target tokens are in the vocabulary map, and what CTranslate2 makes of it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from marian_folders import demo_sentences
from tokenised_models import make_model_folder

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.data.token_aligner import Lexicon
from dist_transformer.data.tokenizer.tokenizer import UNKNOWN_ID, Tokenizer
from dist_transformer.decoding.ctranslate2_search import CTranslate2Searcher
from dist_transformer.errors import DataError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.interop.ctranslate2_export import export_ctranslate2
from dist_transformer.interop.model_folder import LoadedModel
from dist_transformer.interop.shortlist import BEST, FREQUENT, read_lexicon, vocabulary_map
from dist_transformer.model.search_interface import Hypothesis, SearchInput

CPU = torch.device("cpu")


def lines_of(text: str) -> dict[str, list[str]]:
    rows = [line.split("\t") for line in text.removesuffix("\n").split("\n")]
    return {source: targets.split() for source, targets in rows}


def lexicon_of(likely: dict[int, list[int]], targets: int, frequent: list[int]) -> Lexicon:
    """A lexicon of target ids by source id, likelier ones first, and of frequent ones, more frequent ones first."""
    pairs = sorted(
        (source * targets + target, 0.9 / (rank + 1))
        for source, ids in likely.items()
        for rank, target in enumerate(ids)
    )
    keys, probabilities = zip(*pairs, strict=True)
    shares = np.zeros(targets, np.float32)
    shares[frequent] = 1.0 / np.arange(1, len(frequent) + 1)
    return Lexicon(np.array(keys), np.array(probabilities, np.float32), shares)


def test_a_source_token_has_its_likeliest_translations_and_itself_and_all_have_the_most_frequent_ones():
    source = [f"s{n}" for n in range(5)] + ["same"]
    target = [f"t{n}" for n in range(FREQUENT + 400)] + ["same"]
    likely = [*range(300, 90, -1)]
    lexicon = lexicon_of({0: likely, 3: [7], 5: [8, 9]}, len(target), [*range(50, FREQUENT + 100)])
    found = lines_of(vocabulary_map(lexicon, source, target))
    assert found == {
        "": [f"t{n}" for n in range(50, 50 + FREQUENT)],
        "s0": [f"t{n}" for n in likely[:BEST]],
        **{f"s{n}": [] for n in (1, 2, 4)},
        "s3": ["t7"],
        "same": ["t8", "t9", "same"],
    }
    assert lines_of(vocabulary_map(lexicon, source, target, most=30)) == {**found, "": found[""][:30]}


def test_tokens_that_the_file_cannot_hold_are_left_out():
    lexicon = lexicon_of({0: [1, 2], 1: [0], 2: [0]}, 3, [0, 1])
    assert vocabulary_map(lexicon, ["a", "b\tc", "d\ne"], ["x y", "z", "w\n"]) == "\tz\na\tz\n"


def translated(
    loaded: LoadedModel, folder: Path, lines: list[str], prefix: list[int] | None = None
) -> list[Hypothesis]:
    """The best translation of each line, searched on its own."""
    about, tokenizer = loaded.information, tokenizer_of(loaded)
    config = DecodingConfig(beam_size=2, max_extra_tokens=3)
    searcher = CTranslate2Searcher(folder, SpecialTokens(about.bos_id, about.eos_id, about.pad_id), config, CPU)
    inputs = [SearchInput(ids, prefix or [], n) for n, ids in enumerate(tokenizer.encode_source(lines))]
    return [searcher.search([each])[0][0] for each in inputs]


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    return Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)


@pytest.mark.parametrize("is_shared", [True, False])
def test_ctranslate2_makes_translations_of_tokens_in_the_lines_of_their_sources_only(tmp_path: Path, is_shared: bool):
    loaded = make_model_folder(tmp_path / "ours", is_shared=is_shared, tied_output=is_shared, output_bias=True)
    loaded.model.output_bias.data[loaded.information.eos_id] = -50.0  # so that translations are long
    about, tokenizer = loaded.information, tokenizer_of(loaded)
    rows, targets = about.source_vocabulary, about.target_vocabulary
    drawn = np.random.default_rng(1)
    likely = {n: drawn.permutation(np.arange(4, targets - 8))[:5].tolist() for n in range(rows)}
    lexicon_of(likely, targets, [9, 11]).save(tmp_path / "lexicon.npz")
    export_ctranslate2(loaded, tmp_path / "short", shortlist=[tmp_path / "lexicon.npz"])
    export_ctranslate2(loaded, tmp_path / "whole")
    source, names = demo_sentences(308)[0][300:], tokenizer.target_pieces(range(targets))
    found = translated(loaded, tmp_path / "short", source)
    for line, best in zip(source, found, strict=True):
        [ids] = tokenizer.encode_source([line])
        same = {names.index(piece) for piece in tokenizer.source_pieces(ids) if piece in names}
        allowed = {9, 11, UNKNOWN_ID, *same, *(target for each in ids for target in likely[each])}
        assert best.tokens
        assert {*best.tokens} <= allowed
        prefix = [n for n in range(4, targets - 8) if n not in allowed][:3]
        [continued] = translated(loaded, tmp_path / "short", [line], prefix)
        assert continued.tokens[:3] == prefix  # what is prescribed needs no line
    assert [best.tokens for best in found] != [best.tokens for best in translated(loaded, tmp_path / "whole", source)]


def test_a_map_that_leaves_nothing_out_changes_nothing(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours")
    rows, targets = loaded.information.source_vocabulary, loaded.information.target_vocabulary
    everything = {n: [*range(k, targets, 2)] for k in (0, 1) for n in range(k, rows, 2)}
    lexicon_of(everything, targets, [*range(targets)]).save(tmp_path / "lexicon.npz")
    export_ctranslate2(loaded, tmp_path / "short", shortlist=[tmp_path / "lexicon.npz"])
    export_ctranslate2(loaded, tmp_path / "whole")
    source, _ = demo_sentences(308)
    found, expected = (translated(loaded, tmp_path / name, source[300:]) for name in ("short", "whole"))
    assert [best.tokens for best in found] == [best.tokens for best in expected]
    assert [best.score for best in found] == pytest.approx([best.score for best in expected], rel=1e-4)


def test_two_texts_give_the_lexicon_of_their_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    loaded = make_model_folder(tmp_path / "ours", is_shared=False, tied_output=False)
    source, target = demo_sentences(400)
    paths = [tmp_path / "text.en", tmp_path / "text.de"]
    for path, lines in zip(paths, (source, target), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    lexicon = read_lexicon(paths, loaded)
    assert capsys.readouterr().err == f"source text: {paths[0]}, target text: {paths[1]}\n"
    lexicon.save(tmp_path / "lexicon.npz")
    again = read_lexicon([tmp_path / "lexicon.npz"], loaded)
    assert np.array_equal(lexicon.keys, again.keys)
    targets = loaded.information.target_vocabulary
    assert len(lexicon.shares) == targets
    end = loaded.information.eos_id
    of_end = lexicon.probabilities[lexicon.keys // targets == end]
    assert lexicon.keys[lexicon.keys // targets == end][of_end.argmax()] % targets == end
    paths[1].write_text("one line\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"text\.de"):
        read_lexicon(paths, loaded)


def test_what_is_no_lexicon_of_this_model_is_refused_and_nothing_is_written(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours")
    (tmp_path / "text.en").write_text("A line .\n")
    lexicon_of({3: [4]}, 50, [4]).save(tmp_path / "other.npz")
    lexicon_of({9999: [4]}, loaded.information.target_vocabulary, [4]).save(tmp_path / "larger.npz")
    lexicon_of({3: [4]}, loaded.information.target_vocabulary, [4]).save(tmp_path / "right.npz")
    expected = r"Expected lexicon\.npz of a run of this model with training\.guided_alignment; or give it twice"
    for names in (["text.en"], ["none.npz"], ["other.npz"], ["larger.npz"], ["right.npz"] * 3):
        paths = [tmp_path / name for name in names]
        with pytest.raises(UserError, match=f"--shortlist {' '.join(map(str, paths))}: .*{expected}"):
            export_ctranslate2(loaded, tmp_path / "out", shortlist=paths)
    assert read_lexicon([tmp_path / "right.npz"], loaded).shares.sum() > 0
    assert not (tmp_path / "out").exists()


def test_the_lexicon_of_a_run_with_another_tokenizer_or_direction_is_refused(tmp_path: Path):
    loaded, run = make_model_folder(tmp_path / "ours"), tmp_path / "run"
    path = run / "lexicon.npz"
    shutil.copytree(tmp_path / "ours", run / "model")
    lexicon_of({3: [4]}, loaded.information.target_vocabulary, [4]).save(path)
    assert read_lexicon([path], loaded).shares.sum() > 0
    config = read_json(run / "model" / "config.json")
    about = loaded.information

    def assert_refused(problem: str) -> None:
        said = rf"--shortlist {path}: is of {run}/model, which has {problem}\. E"
        with pytest.raises(UserError, match=said):
            read_lexicon([path], loaded)

    turned = {"source_language": about.target_language, "target_language": about.source_language}
    write_json(run / "model" / "config.json", {**config, **turned})
    assert_refused("the other direction")
    write_json(run / "model" / "config.json", config)
    model = run / "model" / "source.model"
    model.write_bytes(model.read_bytes().replace(b"\x0a", b"\x0b", 1))
    assert_refused("another tokenizer")
