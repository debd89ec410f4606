"""The arithmetic behind the benchmark table; the programs themselves run in `make bench`."""

import json
import sys

import pytest

from experiments.benchmarks import maxtext_peer, table
from experiments.benchmarks.config import bench_6m, maxtext_tiny, train_flops
from glm5_jax.model import count_params


@pytest.mark.parametrize("cfg", [bench_6m(), maxtext_tiny()])
def test_shapes_are_possible(cfg):
  cfg.validate()


def test_size_is_that_of_the_peer():
  assert count_params(bench_6m())["total"] == 6_055_040  # what transformers' class reports


def test_flops_against_a_count_by_hand():
  """One layer, one head, every width different: 6 a trained weight and pair, 2 for the indexer."""
  cfg = bench_6m().replace(
    num_hidden_layers=1, num_attention_heads=1, vocab_size=10, hidden_size=3, intermediate_size=5,
    q_lora_rank=2, kv_lora_rank=4, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=7, index_n_heads=9,
    index_head_dim=11,
  )  # fmt: skip
  projections = 3 * 2 + 2 * 14 + 3 * 12 + 4 * 6 + 4 * 7 + 7 * 3
  trained = projections + 3 * 3 * 5 + 3 * 10 + 5 * (14 + 7)
  indexer = 2 * 9 * 11 + 3 * 11 + 3 * 9 + 5 * 9 * 11
  assert train_flops(cfg, 2, 5) == 2 * 5 * (6 * trained + 2 * indexer)
  assert train_flops(cfg.replace(dsa_mode="dense"), 2, 5) == 2 * 5 * 6 * trained


def entry(number: int, program: str, **result) -> dict:
  return {"round": number, "program": program, "result": result, "load": 0.0}


def test_rates_and_times_compare_the_right_way_round():
  entries = [
    entry(i, "ours", train_tokens_per_s=rate, decode_8_ms=2.0) for i, rate in enumerate((100, 300, 900))
  ]
  entries.append(entry(0, "sketch", train_tokens_per_s=200, decode_8_ms=1.0))
  training, decoding = table.compare(table.medians(entries))
  assert (training["value"], training["met"]) == (1.5, True)
  assert (decoding["value"], decoding["met"]) == (0.5, False)


def test_missing_and_failing_programs_are_told(tmp_path):
  broken = table.Program("broken", [sys.executable, "-c", "raise SystemExit('no such shape')"])
  fine = table.Program("fine", [sys.executable, "-c", "print('noise'); print('{\"compile_s\": 1.5}')"])
  entries = table.run_rounds([broken, fine], 2, tmp_path / "rounds.jsonl", resume=False)
  notes = table.notes_on(entries, [table.Program("absent", [])])
  assert notes[:2] == ["absent: not installed: make bench", "broken failed: no such shape"]
  assert "compile the training step" in table.render(table.medians(entries), [], 2, notes)


def test_an_interrupted_table_goes_on(tmp_path):
  log = tmp_path / "rounds.jsonl"
  log.write_text(json.dumps(entry(1, "fine", compile_s=7.0)) + "\n")
  fine = table.Program("fine", [sys.executable, "-c", "print('{\"compile_s\": 9.0}')"])
  entries = table.run_rounds([fine], 2, log, resume=True)
  assert [e["result"]["compile_s"] for e in entries] == [7.0, 9.0]
  assert len(log.read_text().splitlines()) == 2


def test_maxtext_log_line_is_read():
  line = (
    "I1201 logger.py:265] completed step: 4, seconds: 2.921, TFLOP/s/device: 0.033, loss: 7.348, lm_loss: 7.3"
  )
  assert maxtext_peer.STEP.findall(line) == [("4", "2.921", "7.348")]
