"""A training run from its config: data, steps, evaluation, checkpoints. The same call resumes it.

A run's folder holds config.json (as resolved), the tokeniser, metrics.jsonl, tensorboard/, loss.png,
checkpoints/, a lock and, where a gradient was not finite, the batch that caused it.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
from glm5_jax.text.tokenizer import TOKENIZER_FILES, load_tokenizer
from glm5_jax.train.checkpoint import SUBFOLDER, Checkpointer, read_description
from glm5_jax.train.checkpoint_files import disk_errors
from glm5_jax.train.flops import peak_flops, train_flops_per_token
from glm5_jax.train.host import ProfileWindow, StopSignals, only_one_in
from glm5_jax.train.metrics import MetricLog, Stopwatch, logged_steps, progress_line, replace_file
from glm5_jax.train.report import METRICS_FILE, plot_loss
from glm5_jax.train.resume import compare_configs
from glm5_jax.train.state import TrainState, init_state
from glm5_jax.train.step import Metrics, make_train_step, mtp_depths

BAD_BATCH = "nonfinite_batch.npz"
HELDOUT = "heldout_bpb"  # bits per byte; the other held-out scores are named heldout_* too


def _print(line: str) -> None:
  print(line, flush=True)  # a log file is watched while the run goes on


def train(run: RunConfig, workdir: str | Path, report: Callable[[str], None] = _print) -> bool:
  """Runs or resumes the stage of `run` in `workdir`. Returns False if a signal stopped it early.

  SIGTERM and SIGINT finish the step at hand, save, and return; a second SIGINT interrupts at once.

  Raises:
    UserError: impossible config, data or checkpoint (see the modules that check each), a full disk, too
      many steps in a row without a finite gradient. What was saved before stays.
  """
  run.validate()
  _check_devices(run)
  with StopSignals() as stop, contextlib.ExitStack() as stack:
    return _Run(run, Path(workdir), report, stop, stack).loop()


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
    self,
    run: RunConfig,
    workdir: Path,
    report: Callable[[str], None],
    stop: StopSignals,
    stack: contextlib.ExitStack,
  ):
    self.run, self.workdir, self.report, self.stop, self.stack = run, workdir, report, stop, stack
    self.writes = jax.process_index() == 0  # config, metrics and plots; checkpoints see to it themselves
    self.tokenizer = load_data_tokenizer(run.data.folder)
    self.tokenizer.check_fits(run.model.vocab_size, owner=f"config.model ({run.name or 'this run'})")
    self.data = make_train_iterator(
      run.data, batch_size_at(run.train, 0), jax.process_index(), jax.process_count()
    )
    stack.callback(self.data.close)
    self._heldout()  # a data folder without held-out text is refused now rather than at the first evaluation
    self.optimizer = make_optimizer(run.optim, run.model, abstract_params(run.model), run.train.steps)
    if self.writes:
      stack.enter_context(only_one_in(workdir))
      self._check_folder()
    self.checkpoints = Checkpointer(workdir / SUBFOLDER, run.train.keep_checkpoints, run)
    stack.callback(self.checkpoints.close)
    self.state = self._initial_state()
    self.step = int(self.state.step)
    self.evaluated_step = self.step if self.step in logged_steps(workdir, HELDOUT) else None

  def _check_folder(self) -> None:
    """Refuses a folder whose files are no run's, or another's, before anything is written there."""
    config = self.workdir / "config.json"
    if config.exists():
      try:
        RunConfig.from_json(config.read_text(encoding="utf-8"))
      except (UserError, ValueError, AttributeError):
        raise UserError(f"{config} is not the config of a training run; give another --workdir") from None
    if any((self.workdir / name).exists() for name in TOKENIZER_FILES):
      found = load_tokenizer(self.workdir)
      if found.fingerprint != self.tokenizer.fingerprint:
        raise UserError(
          f"{found.path} is another tokenizer than {self.tokenizer.path}; "
          "set data.folder to the one this run began with or give another --workdir"
        )

  def _initial_state(self) -> TrainState:
    """The newest checkpoint's, or a fresh one; data that the run did not begin with is refused."""
    step = self.checkpoints.latest_step()
    if step is None:
      # Bound to the device as a restored state is, so that both run the very same compiled step.
      return jax.device_put(init_state(self.run, self.optimizer), jax.local_devices()[0])
    _, saved, extra = read_description(self.checkpoints.folder, step)
    owner = f"the checkpoint in {self.checkpoints.folder}"
    fingerprint = extra.get("tokenizer", self.tokenizer.fingerprint)
    self.tokenizer.check_fits(self.run.model.vocab_size, fingerprint, owner)
    abstract = jax.eval_shape(lambda: init_state(self.run, self.optimizer))
    state, data_state, _ = self.checkpoints.restore(step, abstract)
    assert isinstance(data_state, dict)
    self.data.set_state(data_state)
    changes = [f"{field} {old} → {new}" for field, old, new in compare_configs(saved, self.run)]
    if saved.train.steps != self.run.train.steps:
      changes.append("schedules that are a share of the steps stretch with it")
    self.report(f"resuming from step {step} in {self.workdir}" + "; ".join(["", *changes]))
    return state

  def loop(self) -> bool:
    train = self.run.train
    if self.step >= train.steps and not self._evaluation_due():
      self.report(f"step {self.step} of {train.steps} is reached already; raise train.steps to go on")
      return True
    self._begin()
    if self._evaluation_due():  # a signal or a crash came between a checkpoint and its evaluation
      self._evaluate()
    batch = self._fetch()
    self.watch.lap()
    while self.step < train.steps and not self.stop.requested:
      metrics = self._dispatch(batch)
      done, batch = batch, self._fetch(while_running=metrics)
      self._check_finite(done, metrics)
      if self.step % train.log_every == 0 or self.step == train.steps:
        self._log(metrics)
      if self.step % train.checkpoint_every == 0 or self.step == train.steps:
        self._save()
      if self._evaluation_due() and not self.stop.requested:
        self._evaluate()
    if self.stop.requested:
      self._save()
    self.checkpoints.wait()
    self._plot()
    finished = self.step >= train.steps and not self._evaluation_due()
    if not finished:
      self.report(f"stopped by {self.stop.name} and saved at step {self.step}; the same command goes on")
    return finished

  def _begin(self) -> None:
    """Once nothing can be refused any more: claims the folder, prepares what a step needs, says so."""
    run = self.run
    if self.writes:
      tokenizer = Path(self.tokenizer.path)
      with disk_errors(self.checkpoints.folder, f"writing to {self.workdir}"):
        replace_file(self.workdir / "config.json", (run.to_json() + "\n").encode())
        if not (self.workdir / tokenizer.name).exists():
          replace_file(self.workdir / tokenizer.name, tokenizer.read_bytes())
    self.log = self.stack.enter_context(
      contextlib.closing(MetricLog(self.workdir if self.writes else None, self.step))
    )
    self.profile = self.stack.enter_context(ProfileWindow(run.train.profile_steps, self.workdir / "profile"))
    self.train_step = make_train_step(run, self.optimizer)
    self.compiled: set[tuple[int, int]] = set()  # batch shapes
    self.watch = Stopwatch()
    self.lap_steps = self.lap_tokens = 0  # since the last logged step
    self.peak_flops, source = peak_flops(run.model.dtype)
    self.flops_per_token = train_flops_per_token(run.model, run.data.seq_len, mtp_depths(run))
    weights = sum(x.size for x in jax.tree.leaves(self.state.params))
    device = jax.local_devices()[0].device_kind
    idle = f" (1 of {jax.device_count()} devices)" if jax.device_count() > 1 else ""
    rows = f"{run.train.batch_size} rows of {run.data.seq_len} tokens"
    self.report(
      f"{run.name or 'run'}: {weights / 1e6:,.1f} M parameters, {run.optim.name}, {rows} on {device}{idle}, "
      f"peak {self.peak_flops / 1e12:.3g} TFLOP/s ({source})"
    )

  def _fetch(self, while_running: Metrics | None = None) -> Batch:
    """The batch of the coming step. `self.position` stays before it, for a checkpoint that comes sooner.

    Counts as waiting for data unless the device still worked on `while_running` at the end.
    """
    began = time.perf_counter()
    self.position = self.data.get_state()
    batch = self.data.next_batch(batch_size_at(self.run.train, self.step))
    if while_running is None or while_running["loss"].is_ready():  # type: ignore[attr-defined]
      self.watch.data_wait += time.perf_counter() - began
    return batch

  def _dispatch(self, batch: Batch) -> Metrics:
    """Starts a step and returns before it is computed, except for the first of each shape, which compiles."""
    self.profile.before(self.step)
    began = time.perf_counter()
    self.state, metrics = self.train_step(self.state, _on_device(batch))
    if batch.shape not in self.compiled:
      self.compiled.add(batch.shape)
      spent = time.perf_counter() - began
      self.watch.exclude(spent)
      self.report(f"step for {len(batch.tokens)} rows compiled in {spent:.1f} s")
    self.step += 1
    self.lap_steps += 1
    self.lap_tokens += np.count_nonzero(batch.segment_ids) * jax.process_count()
    return metrics

  def _check_finite(self, batch: Batch, metrics: Metrics) -> None:
    """Waits for the step. Keeps the batch of a skipped one; stops the run after too many in a row."""
    skipped = int(metrics["consecutive_skips"])
    self.profile.after(self.step)
    if not skipped:
      return
    path = self.workdir / BAD_BATCH
    if self.writes:
      with disk_errors(self.checkpoints.folder, f"writing {path}"):
        np.savez(path, step=self.step, **vars(batch))
    self.report(f"step {self.step}: loss or gradient not finite, update skipped, batch kept in {path}")
    counts = SkipCounts(metrics["skipped"], metrics["consecutive_skips"])
    counts.check(self.run.optim.max_nonfinite, str(path))

  def _log(self, metrics: Metrics) -> None:
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

  def _evaluation_due(self) -> bool:
    train = self.run.train
    now = self.step > 0 and (self.step % train.eval_every == 0 or self.step == train.steps)
    return now and self.evaluated_step != self.step

  def _evaluate(self) -> None:
    """Scores the held-out rows; gives up when a signal comes, and the resumed run starts over."""
    run = self.run
    with self.watch.pause():
      batches = itertools.takewhile(self._go_on, self._heldout())
      with contextlib.suppress(_Stopped):
        scores = evaluate_lm(
          self.state.params,
          run.model,
          batches,
          self.tokenizer.token_lengths,
          run.train.loss_chunk,
          mtp_depths(run),
        )
        self.evaluated_step = self.step
        scores["bpb"] = scores.pop("bits_per_byte")
        self.log.write(self.step, {f"heldout_{name}": value for name, value in scores.items()})
        self._plot()
        self._report_scores(scores)

  def _heldout(self) -> Iterator[Batch]:
    run = self.run
    rank, count = jax.process_index(), jax.process_count()
    return heldout_batches(run.data, run.train.batch_size, run.train.eval_rows, rank, count)

  def _go_on(self, _batch: Batch) -> bool:
    if self.stop.requested:
      raise _Stopped
    return True

  def _report_scores(self, scores: dict[str, float]) -> None:
    accuracy = " ".join(f"{v:.1%}" for name, v in sorted(scores.items()) if "accuracy" in name)
    self.report(
      f"step {self.step}/{self.run.train.steps}  held-out {scores['bpb']:.3f} bits per byte, "
      f"perplexity {scores['perplexity']:.1f}, top-1 {accuracy}"
    )

  def _save(self) -> None:
    with self.watch.pause():
      extra = {"tokenizer": self.tokenizer.fingerprint}
      self.checkpoints.save(self.step, self.state, self.position, extra)

  def _plot(self) -> None:
    """A plot that cannot be written is no reason to stop."""
    if not self.writes or not logged_steps(self.workdir, "loss"):
      return
    path = self.workdir / "loss.png"
    try:
      plot_loss(self.workdir / METRICS_FILE, path)
    except OSError as error:
      self.report(f"{path} is not written: {error.strerror}")


class _Stopped(Exception):
  """A signal came in the middle of an evaluation."""


def _on_device(batch: Batch) -> dict[str, jax.Array]:
  return {name: jnp.asarray(value) for name, value in vars(batch).items()}
