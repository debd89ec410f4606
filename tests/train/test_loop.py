"""Runs that are repeated, interrupted, extended, poisoned and refused."""

import fcntl
import json
import pathlib
import shutil
import signal

import numpy as np
import pytest

from glm5_jax.config import RunConfig
from glm5_jax.data.prepare import PrepareConfig, prepare
from glm5_jax.errors import UserError
from glm5_jax.train import loop
from glm5_jax.train.checkpoint_files import complete_steps
from glm5_jax.train.loop import BAD_BATCH, train
from tests.train.small_run import PLAIN, Lines, contents, entries, metrics, saved, small_run

ACCUMULATED = {"train.grad_accum": 2, "train.batch_warmup": "2:3", "data.packing": "best_fit"}
# Fields that the compiled step does not depend on.
OF_THE_LOOP = ("log_every", "eval_every", "eval_rows", "checkpoint_every", "keep_checkpoints", "seed")


@pytest.fixture(autouse=True, scope="module")
def one_step_for_equal_runs():
  """Runs with the same step share its compiled program: a process of its own would trace it again."""
  steps = {}
  make = loop.make_train_step

  def shared(run, optimizer, mesh):
    of_step = RunConfig.from_json(run.to_json())
    for name in OF_THE_LOOP:
      setattr(of_step.train, name, 1)
    key = (of_step.model, of_step.optim, of_step.train)
    if key not in steps:
      steps[key] = make(run, optimizer, mesh)
    return steps[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, "make_train_step", shared)
    yield


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
  """A run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("run") / "finished"
  assert train(small_run(data), workdir, Lines())
  return workdir


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
  """A finished run of the plain model."""
  workdir = tmp_path_factory.mktemp("run") / "plain"
  assert train(small_run(data, **PLAIN), workdir, Lines())
  return workdir


@pytest.fixture
def copy(plain, tmp_path):
  """A copy of it to spoil."""
  return pathlib.Path(shutil.copytree(plain, tmp_path / "copy"))


def plain_run(data, **fields):
  return small_run(data, **(PLAIN | fields))


def refused(run, workdir) -> str:
  """The one line with which a run is refused."""
  with pytest.raises(UserError) as caught:
    train(run, workdir, Lines())
  assert "\n" not in str(caught.value)
  return str(caught.value)


def assert_same_run(workdir, other):
  assert saved(workdir) == saved(other)
  assert metrics(workdir) == metrics(other)


# Reproducible


def test_same_seed_is_bit_equal_and_another_is_not(data, finished, tmp_path):
  assert train(small_run(data), tmp_path / "again", Lines())
  assert_same_run(tmp_path / "again", finished)
  assert train(small_run(data, **{"train.seed": 1}), tmp_path / "other", Lines())
  ours, theirs = saved(finished)["checksums"], saved(tmp_path / "other")["checksums"]
  assert ours["rng"] != theirs["rng"] and ours["params/embed"] != theirs["params/embed"]


def test_evaluating_and_saving_more_often_changes_nothing(data, finished, tmp_path):
  often = small_run(data, **{"train.eval_every": 1, "train.checkpoint_every": 1})
  assert train(often, tmp_path, Lines())
  assert saved(tmp_path) == saved(finished)
  assert metrics(tmp_path, training_only=True) == metrics(finished, training_only=True)


@pytest.mark.parametrize(
  ("at", "number", "step"),
  [
    ("parameters", signal.SIGTERM, 0),  # before the first step
    ("compiled", signal.SIGINT, 1),  # during the first
    ("step 2/6  loss", signal.SIGTERM, 2),  # at a checkpoint
    ("step 3/6  loss", signal.SIGTERM, 3),  # before an evaluation
    ("step 3/6  held-out", signal.SIGTERM, 3),
    ("step 6/6  loss", signal.SIGTERM, 6),  # before the last evaluation
  ],
)
def test_interrupted_and_resumed_is_bit_equal(data, finished, tmp_path, at, number, step):
  first, second = Lines(at, (number,)), Lines()
  assert not train(small_run(data), tmp_path, first)
  assert complete_steps(tmp_path / "checkpoints")[-1] == step
  assert first.lines[-1] == f"stopped by {number.name} and saved at step {step}; the same command goes on"
  assert train(small_run(data), tmp_path, second)
  assert second.lines[0] == f"resuming from step {step} in {tmp_path}"
  assert_same_run(tmp_path, finished)


def test_signal_during_an_evaluation_leaves_it_to_the_resumed_run(data, finished, tmp_path, monkeypatch):
  heldout = loop.heldout_batches

  def interrupted(*arguments):
    for i, batch in enumerate(heldout(*arguments)):
      if i == 1:
        signal.raise_signal(signal.SIGTERM)
      yield batch

  monkeypatch.setattr(loop, "heldout_batches", interrupted)
  assert not train(small_run(data), tmp_path, Lines())
  assert [entry["step"] for entry in metrics(tmp_path)] == [1, 2, 3]
  monkeypatch.undo()
  assert train(small_run(data), tmp_path, Lines())
  assert_same_run(tmp_path, finished)


def test_crash_between_checkpoints_is_done_again(data, finished, tmp_path):
  """Lines after the checkpoint go, and so does the one that the crash tore."""

  class Crash(Exception):
    pass

  def report(line):
    if line.startswith("step 5/6"):
      raise Crash

  with pytest.raises(Crash):
    train(small_run(data), tmp_path, report)
  assert complete_steps(tmp_path / "checkpoints")[-1] == 4
  assert [entry["step"] for entry in metrics(tmp_path)][-1] == 5
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 6, "lo')
  assert train(small_run(data), tmp_path, Lines())
  assert_same_run(tmp_path, finished)


@pytest.mark.slow
def test_resume_with_accumulation_growing_batches_and_best_fit(data, tmp_path):
  run = small_run(data, **ACCUMULATED)
  assert train(run, tmp_path / "whole", Lines())
  for at in ("step 1/6  loss", "step 4/6  loss"):  # before and after the batch has grown
    train(run, tmp_path / "parts", Lines(at, (signal.SIGTERM,)))
  assert train(run, tmp_path / "parts", Lines())
  assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_second_interrupt_stops_at_once_and_gives_the_signals_back(data, tmp_path):
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  with pytest.raises(KeyboardInterrupt):
    train(plain_run(data), tmp_path, Lines("step 3/6  loss", (signal.SIGTERM, signal.SIGINT)))
  assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
  assert complete_steps(tmp_path / "checkpoints") == [2]


# Going on


def test_past_the_last_step_nothing_is_touched(data, copy):
  before = contents(copy)
  lines = Lines()
  assert train(plain_run(data, name="again"), copy, lines)
  assert lines.lines[-1] == "step 6 of 6 is reached already; raise train.steps to go on"
  assert contents(copy) == before


def test_more_steps_continue_and_the_stretched_schedules_are_named(data, copy):
  lines = Lines()
  assert train(plain_run(data, **{"train.steps": 8}), copy, lines)
  assert lines.lines[0].endswith("train.steps 6 → 8; schedules that are a share of the steps stretch with it")
  steps = [entry["step"] for entry in metrics(copy, training_only=True)]
  assert steps == list(range(1, 9))
  assert json.loads((copy / "config.json").read_text())["train"]["steps"] == 8
  assert saved(copy)["at"] == 8


def test_newest_checkpoints_are_kept(data, copy, plain):
  assert complete_steps(plain / "checkpoints") == [4, 6]
  train(plain_run(data, **{"train.steps": 8, "train.keep_checkpoints": 1}), copy, Lines())
  assert complete_steps(copy / "checkpoints") == [8]


# Numbers that are not finite


@pytest.fixture
def poison(monkeypatch):
  """poison(steps): the batches of these steps (1-based, of each run) have weights that are not a number."""

  def poisoned(steps):
    count = 0
    on_devices = loop.on_devices

    def spoil(batch, mesh):
      nonlocal count
      count += 1
      arrays = on_devices(batch, mesh)
      return arrays | {"weights": arrays["weights"] * np.nan} if count in steps else arrays

    monkeypatch.setattr(loop, "on_devices", spoil)

  return poisoned


def test_non_finite_step_is_skipped_counted_and_its_batch_kept(data, tmp_path, poison):
  poison({3})
  run = plain_run(data, **{"train.checkpoint_every": 1, "train.keep_checkpoints": 9, "train.eval_every": 9})
  lines = Lines()
  assert train(run, tmp_path, lines)
  assert [entry["skipped"] for entry in metrics(tmp_path, training_only=True)] == [0, 0, 1, 1, 1, 1]
  assert [entry["consecutive_skips"] for entry in metrics(tmp_path, training_only=True)] == [0, 0, 1, 0, 0, 0]
  assert [entry["loss"] is None for entry in metrics(tmp_path, training_only=True)] == [
    *(False, False, True, False, False, False)
  ]
  before, after = saved(tmp_path, 2)["checksums"], saved(tmp_path, 3)["checksums"]
  changed = {name for name in before if before[name] != after[name]}
  assert {"step", "skipped/total", "skipped/consecutive"} <= changed
  assert not {name for name in changed if name.startswith(("params", "opt_state"))}
  assert saved(tmp_path, 4)["checksums"]["params/embed"] != after["params/embed"]
  assert (
    len(lines.matching(r"^step 3: loss or gradient not finite, update skipped, batch kept in .*npz")) == 1
  )
  kept = np.load(tmp_path / BAD_BATCH)
  assert kept["step"] == 3 and kept["tokens"].shape == (4, 32) and np.isfinite(kept["weights"]).all()


def test_run_stops_after_too_many_skips_and_counts_them_across_a_resume(data, tmp_path, poison):
  """The limit is reached by one skip before the interruption and two after it."""
  poison({2, 3, 4})
  run = plain_run(data, **{"optim.max_nonfinite": 3, "train.checkpoint_every": 9})
  assert not train(run, tmp_path, Lines("step 2/6", (signal.SIGTERM,)))
  poison({1, 2, 3})
  message = refused(run, tmp_path)
  assert message.startswith("loss or gradient not finite in 3 steps in a row")
  assert str(tmp_path / BAD_BATCH) in message and "optim.peak_lr" in message
  assert int(np.load(tmp_path / BAD_BATCH)["step"]) == 4
  assert complete_steps(tmp_path / "checkpoints") == [2]


# Refused: one line, and nothing lost


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"model.hidden_size": 48}, "model.hidden_size was 64 and is now 48"),
    ({"optim.peak_lr": 1e-2}, "optim.peak_lr was 0.002 and is now 0.01"),
    ({"data.seq_len": 16}, "data.seq_len was 32 and is now 16"),
    ({"data.folder": "nowhere"}, "data.folder nowhere does not exist"),
    ({"data.folder": ""}, "launch.prepare"),
    ({"model.vocab_size": 300}, "set model.vocab_size to at least 360"),
    ({"mesh.fsdp": 4}, "config.mesh: fsdp 4 needs a multiple of 4 devices, 1 found"),
    ({"train.batch_size": 0}, "config.train.batch_size=0: should be at least 1"),
  ],
)
def test_changed_or_impossible_config_is_refused_on_resume(data, copy, fields, said):
  before = contents(copy)
  assert said in refused(plain_run(data, **{"train.steps": 8, **fields}), copy)
  assert contents(copy) == before


def test_unfinished_data_folder_is_refused(data, tmp_path):
  shutil.copytree(data, tmp_path / "data")
  (tmp_path / "data" / "meta.json").unlink()
  assert "is no finished data folder" in refused(plain_run(str(tmp_path / "data")), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_data_without_held_out_text_is_refused_before_the_first_step(data, tmp_path):
  shutil.copytree(data, tmp_path / "data")
  meta = json.loads((tmp_path / "data" / "meta.json").read_text())
  meta["heldout"] = {"files": 0, "documents": 0, "tokens": 0, "text_bytes": 0, "shards": {}}
  (tmp_path / "data" / "meta.json").write_text(json.dumps(meta))
  assert "heldout" in refused(plain_run(str(tmp_path / "data")), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_other_data_of_the_same_tokenizer_is_refused_on_resume(data, copy, tmp_path):
  other = tmp_path / "other"
  shutil.copytree(data, other)
  meta = json.loads((other / "meta.json").read_text())
  (other / "meta.json").write_text(json.dumps(meta | {"arguments": meta["arguments"] | {"seed": 1}}))
  before = contents(copy)
  message = refused(plain_run(str(other), **{"train.steps": 8}), copy)
  assert message.startswith("content of data.folder was ") and contents(copy) == before


def test_another_tokenizer_is_refused_on_resume(data, copy, tmp_path):
  texts = tmp_path / "texts"
  texts.mkdir()
  for i in range(30):
    (texts / f"{i}.txt").write_text(f"Another language altogether, number {i}: " + "lorem ipsum dolor " * i)
  other = str(tmp_path / "other")
  prepare(PrepareConfig(other, [str(texts)], vocab_size=340, heldout=0.2), report=lambda line: None)
  before = contents(copy)
  message = refused(plain_run(other, **{"train.steps": 8}), copy)
  assert "is another tokenizer than" in message and "data.folder" in message
  assert contents(copy) == before
  # The checkpoint knows its tokeniser by itself.
  (copy / "tokenizer.model").unlink()
  message = refused(plain_run(other, **{"train.steps": 8}), copy)
  assert "was trained with" in message and str(copy / "checkpoints") in message
  assert not (copy / "tokenizer.model").exists()


def test_damaged_newest_checkpoint_is_named_and_moving_it_away_resumes(data, plain, copy):
  largest = max((copy / "checkpoints" / "6" / "state").rglob("*"), key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
  before = contents(copy)
  message = refused(plain_run(data), copy)
  assert f"checkpoint {copy / 'checkpoints' / '6'} is damaged" in message and "use step 4" in message
  assert contents(copy) == before
  shutil.rmtree(copy / "checkpoints" / "6")
  assert train(plain_run(data), copy, Lines())
  assert_same_run(copy, plain)


def test_incomplete_newest_checkpoint_is_set_aside(data, plain, copy):
  (copy / "checkpoints" / "6" / "commit_success.txt").unlink()
  lines = Lines()
  assert train(plain_run(data), copy, lines)
  assert lines.lines[0] == f"resuming from step 4 in {copy}"
  assert_same_run(copy, plain)


def test_unwritable_plot_is_no_reason_to_stop(data, tmp_path):
  (tmp_path / "loss.png").mkdir()
  lines = Lines()
  assert train(plain_run(data), tmp_path, lines)
  assert lines.matching("loss.png is not written: Is a directory")


def test_folder_that_cannot_be_made_is_refused(data, tmp_path):
  (tmp_path / "file").touch()
  message = refused(plain_run(data), tmp_path / "file" / "run")
  assert str(tmp_path / "file" / "run") in message and "Not a directory" in message


def test_folder_of_something_else_is_refused(data, tmp_path):
  (tmp_path / "config.json").write_text('{"model_type": "glm_moe_dsa"}')
  message = refused(plain_run(data), tmp_path)
  assert message == f"{tmp_path / 'config.json'} is not the config of a training run; give another --workdir"
  assert contents(tmp_path) == {"config.json": b'{"model_type": "glm_moe_dsa"}'}


def test_folder_in_use_is_refused(data, tmp_path):
  with (tmp_path / "lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "is in use by another run" in refused(plain_run(data), tmp_path)
  assert train(plain_run(data), tmp_path, Lines())


# What a run leaves


PER_STEP = {
  *("step", "loss", "lm_loss", "mtp_loss_1", "mtp_loss_2", "accuracy", "mtp_accuracy_1", "mtp_accuracy_2"),
  *("balance_loss", "grad_norm", "update_norm_muon", "update_norm_adamw", "update_norm_adamw_no_decay"),
  *("router_load_violation", "learning_rate", "skipped", "consecutive_skips", "tokens"),
  *("tokens_per_s", "mfu", "data_wait", "step_s"),
}
HELD_OUT = {
  *("step", "heldout_bpb", "heldout_perplexity", "heldout_loss", "heldout_accuracy"),
  *("heldout_mtp_loss_1", "heldout_mtp_loss_2", "heldout_mtp_accuracy_1", "heldout_mtp_accuracy_2"),
  *("heldout_tokens", "heldout_bytes"),
}


def test_metrics_of_every_step(finished):
  lines = list(entries(finished))
  assert [(entry["step"], "heldout_bpb" in entry) for entry in lines] == [
    *((1, False), (2, False), (3, False), (3, True), (4, False), (5, False), (6, False), (6, True))
  ]
  for entry in lines:
    assert entry.keys() == (HELD_OUT if "heldout_bpb" in entry else PER_STEP)
    assert all(value is not None and np.isfinite(value) for value in entry.values())
  steps = [entry for entry in lines if "loss" in entry]
  assert all(entry[name] > 0 for entry in steps for name in PER_STEP if "norm" in name or "loss" in name)
  assert all(entry["tokens_per_s"] > 0 and 0 < entry["mfu"] < 1 for entry in steps)
  assert all(0 <= entry["data_wait"] < 1 for entry in steps)
  rates = [entry["learning_rate"] for entry in steps]
  np.testing.assert_allclose(rates[:3], [1e-3, 2e-3, 2e-3], rtol=1e-6)  # warm-up over two steps, peak 2e-3
  assert rates[2] > rates[3] > rates[4] > rates[5] > 2e-4
  assert steps[-1]["loss"] < steps[0]["loss"]
  # The loss is its parts: λ is 0.3 up to step 3 of 6, then 0.1.
  for entry in steps:
    mtp = (entry["mtp_loss_1"] + entry["mtp_loss_2"]) / 2
    parts = entry["lm_loss"] + (0.3 if entry["step"] <= 3 else 0.1) * mtp + 1e-4 * entry["balance_loss"]
    assert entry["loss"] == pytest.approx(parts, rel=1e-5)


def test_what_a_run_says_and_leaves(data, tmp_path):
  lines = Lines()
  assert train(plain_run(data, name="my run", **{"train.log_every": 4}), tmp_path, lines)
  assert lines.lines[0].startswith("my run: ") and "adamw, 4 rows of 32 tokens on cpu" in lines.lines[0]
  assert len(lines.matching("^step for 4 rows compiled in ")) == 1
  progress = [line.split()[1] for line in lines.matching(r"^step \d/6  loss")]
  assert progress == ["4/6", "6/6"]  # every fourth, and the last
  assert len(lines.matching(r"^step [36]/6  held-out \d\.\d+ bits per byte, perplexity")) == 2
  assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
  assert len(list((tmp_path / "tensorboard").iterdir())) == 1
  assert RunConfig.from_json((tmp_path / "config.json").read_text()).name == "my run"
  kept = (tmp_path / "tokenizer.model").read_bytes()
  assert kept == (pathlib.Path(data) / "tokenizer.model").read_bytes()
  assert not list(tmp_path.rglob("*.partial"))


def test_checkpoints_hold_whole_batches_of_the_data(data, plain, tmp_path):
  """The position saved at a step is before the batch that has been fetched ahead."""
  run = plain_run(data)
  rows = loop.make_train_iterator(run.data, 4)
  for _ in range(4):
    rows.next_batch()
  position = rows.get_state()
  rows.close()
  assert saved(plain, 4)["data"]["json"] == json.loads(json.dumps(position))


@pytest.mark.slow
def test_profile_of_named_steps_also_when_resumed_among_them(data, tmp_path):
  run = plain_run(data, **{"train.profile_steps": "1:4"})
  assert not train(run, tmp_path, Lines("step 2/6  loss", (signal.SIGTERM,)))
  assert len(list(tmp_path.glob("profile/plugins/profile/*"))) == 1
  shutil.rmtree(tmp_path / "profile")
  assert train(run, tmp_path, Lines())
  assert len(list(tmp_path.glob("profile/plugins/profile/*"))) == 1


def test_batches_are_fetched_while_the_step_runs(data, tmp_path, monkeypatch):
  """A batch is asked for when the step before it has been started, and before that one is waited for."""
  order = []
  make, fetch, check = loop.make_train_step, loop._Run._fetch, loop._Run._check_finite

  def note(name, function):
    def noted(*arguments, **named):
      order.append(name)
      return function(*arguments, **named)

    return noted

  monkeypatch.setattr(loop, "make_train_step", lambda *a: note("start", make(*a)))
  monkeypatch.setattr(loop._Run, "_fetch", note("fetch", fetch))
  monkeypatch.setattr(loop._Run, "_check_finite", note("wait", check))
  train(plain_run(data), tmp_path, Lines())
  assert order == ["fetch", *["start", "fetch", "wait"] * 6]
