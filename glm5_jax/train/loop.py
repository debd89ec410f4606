"""A training run from its config: data, steps, evaluation, checkpoints. The same call resumes it.

A run's folder holds config.json (as resolved), the tokeniser, metrics.jsonl, tensorboard/, loss.png,
checkpoints/, a lock and, where a gradient was not finite, the batch that caused it. Several processes of one
run share the folder: process 0 writes it and reports, checkpoints are written by all.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from glm5_jax.config import RunConfig
from glm5_jax.data.batch import Batch
from glm5_jax.data.pipeline import heldout_batches, make_train_iterator, merge_states
from glm5_jax.data.records import load_data_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.evals.lm import evaluate_lm
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.optim.guard import SkipCounts
from glm5_jax.optim.schedules import batch_size_at
from glm5_jax.parallel.distributed import gather_json
from glm5_jax.parallel.rules import param_shardings
from glm5_jax.serve.load import open_model
from glm5_jax.text.tokenizer import TOKENIZER_FILES, load_tokenizer
from glm5_jax.train.checkpoint import SUBFOLDER, Checkpointer, read_description
from glm5_jax.train.checkpoint_files import disk_errors
from glm5_jax.train.flops import peak_flops, train_flops_per_token
from glm5_jax.train.host import ProfileWindow, StopSignals, only_one_in, refused_together
from glm5_jax.train.metrics import MetricLog, Stopwatch, logged_steps, progress_line, replace_file
from glm5_jax.train.placement import all_rows, devices_of, fresh_state, on_devices, parts_of_rows, run_mesh
from glm5_jax.train.report import METRICS_FILE, plot_loss
from glm5_jax.train.resume import compare_configs
from glm5_jax.train.stages import optimizer_of
from glm5_jax.train.state import TrainState, abstract_state
from glm5_jax.train.step import Metrics, make_train_step, mtp_depths

BAD_BATCH = "nonfinite_batch.npz"
HELDOUT = "heldout_bpb"  # bits per byte; the other held-out scores are named heldout_* too


def _print(line: str) -> None:
  print(line, flush=True)  # a log file is watched while the run goes on


def _say_nothing(_line: str) -> None:
  """The report of every process but the first."""


def train(run: RunConfig, workdir: str | Path, report: Callable[[str], None] = _print) -> bool:
  """Runs or resumes the stage of `run` in `workdir`. Returns False if a signal stopped it early.

  Runs on all devices, those of other processes too where `parallel.distributed.start` has joined some; all
  of them call this with the same arguments. A run may go on with other devices, mesh and processes.
  SIGTERM and SIGINT, to any process, finish the step at hand, save, and return; a second SIGINT interrupts
  at once.

  Raises:
    UserError: impossible config, mesh, data or checkpoint (see the modules that check each), a full disk,
      too many steps in a row without a finite gradient. What was saved before stays.
  """
  run.validate()
  with StopSignals() as stop, contextlib.ExitStack() as stack:
    return _Run(run, Path(workdir), report, stop, stack).loop()


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
    self.run, self.workdir, self.stop, self.stack = run, workdir, stop, stack
    self.writes = jax.process_index() == 0  # config, metrics and plots; checkpoints see to it themselves
    self.report = report if self.writes else _say_nothing
    with refused_together():
      self.mesh = run_mesh(run)
      self._open_data()
      self.optimizer = optimizer_of(run, self.mesh)
    with refused_together():
      if self.writes:
        stack.enter_context(only_one_in(workdir))
        self._check_folder()
    self.checkpoints = Checkpointer(workdir / SUBFOLDER, run.train.keep_checkpoints, run)
    stack.callback(self.checkpoints.close)
    self.state = self._initial_state()
    self.step = int(self.state.step)
    evaluated = gather_json(self.step in logged_steps(workdir, HELDOUT))[0]
    self.evaluated_step = self.step if evaluated else None

  def _open_data(self) -> None:
    run = self.run
    self.tokenizer = load_data_tokenizer(run.data.folder)
    self.tokenizer.check_fits(run.model.vocab_size, owner=f"config.model ({run.name or 'this run'})")
    mine, parts = parts_of_rows(self.mesh)
    self.data = make_train_iterator(run.data, batch_size_at(run.train, 0), mine, parts)
    self.stack.callback(self.data.close)
    self.readers = parts // len(mine)  # each of which makes as many rows
    self._heldout()  # a data folder without held-out text is refused now rather than at the first evaluation

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

  def _start_params(self) -> Any:
    """Those of `train.start_from`, on this run's mesh; None without it."""
    run = self.run
    if not run.train.start_from:
      return None
    with refused_together():
      parent = open_model(run.train.start_from)
      parent.check_tokenizer(self.tokenizer)
    self.report(f"starting from {parent.folder}" + ("" if parent.step is None else f", step {parent.step}"))
    shardings = None
    if self.mesh is not None:
      shardings = param_shardings(self.mesh, logical_axes(run.model), abstract_params(run.model))
    return dataclasses.replace(parent, run=run).load_params(shardings)

  def _initial_state(self) -> TrainState:
    """The newest checkpoint's, or a fresh one; data that the run did not begin with is refused."""
    step = self._latest_step()
    if step is None:
      return fresh_state(self.run, self.optimizer, self.mesh, self._start_params())
    _, saved, extra = read_description(self.checkpoints.folder, step)
    owner = f"the checkpoint in {self.checkpoints.folder}"
    fingerprint = extra.get("tokenizer", self.tokenizer.fingerprint)
    self.tokenizer.check_fits(self.run.model.vocab_size, fingerprint, owner)
    abstract = abstract_state(self.run, self.optimizer, self.mesh)
    state, data_state, _ = self.checkpoints.restore(step, abstract)
    assert isinstance(data_state, dict)
    self.data.set_state(data_state)
    changes = [f"{field} {old} → {new}" for field, old, new in compare_configs(saved, self.run)]
    if saved.train.steps != self.run.train.steps:
      changes.append("schedules that are a share of the steps stretch with it")
    self.report(f"resuming from step {step} in {self.workdir}" + "; ".join(["", *changes]))
    return state

  def _latest_step(self) -> int | None:
    found = gather_json(self.checkpoints.latest_step())
    if len(set(found)) > 1:
      raise UserError(
        f"the processes find different steps in {self.checkpoints.folder} ({', '.join(map(str, found))}); "
        "--workdir should be on a disk that all of them share"
      )
    return found[0]

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
    while self.step < train.steps and not self._stopping():
      metrics = self._dispatch(batch)
      done, batch = batch, self._fetch(while_running=metrics)
      self._check_finite(done, metrics)
      if self.step % train.log_every == 0 or self.step == train.steps:
        self._log(metrics)
      if self.step % train.checkpoint_every == 0 or self.step == train.steps:
        self._save()
      if self._evaluation_due() and not self._stopping():
        self._evaluate()
    if self._stopping():
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
    self.train_step = make_train_step(run, self.optimizer, self.mesh)
    self.compiled: set[tuple[int, int]] = set()  # batch shapes
    self.watch = Stopwatch()
    self.lap_steps = self.lap_tokens = 0  # since the last logged step
    peak, source = peak_flops(run.model.dtype)
    self.peak_flops = peak * jax.device_count()
    self.flops_per_token = train_flops_per_token(run.model, run.data.seq_len, mtp_depths(run))
    weights = sum(x.size for x in jax.tree.leaves(self.state.params))
    rows = f"{run.train.batch_size} rows of {run.data.seq_len} tokens"
    where = f"{rows} on {devices_of(self.mesh)}"
    self.report(
      f"{run.name or 'run'}: {weights / 1e6:,.1f} M parameters, {run.optim.name}, {where}, "
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
    self.state, metrics = self.train_step(self.state, on_devices(batch, self.mesh))
    if batch.shape not in self.compiled:
      self.compiled.add(batch.shape)
      spent = time.perf_counter() - began
      self.watch.exclude(spent)
      self.report(f"step for {len(batch.tokens) * self.readers} rows compiled in {spent:.1f} s")
    self.step += 1
    self.lap_steps += 1
    self.lap_tokens += int(np.count_nonzero(batch.segment_ids)) * self.readers
    return metrics

  def _check_finite(self, batch: Batch, metrics: Metrics) -> None:
    """Waits for the step. Keeps the batch of a skipped one; stops the run after too many in a row."""
    if self.mesh is not None:
      jax.block_until_ready(self.state)  # on every device, before another program wants all of them
    skipped = int(metrics["consecutive_skips"])
    self.profile.after(self.step)
    if not skipped:
      return
    path = self.workdir / BAD_BATCH
    rows = all_rows(batch, self.mesh)
    if self.writes:
      with disk_errors(self.checkpoints.folder, f"writing {path}"):
        np.savez(path, step=self.step, **rows)
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
    with self.watch.pause(), contextlib.suppress(_Stopped):
      scores = evaluate_lm(
        self.state.params,
        run.model,
        self._until_stopped(self._heldout()),
        self.tokenizer.token_lengths,
        run.train.loss_chunk,
        mtp_depths(run),
        self.mesh,
      )
      self.evaluated_step = self.step
      scores["bpb"] = scores.pop("bits_per_byte")
      self.log.write(self.step, {f"heldout_{name}": value for name, value in scores.items()})
      self._plot()
      self._report_scores(scores)

  def _heldout(self) -> Iterator[Batch]:
    """All rows of each batch, in every process: to pack them is what costs, and each has to do that."""
    return heldout_batches(self.run.data, self.run.train.batch_size, self.run.train.eval_rows)

  def _until_stopped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
      if self._stopping():
        raise _Stopped
      yield batch

  def _stopping(self) -> bool:
    return self.stop.requested(self.mesh)

  def _report_scores(self, scores: dict[str, float]) -> None:
    accuracy = " ".join(f"{v:.1%}" for name, v in sorted(scores.items()) if "accuracy" in name)
    self.report(
      f"step {self.step}/{self.run.train.steps}  held-out {scores['bpb']:.3f} bits per byte, "
      f"perplexity {scores['perplexity']:.1f}, top-1 {accuracy}"
    )

  def _save(self) -> None:
    with self.watch.pause():
      extra = {"tokenizer": self.tokenizer.fingerprint}
      position = merge_states(gather_json(self.position))
      self.checkpoints.save(self.step, self.state, position, extra)

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
