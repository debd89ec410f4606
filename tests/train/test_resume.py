"""Which changes of config and shape a resumed run may have."""

import json

import jax.numpy as jnp
import pytest

from glm5_jax.config import TrainConfig
from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint import load_params_checkpoint
from glm5_jax.train.resume import MAY_CHANGE, check_resume, compare_configs
from tests.train.checkpoint_state import assert_bit_equal, config, restore


def test_another_architecture_names_leaf_and_field(saved, state):
  other = state | {"params": state["params"] | {"embed": jnp.zeros((256, 64))}}
  with pytest.raises(UserError) as error:
    restore(saved, other, run_config=config(vocab_size=256))
  assert "model.vocab_size was 128 and is now 256" in str(error.value)
  assert "params/embed is float32[128, 64] there and float32[256, 64] here" in str(error.value)
  with pytest.raises(
    UserError, match=r"architecture: params/embed is \[128, 64\] there .* model.vocab_size=128"
  ):
    load_params_checkpoint(saved, abstract_params=other["params"])


def test_missing_and_surplus_leaves_are_named(saved, state):
  more = state | {"params": state["params"] | {"head": jnp.zeros((64, 128))}}
  with pytest.raises(UserError, match=r"params/head is absent there and float32\[64, 128\] here"):
    restore(saved, more)
  fewer = {name: value for name, value in state.items() if name != "rng"}
  with pytest.raises(UserError, match=r"rng is uint32\[2\] there and absent here"):
    restore(saved, fewer)


@pytest.mark.parametrize(
  ("field", "value"),
  [("optim.name", "adamw"), ("data.seq_len", 256), ("train.seed", 1), ("train.batch_size", 16)],
)
def test_a_changed_field_is_refused_with_both_values(field, value, saved, state):
  section, name = field.split(".")
  run_config = config()
  old = getattr(getattr(run_config, section), name)
  setattr(getattr(run_config, section), name, value)
  with pytest.raises(UserError) as error:
    restore(saved, state, run_config=run_config)
  assert f"cannot resume from {saved}/2: {field} was {old!r} and is now {value!r}; set it back" in str(
    error.value
  )
  assert "\n" not in str(error.value)


def test_fields_of_pace_and_place_may_change(saved, state):
  run_config = config(remat="full")
  run_config.train = TrainConfig(steps=5, log_every=1, eval_every=2, checkpoint_every=3, keep_checkpoints=9)
  run_config.data.folder = "elsewhere"
  assert_bit_equal(restore(saved, state, run_config=run_config)[0], state)
  differences = check_resume(config(), run_config, where="here")
  assert {d.field for d in differences} >= {"train.steps", "data.folder", "model.remat"}


def test_every_difference_is_found_and_every_name_exists():
  assert compare_configs(config(), config()) == []
  assert [tuple(d) for d in compare_configs(config(), config(hidden_size=32))] == [
    ("model.hidden_size", 64, 32)
  ]
  fields = {
    f"{section}.{name}" if isinstance(values, dict) else section
    for section, values in json.loads(config().to_json()).items()
    for name in (values if isinstance(values, dict) else [""])
  }
  assert fields >= MAY_CHANGE
