"""A value per model lasts as long as its weights, and no longer than its model."""

import copy
import gc
import weakref

import torch
from torch import nn

from tensorlens_tl.models.lifecycle import OncePerWeights, WeightState


def test_a_value_lasts_as_long_as_the_weights():
    model = nn.Linear(2, 2)
    values = OncePerWeights[str]()
    assert values.get(model, WeightState.of(model)) is None
    values.set(model, WeightState.of(model), "first")
    assert values.get(model, WeightState.of(model)) == "first"
    with torch.no_grad():
        model.weight += 1
    assert values.get(model, WeightState.of(model)) is None
    values.set(model, WeightState.of(model), "second")
    assert values.get(model, WeightState.of(model)) == "second"


def test_models_do_not_share_values():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    values = OncePerWeights[str]()
    values.set(model, WeightState.of(model), "one")
    assert values.get(other, WeightState.of(other)) is None


def test_a_copied_state_knows_no_versions_and_so_no_value():
    model = nn.Linear(2, 2)
    values = OncePerWeights[str]()
    copied = copy.deepcopy(WeightState.of(model))
    values.set(model, copied, "of unknown weights")
    assert values.get(model, WeightState.of(model)) is None
    values.set(model, WeightState.of(model), "known")
    assert values.get(model, copied) is None


def test_no_model_is_kept_alive():
    model = nn.Linear(2, 2)
    values = OncePerWeights[str]()
    values.set(model, WeightState.of(model), "value")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
