"""Translation by CTranslate2: a `Searcher` for an exported model, or for a model folder, which it exports itself.

docs/interop.md says how its search differs from ours.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding.beam import length_penalty
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.interop import ctranslate2_export
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.model.search_interface import Hypothesis, SearchInput, longest_output

LONGEST_SEARCHED = 4096
"""Positions of a model that is exported for one search, where its size does not matter."""
IMPOSSIBLE = -1e9
"""Score below which CTranslate2 marks hypotheses that it could not find."""
SUPPORTED = {
    *("beam_size", "length_penalty", "max_extra_tokens", "max_tokens", "max_source_tokens", "no_repeat_ngram_size"),
    *("too_long", "n_best", "temperature", "top_k", "top_p", "seed"),  # the last four are of `sampling` alone
}
"""Settings that have their effect with CTranslate2 too. A draw of `sampling` would depend on the sentences beside it."""


class CTranslate2Searcher:
    """A `Searcher` whose results do not depend on the order or composition of batches, unless the folder has a shortlist."""

    def __init__(self, folder: Path, special: SpecialTokens, config: DecodingConfig, device: torch.device) -> None:
        """Loads `folder`, a model folder or a result of `export_ctranslate2`. Other arguments: see `TorchSearcher`. Raises
        UserError: the package ctranslate2 is missing, or does not support `config` or this model; CheckpointError: the
        folder is incomplete."""
        for name, field in type(config).model_fields.items():
            if name not in SUPPORTED and getattr(config, name) != field.default:
                raise UserError(
                    f"--{name.replace('_', '-')}: not with CTranslate2; take the engine torch, or leave it out"
                )
        self.config = config
        if ctranslate2_export.is_exported(folder):
            self._load(folder, device)
        else:
            with TemporaryDirectory() as temporary:
                exported = Path(temporary) / "exported"
                ctranslate2_export.export_ctranslate2(load_model_folder(folder), exported, longest=LONGEST_SEARCHED)
                self._load(exported, device)
        self._pad_id = special.pad  # the end of a source of models imported from Eole
        rows = len(self._target_tokens)
        pieces = rows if special.num_pieces is None else special.num_pieces
        never = {special.bos, special.pad, *range(pieces, rows)} - {special.eos}
        self._never = [[self._target_tokens[number]] for number in sorted(never)]

    def search(self, batch: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        """Translations as of any `Searcher`. Raises UserError: a prefix leaves no position for the end."""
        longest = [longest_output(sentence, self.max_positions, self.config) for sentence in batch]
        found = self._translate(batch, max(longest))
        for place, limit in enumerate(longest):
            # The batch's longest length was used for this sentence: if a translation exceeds its own, search again.
            if limit < max(longest) and any(len(each.tokens) >= limit for each in found[place]):
                (found[place],) = self._translate([batch[place]], limit)
        return [sorted(each, key=lambda hypothesis: -hypothesis.score)[: self.config.n_best] for each in found]

    def _load(self, folder: Path, device: torch.device) -> None:
        _, self.max_positions = ctranslate2_export.load_exported(folder)
        self._source_tokens, self._target_tokens = ctranslate2_export.read_vocabularies(folder)
        self._target_id = {token: number for number, token in enumerate(self._target_tokens)}
        # Threads besides CTranslate2's own. With as many helpers as processors, OpenMP counts too many threads
        # and lets them sleep between operations: single sentences then took five to ten times as long on two processors.
        helpers = max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))
        package = ctranslate2_export.import_ctranslate2()
        is_on_gpu = device.type == "cuda" and torch.version.hip is None and package.get_cuda_device_count() > 0
        place = {"device": "cuda", "device_index": device.index or 0} if is_on_gpu else {"device": "cpu"}
        try:
            self._translator = package.Translator(str(folder), intra_threads=helpers, **place)
            if is_on_gpu:  # loads CUDA's libraries, which may be of another version than torch's
                self._translator.translate_batch([self._source_tokens[-1:]], beam_size=1, max_decoding_length=1)
        except (RuntimeError, ValueError) as error:
            ways = "Take --engine torch, or the CPU: CUDA_VISIBLE_DEVICES=" if is_on_gpu else "Export the model again"
            raise CheckpointError(f"{folder}: CTranslate2 cannot load it or compute ({error}). {ways}") from error

    def _translate(self, batch: Sequence[SearchInput], longest: int) -> list[list[Hypothesis]]:
        """At least beam_size translations of each sentence; `longest` counts the end."""
        # The first that end may not include all of the best: for several translations, twice as many are searched.
        patience = 2 if self.config.n_best > 1 else 1
        prefixes = [[self._target_tokens[number] for number in sentence.prefix] for sentence in batch]
        # A prefix as long as the longest translation leaves nothing to search.
        is_open = [len(prefix) < longest - 1 for prefix in prefixes]
        sources = [[self._source_tokens[n] for n in each.source if n != self._pad_id] for each in batch]
        results = iter(
            self._translator.translate_batch(
                [source for source, open in zip(sources, is_open, strict=True) if open],
                [prefix for prefix, open in zip(prefixes, is_open, strict=True) if open] if any(prefixes) else None,
                beam_size=self.config.beam_size,
                num_hypotheses=self.config.beam_size * patience,
                patience=patience,
                length_penalty=0,  # results are ordered by our own length penalty
                no_repeat_ngram_size=self.config.no_repeat_ngram_size,
                suppress_sequences=self._never,
                max_input_length=0,
                min_decoding_length=0,
                max_decoding_length=longest - 1,
                return_scores=True,
                use_vmap=True,  # if the folder has a shortlist
            )
        )
        found = []
        for source, prefix, open in zip(sources, prefixes, is_open, strict=True):
            result = next(results) if open else None
            pairs = zip(result.hypotheses, result.scores, strict=True) if result is not None else ()
            ended = [(tokens, score) for tokens, score in pairs if score > IMPOSSIBLE]
            found.append(self._scored(source, prefix, ended, longest))
        return found

    def _scored(
        self, source: list[str], prefix: list[str], ended: Sequence[tuple[list[str], float]], longest: int
    ) -> list[Hypothesis]:
        """Hypotheses with scores. CTranslate2 counts neither a prefix nor the end of a translation cut at the longest
        length, and normalises without tokens that would repeat an n-gram: such translations are scored anew."""
        is_cut = any(len(tokens) == longest - 1 for tokens, _ in ended)
        texts = [tokens for tokens, _ in ended] or [prefix]
        scores = [score for _, score in ended]
        if prefix or not ended or is_cut or self.config.no_repeat_ngram_size:
            results = self._translator.score_batch([source] * len(texts), texts, max_input_length=0)
            scores = [sum(result.log_probs) for result in results]
        penalties = [length_penalty(len(tokens) + 1, self.config.length_penalty) for tokens in texts]
        ids = [[self._target_id[token] for token in tokens] for tokens in texts]
        found = zip(ids, scores, penalties, strict=True)
        return [Hypothesis(tokens, score / penalty, score) for tokens, score, penalty in found]
