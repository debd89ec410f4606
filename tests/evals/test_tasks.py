"""Tasks by name, on folders as users have them."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest

from glm5_jax import evals, hf
from glm5_jax.config import DataConfig, RunConfig
from glm5_jax.data.records import read_records
from glm5_jax.errors import UserError
from glm5_jax.evals.accept_length import heldout_prompts, measure
from glm5_jax.serve.load import open_model, stop_ids
from glm5_jax.text.tokenizer import load_tokenizer
from glm5_jax.train.checkpoint import SUBFOLDER, save_params_checkpoint
from tests.evals import runs
from tests.model import toy
from tests.model.golden import FOLDER as HF_FOLDER

LIMITS = evals.Limits(rows=8, batch_size=4, prompts=3, prompt_tokens=20, new_tokens=16, draft_steps=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  return runs.make_data(tmp_path_factory.mktemp("tasks") / "data")


@pytest.fixture(scope="module")
def run(data):
  return runs.make_run(data.parent / "run", data)


@pytest.fixture(scope="module")
def context(run):
  return evals.open_context(open_model(run), limits=LIMITS)


def test_every_task_runs_and_repeats(context):
  results = evals.evaluate(context, evals.default_tasks(context.cfg))
  assert list(results) == ["lm", "accept_length"]
  # Random weights know nothing: about log2(V) bits a token, of which a byte takes a part.
  lm = results["lm"]
  assert lm["bits_per_byte"] == pytest.approx(lm["loss"] / np.log(2) * lm["tokens"] / lm["bytes"])
  assert lm["loss"] == pytest.approx(np.log(runs.VOCABULARY), rel=0.25)
  speed = results["accept_length"]
  assert speed["prompts"] == 3
  for suffix in ("", "_sampled"):
    rates = [speed[f"accept_rate{suffix}_{k}"] for k in (1, 2)]  # as many drafts as depths were trained
    assert speed[f"accept_length{suffix}"] == pytest.approx(1 + sum(rates)) and rates[0] >= rates[1] >= 0
  assert evals.evaluate(context, ["accept_length"])["accept_length"] == speed
  shown = evals.table(results)
  assert all(name in shown for scores in results.values() for name in scores)


def test_prompts_are_heads_of_heldout_documents(data):
  prompts = heldout_prompts(str(data), 3, 20)
  assert prompts == heldout_prompts(str(data), 3, 20)
  assert prompts != heldout_prompts(str(data), 3, 20, seed=1)
  heads = [
    record.tokens[:20].tolist() for record in read_records(str(data), "heldout") if record.tokens.size > 20
  ]
  assert len(prompts) == 3 and all(prompt in heads for prompt in prompts)
  assert len(heldout_prompts(str(data), 1000, 20)) == len(heads)
  with pytest.raises(UserError, match=r"longest held-out document in .* has \d+ tokens"):
    heldout_prompts(str(data), 3, 100_000)


def test_unknown_task_lists_the_known_ones(context):
  with pytest.raises(UserError, match="no task 'perplexity'; there are lm, accept_length, needle"):
    evals.evaluate(context, ["lm", "perplexity"])


@pytest.mark.parametrize(
  ("processes", "device", "said"),
  [
    (2, {}, "the parameters are dealt out over 2 processes"),
    (
      1,
      {"bytes_limit": 2**30, "bytes_in_use": 2**30 - 1000},
      "0.0 GiB of parameters do not fit the 0.0 GiB free",
    ),
  ],
)
def test_what_one_device_cannot_do_is_left_out_or_refused(context, monkeypatch, processes, device, said):
  """Never run into: named, it is refused before anything runs; else the other tasks do."""
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  there = types.SimpleNamespace(memory_stats=lambda: device, device_kind="TPU v5p")
  monkeypatch.setattr(jax, "local_devices", lambda: [there])
  split = dataclasses.replace(context, mesh=types.SimpleNamespace())
  tasks, [note] = evals.choose_tasks(split)
  assert tasks == ["lm"] and note.startswith("accept_length is left out") and said in note
  assert evals.choose_tasks(split, ["lm"]) == (["lm"], [])
  with pytest.raises(
    UserError, match=f"generation runs on one device, and {said}.*; evaluate with --tasks=lm"
  ):
    evals.choose_tasks(split, ["accept_length"])
  assert evals.choose_tasks(context) == (
    ["lm", "accept_length"],
    [],
  )  # without a mesh it is on one device already


def test_meshes_of_an_evaluation(on_devices):
  code = """
import json
from glm5_jax.config import MeshConfig
from glm5_jax.errors import UserError
from glm5_jax.evals import evaluation_mesh
from tests.evals.runs import config
out = []
for cfg, wanted in (
  (config(), None), (config(q_lora_rank=36), None), (config(), MeshConfig(context=4)),
  (config(), MeshConfig(context=8)), (config(q_lora_rank=36), MeshConfig(data=1, fsdp=-1)),
):
  try:
    out.append({axis: size for axis, size in evaluation_mesh(cfg, 24, wanted)[0].shape.items() if size > 1})
  except UserError as error:
    out.append(str(error))
print(json.dumps(out))
"""
  split, copied, slots, *refused = json.loads(on_devices(code))
  assert (split, copied, slots) == ({"fsdp": 8}, {"data": 8}, {"data": 2, "context": 4})
  assert "data.seq_len=24: should be a multiple of 16" in refused[0]
  assert "36 does not divide over the mesh's fsdp 8 = 8" in refused[1]


def test_without_mtp_nothing_is_drafted():
  cfg = runs.config(num_nextn_predict_layers=0)
  assert evals.default_tasks(cfg) == ["lm"]
  with pytest.raises(UserError, match="needs an MTP layer"):
    measure(toy.params(cfg), cfg, [[1]], 4, 1)


def test_a_runs_folder_and_its_checkpoints_are_the_same_model(run):
  for folder in (run, run / SUBFOLDER):
    model = open_model(folder, runs.STEP)
    assert (model.step, model.cfg) == (runs.STEP, runs.config())
    assert model.own_tokenizer().fingerprint == model.fingerprint == load_tokenizer(run).fingerprint
    assert stop_ids(model.own_tokenizer(), model.cfg) == (0, 7, 9)


def test_an_exported_model_has_the_same_scores(data, tmp_path):
  """transformers selects keys; with as many as a row has, that is dense attention."""
  run = runs.make_run(tmp_path / "run", data, index_topk=64)
  model = open_model(run)
  hf.save_params(model.load_params(), model.cfg, tmp_path / "exported")
  ours = evals.evaluate(evals.open_context(model, limits=LIMITS), ["lm"])
  exported = evals.open_context(open_model(tmp_path / "exported"), str(data), seq_len=64, limits=LIMITS)
  assert exported.cfg.dsa_mode == "sparse"
  theirs = evals.evaluate(exported, ["lm"])["lm"]
  for name, value in theirs.items():  # the number of depths is ours alone
    if name in ours["lm"]:
      assert value == pytest.approx(ours["lm"][name], rel=1e-5)


def test_hugging_face_folder(data):
  model = open_model(HF_FOLDER)
  assert (model.step, model.tokenizer, model.fingerprint) == (None, None, "")
  assert model.cfg == hf.load_config(HF_FOLDER)
  assert model.load_params()["embed"].shape == (128, 64)
  with pytest.raises(UserError, match=r"keeps no tokenizer .* set --tokenizer"):
    model.own_tokenizer()
  with pytest.raises(UserError, match="names no data folder; set --data"):
    evals.open_context(model)
  with pytest.raises(UserError, match=r"keeps no tokenizer .* set --tokenizer"):
    evals.open_context(model, needs_data=False)
  with pytest.raises(UserError, match=r"has 360 ids but the checkpoint .* has vocab_size 128"):
    evals.open_context(model, str(data))
  with pytest.raises(UserError, match="leave --step out"):
    open_model(HF_FOLDER, 3)


def test_another_tokenizer_is_refused_by_name(run, data, tmp_path):
  other = runs.make_data(tmp_path / "other", vocab_size=340)
  with pytest.raises(
    UserError, match=f"tokenizer {other}/tokenizer.model .* the checkpoint {run} was trained"
  ):
    evals.open_context(open_model(run), str(other))
  # Its own file was replaced: the checkpoint remembers.
  copy = shutil.copytree(run, tmp_path / "copy")
  shutil.copy(other / "tokenizer.model", copy / "tokenizer.model")
  with pytest.raises(UserError, match=f"tokenizer {copy}/tokenizer.model has fingerprint"):
    open_model(copy).own_tokenizer()
  assert evals.open_context(open_model(copy), str(data)).tokenizer.vocab_size == runs.VOCABULARY


def test_a_converted_checkpoint_only_checks_the_vocabulary(data, tmp_path):
  cfg = runs.config()
  save_params_checkpoint(tmp_path / "imported", toy.params(cfg), RunConfig(model=cfg, data=DataConfig()))
  model = open_model(tmp_path / "imported")
  assert model.fingerprint == "" and model.tokenizer is None
  assert model.own_tokenizer(str(data)).vocab_size == runs.VOCABULARY


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"seq_len": 300}, "seq_len 300 must lie between 2 and the model's max_position_embeddings 256"),
    ({"data_folder": "/nonexistent"}, "data.folder /nonexistent does not exist"),
  ],
)
def test_impossible_data(run, changes, said):
  with pytest.raises(UserError, match=said):
    evals.evaluate(evals.open_context(open_model(run), **changes), ["lm"])


def test_no_model(tmp_path):
  with pytest.raises(UserError, match="no folder"):
    open_model(tmp_path / "absent")
  with pytest.raises(UserError, match="no complete checkpoint in"):
    open_model(tmp_path)
