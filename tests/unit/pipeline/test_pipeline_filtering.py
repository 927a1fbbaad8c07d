"""The cross-entropy filter: which pairs stay, and what is said of files that do not fit together."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.errors import UserError
from dist_transformer.files import read_json
from dist_transformer.pipeline.filtering import filter_files, kept_pairs

SCORES = st.lists(st.floats(allow_nan=False) | st.sampled_from([-1.0, -2.0]), max_size=60)


@given(SCORES, st.floats(0, 1, exclude_max=True))
def test_no_dropped_pair_has_a_better_score_than_a_kept_one(scores, drop):
    is_kept = kept_pairs(np.array(scores, dtype=np.float64), drop)
    kept = [index for index in range(len(scores)) if is_kept[index]]
    dropped = [index for index in range(len(scores)) if not is_kept[index]]
    assert len(dropped) == math.floor(len(scores) * drop)
    assert all(scores[worse] <= scores[better] for worse in dropped for better in kept)
    for index in dropped:  # of equal scores the first ones stay
        assert all(before < index for before in kept if scores[before] == scores[index])


def test_a_pair_without_a_score_that_is_a_number_is_dropped_first(tmp_path):
    """As `data.filters.scores` drops NaN, which is neither below nor above another one."""
    for scores, kept in (
        ("-1\nnan\n-2\n-3\n", "a\nc\n"),
        ("-9 -9\n-1 nan\n-inf\n-3\n", "a\nd\n"),
        ("nan\nnan\n-5\nnan\n", "a\nc\n"),
    ):
        (tmp_path / "text").write_text("a\nb\nc\nd\n")
        (tmp_path / "scores").write_text(scores)
        filter_files(tmp_path / "text", tmp_path / "text", tmp_path / "scores", 0.5, tmp_path)
        assert (tmp_path / "source").read_text() == kept, scores


def test_the_lines_of_both_files_stay_together(tmp_path):
    (tmp_path / "en").write_text("one\ntwo\n\nfour\u2028x\n", encoding="utf-8")
    (tmp_path / "de").write_text("eins\nzwei\ndrei\nvier", encoding="utf-8")
    (tmp_path / "scores").write_text("-1.0 -3.0\n-2.5\n-0.5 -0.5 -0.2\n-1.9 -2.0\n")  # means: -2, -2.5, -0.4, -1.95
    filter_files(tmp_path / "en", tmp_path / "de", tmp_path / "scores", 0.5, tmp_path / "out")
    assert (tmp_path / "out" / "source").read_text(encoding="utf-8") == "\nfour\u2028x\n"
    assert (tmp_path / "out" / "target").read_text(encoding="utf-8") == "drei\nvier\n"
    assert read_json(tmp_path / "out" / "counts.json") == {"lines": 4, "kept_lines": 2}


@pytest.mark.parametrize(
    ("scores", "message"),
    [("-1\n-2\n", "text has 3, .*scores has 2 lines: expected files"), ("-1\nx\n-3\n", "line 2: 'x': expected a number"),
     ("-1\n\n-3\n", "line 2: '': expected a number")],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_with_their_names(scores, message, tmp_path):
    (tmp_path / "text").write_text("a\nb\nc\n")
    (tmp_path / "scores").write_text(scores)
    with pytest.raises(UserError, match=message):
        filter_files(tmp_path / "text", tmp_path / "text", tmp_path / "scores", 0.4, tmp_path / "out")
    assert not (tmp_path / "out" / "counts.json").exists()
