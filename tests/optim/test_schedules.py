"""Schedules at their key steps."""

import numpy as np
import pytest

from glm5_jax import config_checks
from glm5_jax.config import OptimConfig, TrainConfig
from glm5_jax.errors import UserError
from glm5_jax.optim import schedules


def rates(name, steps, total=1000, **changes):
  rate = schedules.make_schedule(OptimConfig(schedule=name, **changes), total)
  return [float(rate(step)) for step in steps]


def close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_cosine_with_warmup():
  values = rates("cosine", [0, 49, 99, 100, 550, 1000, 5000], peak_lr=2e-4, final_lr=4e-5, warmup_steps=100)
  close(values, [2e-6, 1e-4, 2e-4, 2e-4, 1.2e-4, 4e-5, 4e-5])


def test_linear_and_constant():
  close(rates("linear", [0, 500, 1000], peak_lr=4e-5, final_lr=1e-5, warmup_steps=0), [4e-5, 2.5e-5, 1e-5])
  close(rates("constant", [0, 1, 999], peak_lr=1e-5, warmup_steps=2), [5e-6, 1e-5, 1e-5])


def test_decay_steps_overrides_the_run_length():
  close(
    rates("linear", [50, 100, 1000], peak_lr=2.0, final_lr=1.0, warmup_steps=0, decay_steps=100), [1.5, 1, 1]
  )


def test_glm5_stages_set_their_own_rates():
  own = {"peak_lr": 1.0, "final_lr": 0.5, "warmup_steps": 10}
  close(rates("pretrain", [0, 9, 505, 1000], **own), [2e-5, 2e-4, 1.2e-4, 4e-5])
  close(rates("midtrain", [0, 500, 1000], **own), [4e-5, 2.5e-5, 1e-5])
  close(rates("dsa_warmup", [0, 500, 1000], **own), [5e-3, 2.6e-3, 2e-4])
  close(rates("dsa_sparse", [0, 500, 1000], **own), [1e-5, 1e-5, 1e-5])


def test_midtrain_stages_are_one_line_over_tokens():
  """1 T, 0.5 T and 0.05 T tokens of 1.55 T: each stage begins where the one before ends."""
  ends = [rates(f"midtrain_{name}", [0, 1000]) for name in ("32k", "128k", "200k")]
  after_32k, after_128k = 4e-5 - 3e-5 * 1.0 / 1.55, 4e-5 - 3e-5 * 1.5 / 1.55
  close(ends, [[4e-5, after_32k], [after_32k, after_128k], [after_128k, 1e-5]])


def test_unknown_schedule_lists_the_names():
  with pytest.raises(
    UserError, match=r"config\.optim\.schedule='wsd': should be one of cosine, .*dsa_sparse"
  ):
    schedules.make_schedule(OptimConfig(schedule="wsd"), 10)


def test_config_accepts_exactly_these_names():
  assert set(config_checks.SCHEDULES) == {*schedules.SHAPES, *schedules.STAGES}


def test_batch_warmup():
  train = TrainConfig(batch_size=64, batch_warmup="16:500,32:1000")
  assert [schedules.batch_size_at(train, s) for s in (0, 499, 500, 999, 1000, 10**6)] == [
    16,
    16,
    32,
    32,
    64,
    64,
  ]
  assert schedules.batch_size_at(TrainConfig(batch_size=64), 0) == 64


@pytest.mark.parametrize("text", ["16", "16:500,32:400", "16:a", "0:5", "16:500;32:900", "-4:100"])
def test_malformed_batch_warmup(text):
  with pytest.raises(UserError, match=r"config\.train\.batch_warmup"):
    schedules.batch_size_at(TrainConfig(batch_warmup=text), 0)


def test_mtp_weight_and_bias_rate_switch_together():
  train = TrainConfig(steps=1000, mtp_switch=0.55)
  close([schedules.mtp_weight(train, s) for s in (0, 549, 550, 999)], [0.3, 0.3, 0.1, 0.1])
  close([schedules.router_bias_rate(train, s) for s in (0, 549, 550, 999)], [1e-3, 1e-3, 0, 0])
