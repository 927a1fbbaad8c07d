"""Which steps are to be validated, as their checkpoints say it."""

from types import SimpleNamespace
from typing import Any

import pytest

from dist_transformer.config.schema import ValidationConfig
from dist_transformer.training.validation.early_stopping import EarlyStopping
from dist_transformer.training.validation.schedule import ValidationSchedule


@pytest.mark.parametrize(("step", "is_last", "is_due"), [(30, False, True), (25, False, False), (25, True, True)])
def test_a_checkpoint_says_that_its_step_is_to_be_validated_also_if_it_is_the_last_one(step, is_last, is_due):
    """A start that goes on from it then validates it for its checkpoint, which may be of the best."""
    settings = ValidationConfig(every_steps=10)
    run: Any = SimpleNamespace(config=SimpleNamespace(validation=settings), ranks=None)
    validator: Any = SimpleNamespace(sets=["validation"])
    schedule = ValidationSchedule(run, validator, EarlyStopping(settings, None), None, {"step": 20}, Any, Any)
    schedule.step_computed(step, is_last)
    assert schedule.state(step)["validation_due"] == is_due
