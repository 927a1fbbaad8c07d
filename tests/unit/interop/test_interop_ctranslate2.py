"""Exported models against the package ctranslate2 itself, and the search through it against our own."""

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import pstdev
from typing import Any, get_args
from unittest.mock import Mock

import ctranslate2
import pytest
import torch
from marian_folders import demo_sentences, make_marian_folder
from model_choices import CHOICES
from tokenised_models import make_model_folder

from dist_transformer.cli.model_verbs import Quantization
from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.ctranslate2_search import CTranslate2Searcher
from dist_transformer.decoding.scoring import forced_log_probabilities
from dist_transformer.decoding.search import TorchSearcher, pad_together
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.interop import ctranslate2_export
from dist_transformer.interop.ctranslate2_export import export_ctranslate2, import_ctranslate2, is_exported
from dist_transformer.interop.marian import import_marian
from dist_transformer.interop.model_folder import LoadedModel, load_model_folder, save_model_folder
from dist_transformer.model.search_interface import Hypothesis, SearchInput

CPU = torch.device("cpu")
NOT_IN_CTRANSLATE2: list[dict[str, Any]] = []
"""Choices that CTranslate2 lacks, so that the export refuses them."""
VARIANTS: list[dict[str, Any]] = [
    *(each for each in CHOICES if each not in NOT_IN_CTRANSLATE2),
    {"norm": "pre", "final_norm": False, "d_ff": 8},
    {"final_norm": True, "activation": "gelu"},
    {"activation": "silu", "output_bias": True},
    {"activation": "swiglu", "norm_type": "rms", "norm": "pre", "positions": "rotary"},
    {"positions": "rotary", "key_size": 6, "value_size": 6},
    {"positions": "learned", "max_positions": 96, "norm_type": "rms"},
    {"is_shared": False, "tied_output": False},
]


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    return Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)


def special_of(loaded: LoadedModel, num_pieces: int | None = None) -> SpecialTokens:
    about = loaded.information
    return SpecialTokens(about.bos_id, about.eos_id, about.pad_id, num_pieces)


def pairs_of(loaded: LoadedModel) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer, (source, target) = tokenizer_of(loaded), demo_sentences(308)
    return tokenizer.encode_source(source[300:]), tokenizer.encode_target(target[300:])


def forced(loaded: LoadedModel, source: Sequence[list[int]], target: Sequence[list[int]]) -> list[list[float]]:
    """Our log-probability of every token of `target`, eos included."""
    pad_id, bos_id = loaded.information.pad_id, loaded.information.bos_id
    target_in = [[bos_id, *ids[:-1]] for ids in target]
    found = forced_log_probabilities(
        [loaded.model], pad_together(source, pad_id), pad_together(target_in, pad_id), pad_together(target, pad_id)
    )
    return [row[: len(ids)] for row, ids in zip(found.tolist(), target, strict=True)]


def scored(folder: Path, loaded: LoadedModel, **given: Any) -> list[list[float]]:
    """CTranslate2's log-probabilities of the same pairs."""
    tokenizer, (source, target) = tokenizer_of(loaded), pairs_of(loaded)
    results = ctranslate2.Translator(str(folder), **given).score_batch(
        [tokenizer.source_pieces(ids) for ids in source], [tokenizer.target_pieces(ids[:-1]) for ids in target]
    )
    return [list(result.log_probs) for result in results]


def largest_difference(first: list[list[float]], second: list[list[float]]) -> float:
    return max(abs(a - b) for left, right in zip(first, second, strict=True) for a, b in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_ctranslate2_gives_every_token_the_probability_that_we_give_it(tmp_path: Path, given: Any):
    loaded = make_model_folder(tmp_path / "ours", **given)
    export_ctranslate2(loaded, tmp_path / "theirs")
    ours = forced(loaded, *pairs_of(loaded))
    scale = max(1.0, max(-value for row in ours for value in row) / 10)
    assert largest_difference(scored(tmp_path / "theirs", loaded), ours) < 5e-5 * scale


@pytest.mark.slow
def test_a_model_imported_from_marian_goes_on_to_ctranslate2(tmp_path: Path):
    make_marian_folder(tmp_path / "marian", left_out=3)
    import_marian(tmp_path / "marian", tmp_path / "ours")
    loaded = load_model_folder(tmp_path / "ours")
    export_ctranslate2(loaded, tmp_path / "theirs")
    ours = forced(loaded, *pairs_of(loaded))
    assert largest_difference(scored(tmp_path / "theirs", loaded), ours) < 5e-5
    _, searcher = searchers(loaded, tmp_path / "theirs")
    never = {loaded.information.pad_id, loaded.information.eos_id}
    assert not any(never & set(best.tokens) for (best,) in searcher.search(inputs(pairs_of(loaded)[0])))


@pytest.mark.parametrize("quantization", get_args(Quantization))
def test_a_quantized_model_is_smaller_and_near_and_leaves_ours_as_it_was(tmp_path: Path, quantization: str):
    loaded = make_model_folder(tmp_path / "ours", d_model=64, d_ff=128, noise=0.05)
    before = forced(loaded, *pairs_of(loaded))
    export_ctranslate2(loaded, tmp_path / "whole")
    export_ctranslate2(loaded, tmp_path / "quantized", quantization)
    assert forced(loaded, *pairs_of(loaded)) == before
    found = scored(tmp_path / "quantized", loaded)
    errors = [abs(a - b) for x, y in zip(found, before, strict=True) for a, b in zip(x, y, strict=True)]
    spread = pstdev(value for row in before for value in row)
    # CPUs without instructions for 8 bits (AVX512-VNNI) compute int8 and int16 alike, less exactly.
    assert 0 < sum(errors) / len(errors) < 0.3 * spread
    sizes = [
        (tmp_path / name / "model.bin").stat().st_size - 1024 * 64 * 4 for name in ("whole", "quantized")
    ]  # without the positions
    assert sizes[1] < 0.62 * sizes[0]


def test_ctranslate2_produces_no_row_beyond_the_last_piece(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours", output_bias=True)
    pieces = 190
    with torch.no_grad():
        loaded.model.output_bias[pieces:] += 100
    export_ctranslate2(loaded, tmp_path / "theirs")

    def produced(num_pieces: int | None = None) -> set[int]:
        searcher = CTranslate2Searcher(tmp_path / "theirs", special_of(loaded, num_pieces), DecodingConfig(), CPU)
        return {token for (best,) in searcher.search(inputs(pairs_of(loaded)[0])) for token in best.tokens}

    assert max(produced()) >= pieces
    assert max(produced(num_pieces=pieces), default=0) < pieces


def searchers(loaded: LoadedModel, folder: Path, **given: Any) -> tuple[TorchSearcher, CTranslate2Searcher]:
    config = DecodingConfig(**given)
    ours = TorchSearcher([loaded.model], special_of(loaded), config, CPU)
    return ours, CTranslate2Searcher(folder, special_of(loaded), config, CPU)


def inputs(sources: Sequence[list[int]], prefixes: Sequence[list[int]] | None = None) -> list[SearchInput]:
    prefixes = prefixes or [[] for _ in sources]
    return [SearchInput(ids, prefix, n) for n, (ids, prefix) in enumerate(zip(sources, prefixes, strict=True))]


def words(number: int, seed: int) -> list[list[int]]:
    """Sentences of 2 to 6 of 24 words, ending with eos (2)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (number,), generator=generator).tolist()
    return [[*torch.randint(4, 28, (length,), generator=generator).tolist(), 2] for length in lengths]


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    """A model that has learned to copy, mostly; and where it lies."""
    folder = tmp_path_factory.mktemp("copying") / "model"
    sizes = dict(d_model=32, d_ff=64, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0)
    loaded = make_model_folder(folder, noise=0.0, **sizes)
    model, special = loaded.model.train(), special_of(loaded)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    for step in range(300):
        sentences = words(32, seed=step)
        target_in_BT = pad_together([[special.bos, *sentence[:-1]] for sentence in sentences], special.pad)
        sentence_BS = pad_together(sentences, special.pad)
        loss, _ = model.loss(sentence_BS, target_in_BT, sentence_BS, 0.0)
        optimizer.zero_grad()
        (loss / sum(map(len, sentences))).backward()
        optimizer.step()
    save_model_folder(folder, dict(model.named_parameters()), loaded.config, loaded.tokenizer_files, loaded.information)
    return load_model_folder(folder), folder


def tokens(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_trained_model_is_searched_as_we_search_it(copying: tuple[LoadedModel, Path], beam_size: int):
    held_out = words(200, seed=1000)
    ours, theirs = searchers(*copying, beam_size=beam_size)
    expected, found = ours.search(inputs(held_out)), theirs.search(inputs(held_out))
    assert sum(a == b for a, b in zip(tokens(expected), tokens(found), strict=True)) == 200
    assert sum(best.tokens == ids[:-1] for (best,), ids in zip(found, held_out, strict=True)) > 150
    for (ours_best,), (theirs_best,) in zip(expected, found, strict=True):
        # Begin and padding, left out there, have a little probability here.
        assert math.isclose(theirs_best.score, ours_best.score, abs_tol=0.01)


@pytest.mark.slow
def test_neither_order_nor_company_of_the_sentences_changes_a_translation(copying: tuple[LoadedModel, Path]):
    _, theirs = searchers(*copying, max_extra_tokens=2, n_best=2)
    batch = inputs(words(40, seed=7))
    together = theirs.search(batch)
    assert tokens(theirs.search(batch[::-1]))[::-1] == tokens(together)
    assert [tokens(theirs.search([each]))[0] for each in batch] == tokens(together)
    assert all(
        len(each.tokens) < len(sentence.source) + 2
        for sentence, found in zip(batch, together, strict=True)
        for each in found
    )


@pytest.mark.slow
def test_a_prefix_is_kept_and_counted_and_several_translations_are_ordered(copying: tuple[LoadedModel, Path]):
    loaded, _ = copying
    held_out = words(40, seed=8)
    prefixes = [ids[: number % 3] for number, ids in enumerate(held_out)]
    ours, theirs = searchers(*copying, n_best=3, length_penalty=0.9)
    expected, found = (each.search(inputs(held_out, prefixes)) for each in (ours, theirs))
    assert sum(a[0].tokens == b[0].tokens for a, b in zip(expected, found, strict=True)) >= 39
    for ids, prefix, hypotheses in zip(held_out, prefixes, found, strict=True):
        assert len(hypotheses) == 3
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        for hypothesis in hypotheses:
            assert hypothesis.tokens[: len(prefix)] == prefix
            (log_probabilities,) = forced(loaded, [ids], [[*hypothesis.tokens, 2]])
            assert math.isclose(hypothesis.log_probability, sum(log_probabilities), abs_tol=0.03)
            penalty = ((5 + len(hypothesis.tokens) + 1) / 6) ** 0.9
            assert math.isclose(hypothesis.score, hypothesis.log_probability / penalty)


def test_what_never_ends_is_cut_at_the_longest_length_and_scored_with_its_end(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours", output_bias=True)
    never = [loaded.information.eos_id, loaded.information.pad_id, loaded.information.bos_id]
    loaded.model.output_bias.data[never] = -50.0
    save_model_folder(
        tmp_path / "ours",
        dict(loaded.model.named_parameters()),
        loaded.config,
        loaded.tokenizer_files,
        loaded.information,
    )
    source, _ = pairs_of(loaded)
    ours, theirs = searchers(loaded, tmp_path / "ours", max_extra_tokens=3)
    expected, found = ours.search(inputs(source)), theirs.search(inputs(source))
    assert tokens(found) == tokens(expected)
    for (ours_best,), (theirs_best,), ids in zip(expected, found, source, strict=True):
        assert len(theirs_best.tokens) + 1 == len(ids) + 3
        assert math.isclose(ours_best.log_probability, theirs_best.log_probability, rel_tol=1e-5)
    prefix = [7] * 60
    (only,) = theirs.search([SearchInput(source[0], prefix, 0)])[0]
    (log_probabilities,) = forced(loaded, source[:1], [[*prefix, loaded.information.eos_id]])
    assert only.tokens == prefix
    assert math.isclose(only.log_probability, sum(log_probabilities), rel_tol=1e-5)


def test_no_n_gram_is_repeated_and_the_score_is_that_of_the_model(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours")
    source, _ = pairs_of(loaded)
    _, theirs = searchers(loaded, tmp_path / "ours", no_repeat_ngram_size=2)
    for ids, (best,) in zip(source, theirs.search(inputs(source)), strict=True):
        pairs = list(pairwise(best.tokens))
        assert len(pairs) == len(set(pairs)) > 4
        (log_probabilities,) = forced(loaded, [ids], [[*best.tokens, loaded.information.eos_id]])
        assert math.isclose(best.log_probability, sum(log_probabilities), rel_tol=1e-4)


def test_an_exported_folder_searches_as_the_model_folder_and_knows_its_longest_sentence(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours", positions="learned", max_positions=40, is_shared=False)
    export_ctranslate2(loaded, tmp_path / "theirs")
    assert is_exported(tmp_path / "theirs")
    assert not is_exported(tmp_path / "ours")
    source, _ = pairs_of(loaded)
    _, of_folder = searchers(loaded, tmp_path / "ours")
    _, of_exported = searchers(loaded, tmp_path / "theirs")
    batch = inputs([ids[-40:] for ids in source])
    assert of_folder.search(batch) == of_exported.search(batch)
    assert of_folder.max_positions == of_exported.max_positions == 40
    with pytest.raises(UserError, match=r"line 4: its prefix has 40 tokens, but a translation .* has at most 39"):
        of_exported.search([SearchInput(source[0], [7] * 40, 3)])


def test_what_ctranslate2_cannot_do_is_refused(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours", value_size=8)
    with pytest.raises(UserError, match="heads have keys of size 4 and values of size 8"):
        export_ctranslate2(loaded, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
    with pytest.raises(UserError, match=r"--sampling: .* take the engine torch"):
        searchers(loaded, tmp_path / "ours", sampling=True)

    class WithAnother(DecodingConfig):
        min_tokens: int = 0

    with pytest.raises(UserError, match=r"--min-tokens: .* take the engine torch"):
        CTranslate2Searcher(tmp_path / "ours", special_of(loaded), WithAnother(min_tokens=3), CPU)


def test_the_package_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = make_model_folder(tmp_path / "ours")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(UserError, match=r"needs the package ctranslate2.* pip install 'dist-transformer\[export\]'"):
        export_ctranslate2(loaded, tmp_path / "theirs")


class OnGpu:
    """CTranslate2 on a machine with so many GPUs for it, whose translators compute on CPUs after all, or fail."""

    specs = ctranslate2.specs

    def __init__(self, num_gpus: int, failure: str = "") -> None:
        self.devices: list[str] = []
        self._failure, self.get_cuda_device_count = failure, lambda: num_gpus

    def Translator(self, folder: str, *, device: str, device_index: int = 0, **given: Any) -> Any:
        self.devices.append(device)
        if self._failure:
            return Mock(translate_batch=Mock(side_effect=RuntimeError(self._failure)))
        return ctranslate2.Translator(folder, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_gpus", "hip", "device"),
    [(1, None, "cuda"), (0, None, "cpu"), (1, "7.1", "cpu")],
    ids=["one", "none", "AMD's"],
)
def test_ctranslate2_takes_a_gpu_only_where_it_has_one_and_is_built_for_it(
    copying: tuple[LoadedModel, Path], monkeypatch: pytest.MonkeyPatch, num_gpus: int, hip: str | None, device: str
):
    loaded, folder = copying
    package = OnGpu(num_gpus)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctranslate2_export, "import_ctranslate2", lambda: package)
    found = CTranslate2Searcher(folder, special_of(loaded), DecodingConfig(), torch.device("cuda", 0))
    assert package.devices == [device]
    assert found.search(inputs(words(2, 5)))


def test_a_gpu_that_ctranslate2_cannot_compute_on_ends_as_a_message_before_anything_is_translated(
    copying: tuple[LoadedModel, Path], monkeypatch: pytest.MonkeyPatch
):
    loaded, folder = copying
    package = OnGpu(1, "Library libcublas.so.12 is not found or cannot be loaded")
    monkeypatch.setattr(ctranslate2_export, "import_ctranslate2", lambda: package)
    with pytest.raises(CheckpointError, match=r"\(Library libcublas\.so\.12 .*CUDA_VISIBLE_DEVICES="):
        CTranslate2Searcher(folder, special_of(loaded), DecodingConfig(), torch.device("cuda", 0))


@pytest.mark.parametrize(("processors", "threads", "expected"), [(1, 1, 1), (2, 2, 1), (8, 8, 7), (8, 4, 4)])
def test_a_processor_is_left_to_our_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processors: int, threads: int, expected: int
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(processors)))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    loaded = make_model_folder(tmp_path / "ours")
    given: list[int] = []
    translator = ctranslate2.Translator
    monkeypatch.setattr(
        "ctranslate2.Translator",
        lambda *places, **settings: given.append(settings["intra_threads"]) or translator(*places, **settings),
    )
    searchers(loaded, tmp_path / "ours")
    assert given == [expected]


def test_a_damaged_exported_folder_is_named(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours")
    export_ctranslate2(loaded, tmp_path / "theirs")
    (tmp_path / "theirs/model.bin").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match=r"theirs: CTranslate2 cannot load it .*Export the model again"):
        searchers(loaded, tmp_path / "theirs")
    (tmp_path / "theirs/dist_transformer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"dist_transformer\.json: missing or damaged"):
        searchers(loaded, tmp_path / "theirs")


def test_a_version_whose_models_have_no_size_of_heads_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Older:
        def __init__(self, num_layers: int, num_heads: int) -> None: ...

    monkeypatch.setattr(ctranslate2, "__version__", "4.6.2")
    monkeypatch.setattr(ctranslate2.specs, "TransformerEncoderSpec", Older)
    with pytest.raises(UserError, match=r"cannot be used \(it is 4\.6\.2, expected 4\.6\.3 or newer\): pip install"):
        import_ctranslate2()
