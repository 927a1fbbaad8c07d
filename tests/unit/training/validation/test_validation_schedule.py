"""Which steps are to be validated, as their checkpoints say it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dist_transformer.config.schema import Config, ValidationConfig
from dist_transformer.distributed.rounds import WorkFailed
from dist_transformer.errors import UserError
from dist_transformer.training.validation import translation
from dist_transformer.training.validation.runner import Validated
from dist_transformer.training.validation.schedule import EarlyStopping, ValidationSchedule


@pytest.mark.parametrize(("step", "is_last", "is_due"), [(30, False, True), (25, False, False), (25, True, True)])
def test_a_checkpoint_says_that_its_step_is_to_be_validated_also_if_it_is_the_last_one(step, is_last, is_due):
    """A start that goes on from it then validates it for its checkpoint, which may be of the best."""
    settings = ValidationConfig(every_steps=10)
    run: Any = SimpleNamespace(config=SimpleNamespace(validation=settings), ranks=None)
    validator: Any = SimpleNamespace(sets=["validation"])
    schedule = ValidationSchedule(run, validator, EarlyStopping(settings, None), None, {"step": 20}, Any, Any)
    schedule.step_computed(step, is_last)
    assert schedule.state(step)["validation_due"] == is_due


def test_a_validation_of_which_only_the_step_is_known_is_made_and_counted_no_second_time() -> None:
    """Its measures are of a former kind."""
    settings = ValidationConfig(every_steps=10)
    run: Any = SimpleNamespace(config=SimpleNamespace(validation=settings), ranks=None)
    validator: Any = SimpleNamespace(sets=["validation"], validate=Mock())
    schedule = ValidationSchedule(run, validator, EarlyStopping(settings, None), Mock(), {"step": 30}, Any, Any)
    schedule.restore({"step": 30, "validation_due": True}, {})
    schedule.make_up(30, Mock())
    assert schedule.state(30)["early_stopping"] == EarlyStopping(settings, None).state()
    assert not schedule.is_due
    assert not validator.validate.called


@pytest.mark.parametrize(
    ("then", "now", "begins_anew"),
    [
        ("tok:13a|version:2.6.0", "tok:zh|version:2.6.0", True),
        ("tok:zh|version:2.5.1", "tok:zh|version:2.6.0", False),
        (None, "tok:zh|version:2.6.0", False),
    ],
)
def test_the_best_begins_anew_where_a_start_cuts_words_otherwise_than_the_one_before(then, now, begins_anew):
    settings = ValidationConfig(every_steps=10, metric="bleu")
    run: Any = SimpleNamespace(config=SimpleNamespace(validation=settings), ranks=None)
    validator: Any = SimpleNamespace(
        sets=["validation"], validate=lambda step, _: Validated({"bleu": 20.0, "bleu_signature": now}, [])
    )
    stopping = EarlyStopping(settings, {"metric": "bleu", "best": 30.0, "best_step": 10, "num_since": 0})
    bar: Any = SimpleNamespace(show_score=lambda *_: None)
    newest = {"step": 20, **({} if then is None else {"bleu_signature": then})}
    schedule = ValidationSchedule(run, validator, stopping, None, newest, bar, lambda _: None)
    for step in (30, 40):
        schedule.validate(step, lambda: None)
    state = schedule.state(40)["early_stopping"]
    assert (state["best_step"], state["num_since"]) == ((30, 1) if begins_anew else (10, 2))
    assert schedule.state(40)["validation"] == {"bleu": 20.0, "bleu_signature": now}  # retention compares by it


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("out of memory in the loss of a validation: 1.0 GB more were asked for", UserError),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB", UserError),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", WorkFailed),
        ("no memory left in the loss of a validation: other processes hold 30.0 GB", WorkFailed),
    ],
)
def test_a_dry_run_takes_only_a_lack_of_memory_for_a_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, said: str, kind: type[UserError]
) -> None:
    monkeypatch.setattr(translation, "load_tokenizer", Mock())
    device = torch.device("cpu")
    run: Any = SimpleNamespace(
        config=Config(data={"train": {"demo": "train"}}), ranks=SimpleNamespace(device=device), doing=Mock(),
        data=SimpleNamespace(folder=None, manifest=SimpleNamespace(tokenizer=None)),
    )  # fmt: skip
    validator: Any = SimpleNamespace(sets=[], dry_run=Mock(side_effect=WorkFailed(f"rank 1: {said}").agreed()))
    with pytest.raises(UserError, match=said) as raised:
        translation.dry_run_of_validation(run, validator)
    assert raised.type is kind
    assert raised.value.exit_code == (2 if kind is UserError else 1)
    assert raised.value.is_agreed
    assert ("lower data.max_tokens, decoding.max_tokens" in str(raised.value)) is (kind is UserError)
