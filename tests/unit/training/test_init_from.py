"""Initial weights: every tensor that fits is taken, every other one is named, with the reason."""

import re

import pytest
import torch
from checkpoint_helpers import save

from dist_transformer.config.schema import ModelConfig
from dist_transformer.decoding.loaded_model import model_folder_of
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.files import write_json
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.folder import RunDir
from dist_transformer.training.init_from import (
    FORM,
    MISSING,
    OTHER_FORM,
    OTHER_HEADS,
    OTHER_SHAPE,
    OTHER_TOKENIZER,
    UNKNOWN,
    Origin,
    compare,
    find,
    fit_text,
    form_of,
    load_initial_weights,
)

HERE = Origin(2, ("a" * 64, "a" * 64))
SMALL = dict(d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1, num_decoder_layers=2)


def model_of(vocabulary=16, seed=1, **settings):
    torch.manual_seed(seed)
    return Transformer(ModelConfig(**{**SMALL, **settings}), vocabulary, vocabulary, 0)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def load(model, source, there=HERE, here=HERE, partially=False):
    return load_initial_weights(model, weights_of(source), there, here, "the source", partially)


def names(fit, why):
    return {name for name, reason, _ in fit.others if reason == why}


def test_a_model_of_the_same_shape_gives_every_tensor_and_then_computes_the_same():
    model, source = model_of(seed=1), model_of(seed=2)
    fit = load(model, source)
    assert set(fit.taken) == set(weights_of(model))
    assert fit.others == ()
    ids = torch.tensor([[4, 5, 6]])
    assert torch.equal(model.eval()(ids, ids), source.eval()(ids, ids))


def test_the_copy_does_not_share_memory_with_its_source():
    model, source = model_of(seed=1), model_of(seed=2)
    given = weights_of(source)
    load_initial_weights(model, given, HERE, HERE, "the source", False)
    given["encoder_layers.0.feed_forward.inner.weight"].zero_()
    assert torch.equal(
        model.encoder_layers[0].feed_forward.inner.weight, source.encoder_layers[0].feed_forward.inner.weight
    )


def test_a_deeper_source_and_a_shallower_model_name_what_is_left_over():
    fit = compare(model_of(num_decoder_layers=1), weights_of(model_of()), HERE, HERE)
    assert names(fit, UNKNOWN) == {name for name in weights_of(model_of()) if name.startswith("decoder_layers.1.")}
    assert len(fit.others) == len(names(fit, UNKNOWN))


def test_a_shallower_source_names_what_the_model_must_make_itself():
    fit = compare(model_of(), weights_of(model_of(num_decoder_layers=1)), HERE, HERE)
    assert names(fit, MISSING) == {name for name in weights_of(model_of()) if name.startswith("decoder_layers.1.")}


def test_tensors_of_other_shapes_are_named_with_both_shapes():
    fit = compare(model_of(d_ff=16), weights_of(model_of(d_ff=12)), HERE, HERE)
    wider = weights_of(model_of(d_ff=16))
    narrower = weights_of(model_of(d_ff=12))
    expected = {name for name in wider if wider[name].shape != narrower[name].shape}
    assert names(fit, OTHER_SHAPE) == expected
    assert {name: details for name, _, details in fit.others}["encoder_layers.0.feed_forward.inner.weight"] == (
        "(12, 8) there, (16, 8) here"
    )


@pytest.mark.parametrize(
    ("there", "settings", "expected"),
    [
        (("b", "b"), {}, {"source_embedding.weight"}),
        (("b", "a"), {}, {"source_embedding.weight"}),
        (("a", "b"), {}, {"source_embedding.weight"}),
        (("b", "a"), {"shared_embeddings": False}, {"source_embedding.weight"}),
        (("a", "b"), {"shared_embeddings": False}, {"target_embedding.weight"}),
        (("a", "b"), {"shared_embeddings": False, "tied_output": False}, {"target_embedding.weight", "output.weight"}),
    ],
)
def test_rows_of_another_tokenizer_do_not_fit_though_their_shape_does(there, settings, expected):
    origin = Origin(2, (there[0] * 64, there[1] * 64))
    fit = compare(model_of(**settings), weights_of(model_of(**settings)), origin, HERE)
    assert names(fit, OTHER_TOKENIZER) == expected
    assert len(fit.others) == len(expected)


def test_a_tokenizer_is_known_by_the_first_digits_of_its_digest():
    assert compare(model_of(), weights_of(model_of()), Origin(2, ("a" * 16, "a" * 16)), HERE).others == ()


def test_projections_of_another_number_of_heads_do_not_fit_though_their_shape_does():
    fit = compare(model_of(num_heads=4), weights_of(model_of()), HERE, Origin(4, HERE.tokenizers))
    expected = {name for name in weights_of(model_of()) if re.search("_attention[.]", name)}
    assert names(fit, OTHER_HEADS) == expected
    assert {name for name in fit.taken if "attention_residual" in name}


def test_without_init_partially_nothing_is_copied_and_the_error_names_every_tensor_and_the_way_out():
    model, source = model_of(d_ff=16, seed=1), model_of(num_decoder_layers=1, seed=2)
    before = weights_of(model)
    with pytest.raises(UserError) as raised:
        load(model, source)
    message = str(raised.value)
    for name, _, details in compare(model, weights_of(source), HERE, HERE).others:
        layer, _, rest = name.partition(".feed_forward") if ".feed_forward" in name else (name[:16], "", "")
        assert any(f" {layer}: " in line and rest in line and details in line for line in message.splitlines()), name
    assert "training.init_partially=true" in message
    assert "the source" in message
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


def test_with_init_partially_the_rest_is_taken_and_the_others_keep_their_values():
    model, source = model_of(d_ff=16, seed=1), model_of(seed=2)
    before, given = weights_of(model), weights_of(source)
    fit = load(model, source, partially=True)
    after = weights_of(model)
    assert fit.taken
    assert fit.others
    assert all(torch.equal(after[name], given[name]) for name in fit.taken)
    assert all(torch.equal(after[name], before[name]) for name, _, _ in fit.others)


def test_a_source_of_which_nothing_fits_is_an_error_even_with_init_partially():
    with pytest.raises(UserError, match="nothing of the source fits this model"):
        load(model_of(), model_of(d_model=16, d_ff=24), partially=True)


def test_the_text_has_a_line_for_each_layer_and_every_name_in_it():
    text = fit_text(compare(model_of(), weights_of(model_of(num_decoder_layers=1)), HERE, HERE))
    (line,) = [line for line in text.splitlines() if "decoder_layers.1: " in line]
    expected = {
        n.removeprefix("decoder_layers.1.") for n in weights_of(model_of()) if n.startswith("decoder_layers.1.")
    }
    assert set(line.strip().removeprefix("decoder_layers.1: ").split(", ")) == expected
    assert f"{len(expected)} not in the source:" in text


@pytest.mark.parametrize(("name", "said"), [("none", "is no folder"), ("empty", "has no weights to start with")])
def test_a_path_without_weights_is_refused_with_what_may_stand_there(tmp_path, name, said):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=rf"training\.init_from: {tmp_path}/{name} {said}\. Expected a run folder"):
        find(tmp_path / name)


@pytest.mark.parametrize("name", ["step_00000002", "step_00000002.diverged", "step_2_copy", "good"])
def test_a_checkpoint_is_taken_by_any_name_of_its_folder_and_refused_if_damaged(tmp_path, name):
    save(RunDir(tmp_path / "run"), 2)
    copy = (RunDir(tmp_path / "run").checkpoints / "step_00000002").rename(tmp_path / name)
    found = find(copy)
    assert (found.folder, found.is_model) == (copy, False)
    (copy / "state_0.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=rf"{name} is damaged \(state_0\.safetensors is missing\)\. Take another one"
    ):
        find(copy)


def test_a_prepared_corpus_is_no_damaged_checkpoint(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no weights to start with"):
        find(tmp_path)


def test_matrices_side_by_side_are_not_taken_where_only_their_sum_is_the_same():
    """Keys of 4 and values of 4, or of 3 and 6: 12 rows a head either way."""
    fit = compare(model_of(key_size=3, value_size=6), weights_of(model_of(key_size=4, value_size=4)), HERE, HERE)
    assert not [name for name in fit.taken if "self_attention." in name]
    assert "encoder_layers.0.self_attention.query_key_value.weight" in names(fit, OTHER_HEADS)


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [("norm", "deepnorm", "post"), ("activation", "relu", "gelu"), ("positions", "sinusoidal", "rotary")],
)
def test_what_is_computed_otherwise_with_the_same_tensors_is_named_and_refused_unless_partially(name, there, here):
    model, source = model_of(seed=1, **{name: here}), model_of(seed=2, **{name: there})
    assert set(weights_of(model)) == set(weights_of(source))
    before, after = (Origin(2, HERE.tokenizers, form_of({name: form, "d_ff": 12})) for form in (there, here))
    with pytest.raises(UserError, match=rf"model: {name} \({there} there, {here} here\)"):
        load(model, source, before, after)
    fit = load(model, source, before, after, partially=True)
    assert names(fit, OTHER_FORM) == {f"model.{name}"}
    assert all(torch.equal(value, weights_of(source)[name]) for name, value in weights_of(model).items())


def test_a_setting_that_an_older_checkpoint_does_not_tell_is_not_held_against_it():
    there, here = (
        Origin(2, HERE.tokenizers, form_of(settings)) for settings in ({"norm": "post"}, ModelConfig().model_dump())
    )
    assert set(here.form) == set(FORM)
    assert compare(model_of(), weights_of(model_of()), there, here).others == ()


@pytest.mark.parametrize(
    ("state", "step", "is_told"), [("stopped", 20, True), ("finished", 20, False), ("stopped", 120, False)]
)
def test_a_model_that_training_has_left_behind_is_taken_with_one_warning(
    tmp_path, capsys, monkeypatch, state, step, is_told
):
    """At the end of a run the model may be that of an earlier, better step."""
    monkeypatch.delenv("RANK", raising=False)
    write_json(tmp_path / "model" / "config.json", {"step": step})
    (tmp_path / "model" / "model.safetensors").touch()
    write_json(tmp_path / "run.json", {"state": state})
    for number in (20, 120):
        (tmp_path / "checkpoints" / f"step_{number:08d}").mkdir(parents=True)
    assert model_folder_of(tmp_path) == find(tmp_path).folder == tmp_path / "model"
    text = (
        f"warning: {tmp_path}/model is of step 20, the newest checkpoint of step 120: `dist-transformer average {tmp_path}` "
        "makes a model of it\n"
    )
    assert capsys.readouterr().err == (text if is_told else "")
