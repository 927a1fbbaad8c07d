"""Each rule of data.filters.rules drops what it names and leaves what only looks like it."""

from itertools import islice

import numpy as np
import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from dist_transformer.config.data_schema import RULE_THRESHOLDS, FilterConfig
from dist_transformer.data import filters
from dist_transformer.data.filters import REPETITION_RULES, RULES, Cleaner, HeldOut, KeptText, without_markup
from dist_transformer.data.languages import detector
from dist_transformer.data.sentences import Sentences
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.errors import DataError

EN = "The children are playing in the garden behind the house."
DE = "Die Kinder spielen im Garten hinter dem Haus."


def cleaned(pairs, rules, prefix="", **settings) -> KeptText:
    """The pairs through these rules, and no others."""
    config = FilterConfig(rules={"held_out": False, **rules}, **settings)
    batch = RawBatch(0, [f"{prefix}{source}" for source, _ in pairs], [target for _, target in pairs], prefix=prefix)
    return Cleaner(config, ("en", "de")).clean(batch)


@pytest.mark.parametrize("kept", ["True", "1", "__import__('numpy').True_", "__import__('re').match('.', source)"])
def test_a_plug_in_says_what_is_true_or_false_and_text_or_scores_are_warned_of(kept, tmp_path, caplog):
    file = tmp_path / "rule.py"
    file.write_text(f"def keep(source, target):\n    return {kept} if source == 'a' else not {kept}\n")
    assert cleaned([("a", "b"), ("c", "d")], {}, plugin=f"{file}:keep").source == ["a"]
    for number, text in enumerate(("'no'", "0.3")):  # a run that has begun with such a one goes on
        file = tmp_path / f"wrong_{number}.py"
        file.write_text(f"def keep(source, target):\n    return {text}\n")
        assert cleaned([("a", "b"), ("c", "d")], {}, plugin=f"{file}:keep").source == ["a", "c"]
        assert f"keep of {file} returns text or scores" in caplog.text


def is_dropped(rule, source, target, value=True) -> bool:
    text = cleaned([(source, target)], {rule: value})
    assert set(text.dropped) <= {rule}
    return rule in text.dropped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        ("letters", "-- 12 / 34 | 56 --", "-- 12 / 34 | 56 --"),
        ("letters", EN, "+ * = 5 % § &"),
        ("digits", "call 555 1234 5678", "Ruf 555 1234 5678 an"),
        ("punctuation", "a !!! ??? ...", "ein Satz"),
        ("repeated", "no no no no no no", DE),
        ("repeated", EN, "Ach!!!!!!!!!!!!"),
        ("repeated", "I said yes, I said yes, I said yes, I said yes, I said yes, yes", DE),
        ("numbers", "In 1995 it began.", "Es begann 1996."),
        ("numbers", "It cost 1,200 euros.", "Es kostete viel."),
        ("language", DE, DE),
        ("language", EN, EN),
        ("language", DE, EN),
        ("markup", "<td><a href='x'></a></td>Hi", "Hallo"),
        ("markup", "<br/>", "Hallo"),
    ],
)
def test_a_rule_drops_what_it_names(rule, source, target):
    assert is_dropped(rule, source, target)
    assert not is_dropped(rule, source, target, value=False)


@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        ("letters", "Chapter 12", "Kapitel 12"),
        ("letters", "वह किताब पढ़ता है।", "他在读书。"),  # vowel signs are marks
        ("digits", "It opens at 10:30 on 12 May 2004.", "Es öffnet um 10:30 am 12. Mai 2004."),
        ("punctuation", "Well... 'yes', (the man) said!", "Nun ... „ja“, sagte (der Mann)!"),
        ("repeated", "No, no, no!", "Nein, nein, nein!"),
        ("repeated", "It is 1,000,000,000,000,000.", "Es sind 1000000000000000."),
        ("repeated", "a" + " " * 40 + "b", "a b"),
        ("repeated", "Hmmm ... well ...", "Hmmm ... nun ..."),
        ("numbers", "It cost 1,200 euros in 1995.", "Es kostete 1995 1.200 Euro."),
        ("numbers", "It cost 1 200 euros at 7:30.", "Es kostete 1200 Euro um 19.30 Uhr."),
        ("numbers", "year ٢٠٠٤ 0123", "Jahr 2004 123"),
        ("language", EN, DE),
        ("language", "Hotel Berlin", "Hotel London"),  # short
        ("language", "1234 5678 9012 3456 7890 1234 5678", "1234 5678 9012 3456 7890 1234 5678"),
        ("markup", "a < b and c > d", "AT&T & Q&A"),
        *(
            ("numbers", f"It cost 1{sign}200{sign}000 euros.", "Es kostete 1200000 Euro.")
            for sign in ",.'_\u00a0\u00b7\u066b\u066c\u2007\u2008\u2009\u200a\u2019\u202f\uff0c\uff0e"
        ),
        ("numbers", "It has 12,34,567 people.", "Es hat 1.234.567 Einwohner."),
        ("numbers", "on 10.12.2004, 9 30 45", "am 10. 12. 2004, 9, 30, 45"),
    ],
)
def test_a_rule_leaves_what_only_looks_like_it(rule, source, target):
    assert not is_dropped(rule, source, target)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Tom &amp; Jerry &lt;3", "Tom & Jerry <3"),
        ("it&amp;#39;s <b>so</b>&nbsp;good", "it's so good"),
        ("one<br/>two<!-- x -->", "one two"),
        ("un<i>believ</i>able", "unbelievable"),
        ("<2de> a  b", "<2de> a  b"),
        ("Q&parameter R&D; 5 < 6", "Q&parameter R&D; 5 < 6"),
        ("if a<b and c>d: f(x)<g(x) && g(x)>h(x)", "if a<b and c>d: f(x)<g(x) && g(x)>h(x)"),
        (
            "<john@example.com> <https://example.org/x> <www.a.org/>",
            "<john@example.com> <https://example.org/x> <www.a.org/>",
        ),
        ("<option value=1 selected>eins</option>", "eins"),
        ('<td nowrap>cell</td><br  /><a href="x"  >link</a>', "cell link"),
        ("She <laughs> at &lt;table&gt; and &lt;div&gt;", "She <laughs> at <table> and <div>"),
        ("<title>One</title><br><a href='x?a=>1' rel=me>two</a><o:p/>", "One two"),
        ("&lt;b&gt;one&lt;/b&gt;&lt;br&gt;&lt;img src=x&gt;<B>two", "one two"),
    ],
)
def test_markup_is_repaired(text, plain):
    assert without_markup(text) == plain


def test_repaired_pairs_are_counted_and_keep_their_tags():
    text = cleaned([("apples &amp; pears", "Äpfel &amp; Birnen"), (EN, DE)], {"markup": True}, prefix="<2de> ")
    assert (text.source, text.target, text.repaired) == (
        ["<2de> apples & pears", f"<2de> {EN}"],
        ["Äpfel & Birnen", DE],
        1,
    )


def test_markup_left_overs_may_all_be_dropped():
    assert is_dropped("markup", "fish &amp; chips, twice please", "zweimal Fisch mit Pommes", value=0)


def test_thresholds_are_as_given():
    assert not is_dropped("letters", "12 a", "34 b", value=0.3)
    assert is_dropped("letters", "12 a", "34 b", value=0.4)
    assert is_dropped("numbers", "at 7:30", "um 8:30", value=1)
    assert not is_dropped("language", DE, DE, value=100)
    assert is_dropped("repeated", "No, no, no, no!", "Nein!", value=3)


def test_a_pair_is_counted_by_the_first_rule_in_the_order_of_the_list():
    names = [name for name in RULE_THRESHOLDS if name not in ("held_out", "lingua", *REPETITION_RULES)]
    text = cleaned([("1 1 1 1 1 1 1 1 1 1 2000", "!!!!!!!!!!!!!!!!!")], dict.fromkeys(names, True))
    assert text.dropped == {"letters": [0]}
    batch, rules = RawBatch(0, [EN], [DE]), {"held_out": False, **dict.fromkeys(REPETITION_RULES, True)}
    repeated = {rule: np.array([0]) for rule in reversed(REPETITION_RULES)}
    assert Cleaner(FilterConfig(rules=rules), ("en", "de")).clean(batch, repeated).dropped == {"duplicates": [0]}
    assert set(RULE_THRESHOLDS) < set(RULES)


def test_scores_below_their_threshold_are_dropped_and_equal_ones_kept():
    config = FilterConfig(scores={"bicleaner": 0.5, "laser": 1})
    scores = {"bicleaner": np.array([0.5, 0.49, 0.9, 0.9]), "laser": np.array([1.0, 2.0, 0.9, np.nan])}
    text = Cleaner(config, ("en", "de")).clean(RawBatch(0, list("abcd"), list("efgh"), scores=scores))
    assert (text.positions.tolist(), text.dropped) == ([0], {"scores": [1, 2, 3]})


def test_held_out_sentences_are_dropped_on_either_side_whatever_their_case_and_punctuation(tmp_path):
    keys = [np.sort(Sentences(texts).keys) for texts in ([EN, "Yes."], [DE])]
    HeldOut(keys[0], keys[1]).save(tmp_path)
    held_out = HeldOut.load(tmp_path)
    pairs = [(EN.upper(), "x"), ("y", f"  {DE[:-1]} !"), (DE, EN), ("yes", "ja"), ("The childrenare", "z")]
    batch = RawBatch(0, [a for a, _ in pairs], [b for _, b in pairs])
    assert Cleaner(FilterConfig(), ("en", "de"), held_out).clean(batch).dropped == {"held_out": [0, 1, 3]}
    for value, dropped in ((10, {"held_out": [0, 1]}), (False, {})):
        config = FilterConfig(rules={"held_out": value})
        assert Cleaner(config, ("en", "de"), held_out).clean(batch).dropped == dropped
    assert HeldOut.load(tmp_path / "elsewhere") is None


FORMS = [
    "Cafe\u0301 \uff11\uff12, \uff76\uff9e",
    "ca\u00adf\u00e9 12 \u30ac!",
    "Caf\u00e9 12 \u30ac",
    "caf\u00e9 1\u00b2 \u30ab\u3099",
]


def test_pairs_are_equal_whatever_their_unicode_form_and_soft_hyphens():
    keys = cleaned([(text, text) for text in [*FORMS, "Cafe 12 \u30ac"]], {}).keys.tolist()
    assert [keys.count(key) for key in keys] == [4, 4, 4, 4, 1]
    assert is_dropped("letters", "Oh\u2026 12", "a", value=0.6)  # shares are of the characters that are there
    assert not is_dropped("punctuation", "Oh\u2026", "a", value=0.4)


def test_a_language_that_the_library_does_not_know_is_named():
    with pytest.raises(DataError, match=r"rules\.language: does not know the language 'tlh'.*set the rule to false"):
        Cleaner(FilterConfig(rules={"language": True}), ("en", "tlh_AQ")).clean(RawBatch(0, [EN], [DE]))


@pytest.mark.slow
def test_the_language_is_that_which_py3langid_finds_sentence_by_sentence():
    model = LanguageIdentifier.from_model_file(MODEL_FILE)
    texts = [text for pair in islice(demo_pairs("test"), 300) for text in pair]
    texts += ["", "x", "ÜBER ALLES", "ALL CAPS", "na\u0308chste", "12", "\u0437\u0434\u0440", "a" * 700, "\ud800"]
    for languages in (("en", "de"), ("de", "sr")):
        model.set_languages(languages)
        found = [(name if score > -1e38 else None) for name, score in map(model.classify, texts)]
        for own, other in (languages, languages[::-1]):
            assert detector("language", own, other)(texts) == [name == other for name in found]
    assert detector("language", "en", "de")([]) == []


def test_lingua_is_another_detector_or_named_as_missing(monkeypatch):
    lingua = pytest.importorskip("lingua")
    assert is_dropped("lingua", DE, DE)
    assert not is_dropped("lingua", EN, DE)
    with monkeypatch.context() as patch:
        patch.setattr(filters, "detector", lambda *_: lambda texts: [True] * len(texts))
        assert is_dropped("lingua", EN, DE)
    assert lingua


def test_keys_are_of_letters_digits_symbols_and_words():
    same = Sentences(["Hello, World!", "hello world", "  hello... WORLD "]).keys
    assert len(set(same.tolist())) == 1
    texts = [
        "hello world",
        "helloworld",
        "world hello",
        "hello worlds",
        "1.5",
        "15",
        *("€15", "15 %", "...", "😀", "😂"),
        "?",
        "कि",
        "की",
        "a b c",
        "ab c",
    ]
    assert len(set(Sentences(texts).keys.tolist())) == len(texts)
    assert Sentences(["", "x"]).keys[1] == Sentences(["x"]).keys[0]


def test_keys_are_those_of_the_corpora_that_are_prepared():
    keys = Sentences(["Cafe\u0301 für 5 € 😀", "क्या: 100 % ..."]).keys.tolist()
    assert keys == [0xE3ADEAB503BE7816, 0x515E059D345DA3], (
        "held_out.npz and the keys of duplicates would no longer find the same text: a change of keys needs another "
        "PREPARED_FORMAT of data/recipe.py, which goes on reading the former ones"
    )


def test_signatures_tell_how_similar_sentences_are():
    first = "the quick brown fox jumps over the lazy dog and runs away into the forest"
    texts = [first, first.upper(), first.replace("lazy", "crazy"), "a completely different sentence about other things"]
    signatures = Sentences(texts).signatures(0)
    alike = [np.mean(signatures[0] == each) for each in signatures]
    assert alike[1] == 1
    assert 0.75 < alike[2] < 1
    assert alike[3] < 0.1
    assert np.mean(Sentences(["ab"]).signatures(0) == Sentences(["ab"]).signatures(1)) < 0.1
