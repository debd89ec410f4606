"""A training run from its config: data, steps, evaluation, checkpoints. The same call resumes it.

A run's folder holds config.json (as resolved), the tokeniser, metrics.jsonl, tensorboard/, loss.png,
checkpoints/ and, where a gradient was not finite, the batch that caused it.
"""

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import RunConfig
from glm5_jax.data.batch import Batch
from glm5_jax.data.pipeline import heldout_batches, make_train_iterator
from glm5_jax.data.records import load_data_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.evals.lm import evaluate_lm
from glm5_jax.model import abstract_params
from glm5_jax.optim.groups import make_optimizer
from glm5_jax.optim.guard import SkipCounts
from glm5_jax.optim.schedules import batch_size_at
from glm5_jax.text.tokenizer import load_tokenizer
from glm5_jax.train.checkpoint import SUBFOLDER, Checkpointer
from glm5_jax.train.flops import peak_flops, train_flops_per_token
from glm5_jax.train.metrics import MetricLog, Stopwatch, duration, progress_line
from glm5_jax.train.report import METRICS_FILE, plot_loss
from glm5_jax.train.state import TrainState, init_state
from glm5_jax.train.step import make_train_step, mtp_depths

BAD_BATCH = "nonfinite_batch.npz"


def train(run: RunConfig, workdir: str | Path, report: Callable[[str], None] = print) -> bool:
  """Runs or resumes the stage of `run` in `workdir`. Returns False if a signal stopped it early.

  SIGTERM and SIGINT finish the step at hand, save, and return; a second SIGINT interrupts at once.

  Raises:
    UserError: impossible config, data or checkpoint; see the modules that check each.
  """
  run.validate()
  _check_devices(run)
  with _Signals() as stop, contextlib.ExitStack() as stack:
    return _Run(run, Path(workdir), report, stack).loop(stop)


def _check_devices(run: RunConfig) -> None:
  sizes = {name: max(size, 1) for name, size in vars(run.mesh).items()}
  needed = int(np.prod(list(sizes.values())))
  if needed > 1:
    wanted = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    raise UserError(
      f"config.mesh asks for {needed} devices ({wanted}); training runs on one device here, set 1"
    )


class _Run:
  """The parts of a run while it is alive; `stack` closes what must be closed."""

  def __init__(
    self, run: RunConfig, workdir: Path, report: Callable[[str], None], stack: contextlib.ExitStack
  ):
    self.run, self.workdir, self.report = run, workdir, report
    tokenizer = load_data_tokenizer(run.data.folder)
    tokenizer.check_fits(run.model.vocab_size, owner=f"config.model ({run.name or 'this run'})")
    self.token_lengths = tokenizer.token_lengths
    self.fingerprint = tokenizer.fingerprint
    workdir.mkdir(parents=True, exist_ok=True)
    self._keep_tokenizer(Path(tokenizer.path))
    self.data = make_train_iterator(
      run.data, batch_size_at(run.train, 0), jax.process_index(), jax.process_count()
    )
    stack.callback(self.data.close)
    self.optimizer = make_optimizer(run.optim, run.model, abstract_params(run.model), run.train.steps)
    self.checkpoints = Checkpointer(workdir / SUBFOLDER, run.train.keep_checkpoints, run)
    stack.callback(self.checkpoints.close)
    self.state = self._initial_state()
    self.step = int(self.state.step)
    (workdir / "config.json").write_text(run.to_json() + "\n")
    self.log = MetricLog(workdir, self.step)
    stack.callback(self.log.close)
    self.train_step = make_train_step(run, self.optimizer)
    self.watch = Stopwatch()
    self.lap_steps = self.lap_tokens = 0  # since the last logged step

  def _keep_tokenizer(self, source: Path) -> None:
    """Copies the tokeniser beside the checkpoints, so that the run's folder is all one needs."""
    target = self.workdir / source.name
    if target.exists() and load_tokenizer(target).fingerprint != self.fingerprint:
      raise UserError(f"{target} is another tokeniser than {source}; use the data folder this run began with")
    if not target.exists():
      shutil.copyfile(source, target)

  def _initial_state(self) -> TrainState:
    step = self.checkpoints.latest_step()
    if step is None:
      return init_state(self.run, self.optimizer)
    abstract = jax.eval_shape(lambda: init_state(self.run, self.optimizer))
    state, data_state, extra = self.checkpoints.restore(step, abstract)
    if extra["tokenizer"] != self.fingerprint:
      raise UserError(
        f"the checkpoint in {self.checkpoints.folder} was trained with tokeniser {extra['tokenizer']}, "
        f"data.folder {self.run.data.folder} has {self.fingerprint}; use the data it was trained on"
      )
    self.data.set_state(data_state)
    self.report(f"resuming from step {step} in {self.workdir}")
    return state

  def loop(self, stop: "_Signals") -> bool:
    train = self.run.train
    if self.step >= train.steps:
      self.report(f"step {self.step} of {train.steps} is reached already; raise train.steps to go on")
      return True
    self._announce()
    self.watch.lap()
    while self.step < train.steps and not stop.requested:
      batch = self._next_batch()
      with _profile(train.profile_steps, self.step, self.workdir):
        self.state, metrics = self.train_step(self.state, _on_device(batch))
      self.step += 1
      self.lap_steps += 1
      self.lap_tokens += batch.tokens.size * jax.process_count()
      self._check_finite(batch, metrics)
      if self.step % train.log_every == 0 or self.step == train.steps:
        self._log(metrics)
      if self.step % train.eval_every == 0 or self.step == train.steps:
        self._evaluate()
      if self.step % train.checkpoint_every == 0 or self.step == train.steps:
        self._save()
    if stop.requested:
      self._save()
    self.checkpoints.wait()
    self._plot()
    if stop.requested and self.step < train.steps:
      self.report(f"stopped by {stop.name} and saved at step {self.step}; the same command goes on")
    return self.step >= train.steps

  def _announce(self) -> None:
    run = self.run
    flops, source = peak_flops()
    self.peak_flops = flops
    self.flops_per_token = train_flops_per_token(run.model, run.data.seq_len, mtp_depths(run))
    weights = sum(x.size for x in jax.tree.leaves(self.state.params))
    self.report(
      f"{run.name or 'run'}: {weights / 1e6:,.1f} M parameters, {run.optim.name}, {run.train.batch_size} rows "
      f"of {run.data.seq_len} tokens; peak {flops / 1e12:.3g} TFLOP/s ({source}); first step compiles"
    )

  def _next_batch(self) -> Batch:
    with self.watch.waiting_for_data():
      return self.data.next_batch(batch_size_at(self.run.train, self.step))

  def _check_finite(self, batch: Batch, metrics: dict[str, jax.Array]) -> None:
    """Keeps the batch of a skipped step; stops the run after too many in a row."""
    if int(metrics["consecutive_skips"]) == 0:
      return
    path = self.workdir / BAD_BATCH
    np.savez(path, step=self.step, **vars(batch))
    self.report(f"step {self.step}: loss or gradient not finite, update skipped, batch kept in {path}")
    counts = SkipCounts(metrics["skipped"], metrics["consecutive_skips"])
    counts.check(self.run.optim.max_nonfinite, str(path))

  def _log(self, metrics: dict[str, jax.Array]) -> None:
    train = self.run.train
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    seconds, waited = self.watch.lap()
    steps, tokens = self.lap_steps, self.lap_tokens
    self.lap_steps = self.lap_tokens = 0
    values |= {
      "learning_rate": float(self.optimizer.learning_rate(self.step - 1 - values["skipped"])),
      "tokens": float(self.state.tokens),
      "tokens_per_s": tokens / seconds,
      "mfu": tokens / seconds * self.flops_per_token / self.peak_flops,
      "data_wait": waited / seconds,
      "step_s": seconds / steps,
    }
    self.log.write(self.step, values)
    eta = (train.steps - self.step) * values["step_s"]
    self.report(progress_line(self.step, train.steps, values, eta))

  def _evaluate(self) -> None:
    run = self.run
    with self.watch.pause():
      batches = heldout_batches(
        run.data, run.train.batch_size, run.train.eval_rows, jax.process_index(), jax.process_count()
      )
      scores = evaluate_lm(
        self.state.params, run.model, batches, self.token_lengths, run.train.loss_chunk, mtp_depths(run)
      )
      self.log.write(self.step, {f"heldout_{name}": value for name, value in scores.items()})
      self._plot()
    accuracy = " ".join(f"{v:.1%}" for name, v in sorted(scores.items()) if "accuracy" in name)
    self.report(
      f"step {self.step}/{run.train.steps}  held-out {scores['bits_per_byte']:.3f} bits per byte, "
      f"perplexity {scores['perplexity']:.1f}, top-1 {accuracy}"
    )

  def _save(self) -> None:
    with self.watch.pause():
      self.checkpoints.save(self.step, self.state, self.data.get_state(), {"tokenizer": self.fingerprint})

  def _plot(self) -> None:
    if jax.process_index() == 0 and self.log.lines:
      plot_loss(self.workdir / METRICS_FILE, self.workdir / "loss.png")


def _on_device(batch: Batch) -> dict[str, jax.Array]:
  return {name: jnp.asarray(value) for name, value in vars(batch).items()}


@contextlib.contextmanager
def _profile(steps: str, step: int, workdir: Path) -> Iterator[None]:
  """Traces the steps named by train.profile_steps, "begin:end", into <workdir>/profile."""
  begin, _, end = steps.partition(":")
  if steps and step == int(begin):
    jax.profiler.start_trace(str(workdir / "profile"))
  yield
  if steps and step + 1 == int(end):
    jax.effects_barrier()
    jax.profiler.stop_trace()


class _Signals:
  """While entered, SIGTERM and SIGINT set `requested`; a second SIGINT raises KeyboardInterrupt."""

  def __init__(self) -> None:
    self.requested = False
    self.name = ""
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> "_Signals":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, _frame: Any) -> None:
    if self.requested and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.requested, self.name = True, signal.Signals(number).name
