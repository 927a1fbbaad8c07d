"""Weights of another run or model as the start of a new one: fitting tensors are copied, others reported by name.

A tensor fits if the model has one of the same name, shape and meaning. Shapes alone are not enough: the rows of an
embedding belong to the pieces of one tokenizer, and a projection of attention to its number of heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer

MISSING = "not in the source"
UNKNOWN = "in the source, but not in the model"
OTHER_SHAPE = "of another shape"
OTHER_TOKENIZER = "of another tokenizer, whose pieces are other rows"
OTHER_HEADS = "of attention heads of another number or size"
OTHER_FORM = "settings that no shape tells, but that the weights were trained with"
FORM = ("norm", "norm_type", "activation", "positions")
"""Settings of the model that change the computation without changing the shapes of tensors."""


@dataclass(frozen=True)
class Origin:
    """Meaning of the tensors of a source or of the model to be initialised.

    Attributes:
        tokenizers: SHA-256 of the source and of the target side's sentencepiece model, or its first digits.
        form: the settings of FORM that are known.
    """

    num_heads: int
    tokenizers: tuple[str, str]
    form: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """Result of a comparison: the fitting tensors, and the others as (name, reason, details), sorted by name.

    Among the others are differing settings, such as `model.norm`, that no tensor shows.
    """

    taken: tuple[str, ...]
    others: tuple[tuple[str, str, str], ...]


def form_of(settings: Mapping[str, object]) -> dict[str, str]:
    """The settings of FORM among those of a model."""
    return {name: str(settings[name]) for name in FORM if name in settings}


def load_initial_weights(
    model: Transformer, weights: Mapping[str, Tensor], there: Origin, here: Origin, label: str, partially: bool
) -> Fit:
    """Copies the fitting ones of `weights` into the fp32 model on the CPU and returns the others by name.

    `label` names the source in messages. Every rank calls it with the same arguments; nothing is communicated. Raises
    UserError: a tensor does not fit and `partially` is false, or none fits. The model is then unchanged.
    """
    fit = compare(model, weights, there, here)
    if not fit.taken:
        raise UserError(
            f"training.init_from: nothing of {label} fits this model:\n{fit_text(fit)}\n"
            "Give a run or model of the same shape and tokenizer, or leave training.init_from out"
        )
    if fit.others and not partially:
        raise UserError(
            f"training.init_from: {len(fit.others)} parts of {label} and of this model do not fit each other:\n"
            f"{fit_text(fit)}\nSet training.init_partially=true to take the {len(fit.taken)} that fit and to start the "
            "others anew, or give this run the model section and the tokenizer (tokenizer.source_model) of the source"
        )
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name in fit.taken:
            own[name].copy_(weights[name])
    return fit


def compare(model: Transformer, weights: Mapping[str, Tensor], there: Origin, here: Origin) -> Fit:
    """Compares names, shapes and meaning; tied tensors count once."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    foreign = _foreign_matrices(model, there, here)
    heads = f"{there.num_heads} there, {here.num_heads} here"
    names = set(weights)  # a lookup in the mapping itself may read the tensor
    taken, others = [], [(name, UNKNOWN, "") for name in names - shapes.keys()]
    others += [
        (f"model.{name}", OTHER_FORM, f"{there.form[name]} there, {here.form[name]} here")
        for name in there.form.keys() & here.form.keys()
        if there.form[name] != here.form[name]
    ]
    for name, shape in shapes.items():
        found = tuple(weights[name].shape) if name in names else None
        if found is None:
            others.append((name, MISSING, ""))
        elif name in foreign:
            others.append((name, OTHER_TOKENIZER, ""))
        elif found != shape:
            others.append((name, OTHER_SHAPE, f"{found} there, {shape} here"))
        elif "attention." in name and (there.num_heads != here.num_heads or _value_sizes_differ(name, shapes, weights)):
            others.append((name, OTHER_HEADS, heads))
        else:
            taken.append(name)
    return Fit(tuple(taken), tuple(sorted(others)))


def _value_sizes_differ(name: str, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> bool:
    """True if value sizes differ: the matrices joined in one tensor then differ, even if their total size is equal."""
    output = f"{name.split('attention.')[0]}attention.output.weight"
    return output in weights and tuple(weights[output].shape) != shapes[output]


def fit_text(fit: Fit) -> str:
    """All names that do not fit, grouped by reason, with a line for each layer or other part.

    2 not in the source:
      decoder_layers.1: feed_forward.inner.bias, feed_forward.inner.weight
    """
    lines = []
    for why, of_kind in groupby(sorted(fit.others, key=itemgetter(1)), key=itemgetter(1)):
        entries = list(of_kind)
        lines.append(f"  {len(entries)} {why}:")
        for part, of_part in groupby(entries, key=lambda entry: _part(entry[0])):
            names = [f"{name.removeprefix(part + '.')}{details and f' ({details})'}" for name, _, details in of_part]
            lines.append(f"    {part}: {', '.join(names)}")
    return "\n".join(lines) or "  everything fits"


def _part(name: str) -> str:
    """`decoder_layers.1` for `decoder_layers.1.feed_forward.inner.bias`; the module for any other name."""
    words = name.split(".")
    is_layer = len(words) > 2 and words[1].isdigit()
    return ".".join(words[:2] if is_layer else words[:-1]) or name


def _foreign_matrices(model: Transformer, there: Origin, here: Origin) -> set[str]:
    """Names of the matrices whose rows are pieces of another tokenizer."""
    # A checkpoint keeps the first digits only.
    differs = [not (a.startswith(b) or b.startswith(a)) for a, b in zip(there.tokenizers, here.tokenizers, strict=True)]
    of_source, of_target = {"source_embedding.weight"}, {"target_embedding.weight", "output.weight", "output_bias"}
    if model.target_embedding is model.source_embedding:
        of_target |= of_source
    return (of_source if differs[0] else set()) | (of_target if differs[1] else set())
