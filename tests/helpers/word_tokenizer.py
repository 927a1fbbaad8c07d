"""A tokenizer for tests: each word of a small language is a token."""

import re

WORDS = ["<pad>", "<bos>", "<eos>", "one", "two", "three", "four", "five", "six", "four."]


class WordTokenizer:
    """Each word an id."""

    pad_id, bos_id, eos_id = 0, 1, 2

    def encode_source(self, sentences: list[str]) -> list[list[int]]:
        return [[*(WORDS.index(word) for word in sentence.split()), self.eos_id] for sentence in sentences]

    encode_target = encode_source

    def decode_target(self, ids: list[int]) -> str:
        return " ".join(WORDS[index] for index in ids)

    def source_spans(self, sentence: str) -> list[tuple[int, int]]:
        return [*((word.start(), word.end()) for word in re.finditer(r"\S+", sentence)), (len(sentence),) * 2]

    def target_spans(self, ids: list[int]) -> list[tuple[int, int]]:
        return self.source_spans(self.decode_target(ids))[:-1]

    def source_pieces(self, ids: list[int]) -> list[str]:
        return [WORDS[index] for index in ids]

    target_pieces = source_pieces
