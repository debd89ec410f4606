import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from glm5_jax.data.prepare import PrepareConfig, prepare
from glm5_jax.data.records import (
  Record,
  SplitWriter,
  decode_record,
  encode_record,
  load_data_tokenizer,
  load_token_bytes,
  read_meta,
  read_records,
)
from glm5_jax.errors import UserError
from glm5_jax.text.tokenizer import train_tokenizer


def quiet(line):
  del line


@pytest.fixture
def cfg(texts, tmp_path):
  return PrepareConfig(str(tmp_path / "data"), [str(texts)], vocab_size=360, heldout=0.2)


def contents(folder):
  found = {}
  for path, _, names in os.walk(folder):
    for name in names:
      with open(os.path.join(path, name), "rb") as file:
        found[os.path.relpath(os.path.join(path, name), folder)] = file.read()
  return found


@pytest.mark.parametrize("ids", [[], [0, 1, 65535], [0, 65536, 154879]])
@pytest.mark.parametrize("last", [False, True])
def test_record_comes_back(ids, last):
  record = Record(np.array(ids, np.int32), 12, "a/é\udcff.py", last)
  back = decode_record(encode_record(record))
  assert back.tokens.tolist() == ids
  assert back.tokens.dtype == np.int32
  assert (back.text_bytes, back.path, back.last) == (12, "a/é\udcff.py", last)


def test_stored_documents_are_the_files(cfg, texts):
  meta = prepare(cfg, report=quiet)
  assert meta == read_meta(cfg.out)
  tokenizer = load_data_tokenizer(cfg.out)
  restored = {}
  for split in ("train", "heldout"):
    for record in read_records(cfg.out, split):
      assert record.tokens[-1] == tokenizer.eos_id
      restored[record.path] = tokenizer.decode(record.tokens[:-1])
      assert record.text_bytes == len(restored[record.path].encode())
  files = sorted(texts.iterdir())
  skipped = sum(meta.skipped.values())
  assert meta.train.files + meta.heldout.files == len(restored) == len(files) - skipped
  assert set(restored.values()) == {path.read_text() for path in files}
  assert load_token_bytes(cfg.out).tolist() == tokenizer.token_lengths.tolist()
  assert meta.train.tokens == sum(record.tokens.size for record in read_records(cfg.out, "train"))
  assert meta.train.text_bytes == sum(record.text_bytes for record in read_records(cfg.out, "train"))


def test_same_arguments_give_the_same_bytes(cfg, tmp_path):
  prepare(cfg, report=quiet)
  other = dataclasses.replace(cfg, out=str(tmp_path / "again"))
  prepare(other, report=quiet)
  assert contents(cfg.out) == contents(other.out)


def test_second_run_says_so_and_changes_nothing(cfg):
  first = prepare(cfg, report=quiet)
  before = {name: os.stat(os.path.join(cfg.out, name)).st_mtime_ns for name in os.listdir(cfg.out)}
  lines: list[str] = []
  assert prepare(cfg, report=lines.append) == first
  assert "prepared already" in lines[0]
  assert {name: os.stat(os.path.join(cfg.out, name)).st_mtime_ns for name in os.listdir(cfg.out)} == before


@pytest.mark.parametrize(
  "change", [{"seed": 5}, {"vocab_size": 370}, {"heldout": 0.3}, {"max_bytes": 9000}, {"suffixes": (".py",)}]
)
def test_other_arguments_are_refused_unless_overwritten(cfg, change):
  prepare(cfg, report=quiet)
  before = contents(cfg.out)
  changed = dataclasses.replace(cfg, **change)
  with pytest.raises(UserError, match=f"was prepared with {next(iter(change))} .*--overwrite"):
    prepare(changed, report=quiet)
  assert contents(cfg.out) == before
  assert (
    prepare(changed, overwrite=True, report=quiet).arguments != json.loads(before["meta.json"])["arguments"]
  )
  assert sorted(os.listdir(os.path.dirname(cfg.out))) == ["data"]  # no leftovers


def test_folder_with_other_things_is_never_replaced(cfg):
  os.makedirs(cfg.out)
  with open(os.path.join(cfg.out, "thesis.txt"), "w") as file:
    file.write("years of work")
  for overwrite in (False, True):
    with pytest.raises(UserError, match="is no data folder"):
      prepare(cfg, overwrite=overwrite, report=quiet)
  assert contents(cfg.out) == {"thesis.txt": b"years of work"}


def test_existing_tokenizer_is_taken_over(cfg, tmp_path):
  given = train_tokenizer(["some text with words\n" * 50], 310, tmp_path / "given.model")
  meta = prepare(dataclasses.replace(cfg, tokenizer=given.path), report=quiet)
  assert meta.vocab_size == 310
  assert load_data_tokenizer(cfg.out).fingerprint == given.fingerprint == meta.tokenizer_fingerprint


def test_exchanged_tokenizer_of_a_data_folder_is_noticed(cfg):
  prepare(cfg, report=quiet)
  train_tokenizer(["other text\n" * 50], 305, os.path.join(cfg.out, "tokenizer.model"))
  with pytest.raises(UserError, match=r"has fingerprint .* but data folder .* was trained with"):
    load_data_tokenizer(cfg.out)


def test_long_file_becomes_documents_with_one_end(cfg, tmp_path):
  folder = tmp_path / "long"
  folder.mkdir()
  (folder / "long.py").write_text("".join(f"line {i}\n" for i in range(500)))
  (folder / "short.py").write_text("x\n")
  cfg = dataclasses.replace(cfg, sources=[str(folder)], vocab_size=310, heldout=0, document_bytes=512)
  meta = prepare(cfg, report=quiet)
  assert (meta.train.files, meta.heldout.files) == (2, 0)
  eos = load_data_tokenizer(cfg.out).eos_id
  records = [record for record in read_records(cfg.out, "train") if record.path.endswith("long.py")]
  assert len(records) == 9
  assert [int((record.tokens == eos).sum()) for record in records] == [0] * 8 + [1]
  assert records[-1].tokens[-1] == eos
  with pytest.raises(UserError, match="no heldout documents"):
    next(read_records(cfg.out, "heldout"))


def test_small_shards_hold_all_records_in_order(tmp_path):
  writer = SplitWriter(str(tmp_path / "train"), shard_bytes=200)
  for i in range(20):
    writer.write(Record(np.full(10, i, np.int32), i, "p", True))
  meta = writer.close()
  assert len(meta.shards) > 3
  assert (meta.documents, meta.tokens, meta.text_bytes) == (20, 200, 190)
  assert all(os.path.getsize(tmp_path / "train" / name) == size for name, size in meta.shards.items())


def test_killed_prepare_leaves_no_folder_and_the_next_one_completes(cfg, texts):
  """Killed while it writes: the name of the finished folder does not exist, nothing half is readable."""
  slow = (
    "import os, sys, time\n"
    "from glm5_jax.data import records, prepare\n"
    "write = records.SplitWriter.write\n"
    "def stall(self, record):\n"
    "  write(self, record)\n"
    "  print('writing', flush=True)\n"
    "  time.sleep(60)\n"
    "records.SplitWriter.write = stall\n"
    f"prepare.prepare(prepare.PrepareConfig({cfg.out!r}, [{str(texts)!r}], vocab_size=360, heldout=0.2))\n"
  )
  with subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE, text=True) as process:
    deadline = time.monotonic() + 60
    while "writing" not in process.stdout.readline():
      assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
  assert not os.path.exists(cfg.out)
  assert os.path.isdir(f"{cfg.out}.partial")
  for folder in (cfg.out, f"{cfg.out}.partial"):
    with pytest.raises(UserError, match=r"does not exist|no finished data folder"):
      read_meta(folder)
  meta = prepare(cfg, report=quiet)
  assert meta.train.documents == len(list(read_records(cfg.out, "train")))
  assert not os.path.exists(f"{cfg.out}.partial")


def test_full_disk_is_one_clear_line_and_keeps_the_old_folder(cfg, texts):
  """A limit on file size stands for the full disk: the write fails in the same place."""
  prepare(cfg, report=quiet)
  before = contents(cfg.out)
  code = (
    "import resource, signal\n"
    "from glm5_jax.data.prepare import *\n"
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
    "try:\n"
    f"  prepare(PrepareConfig({cfg.out!r}, [{str(texts)!r}], {os.path.join(cfg.out, 'tokenizer.model')!r},\n"
    "          heldout=0.2), overwrite=True)\n"
    "except UserError as error:\n"
    "  print('told:', error)\n"
  )

  done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=60)
  assert "told: cannot write" in done.stdout, done.stdout + done.stderr
  assert "too large" in done.stdout
  assert contents(cfg.out) == before
  assert os.listdir(os.path.dirname(cfg.out)) == ["data"]


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda folder: os.remove(folder / "meta.json"), "no finished data folder"),
    (lambda folder: (folder / "meta.json").write_text("{"), "meta.json is damaged"),
    (lambda folder: (folder / "meta.json").write_text('{"format_version": 99}'), "format_version 99"),
    (
      lambda folder: os.truncate(folder / "train" / "00000.array_record", 100),
      "has 100 bytes, meta.json says",
    ),
    (lambda folder: os.remove(folder / "heldout" / "00000.array_record"), "has 0 bytes, meta.json says"),
  ],
)
def test_damaged_folder_is_one_clear_line(cfg, tmp_path, damage, message):
  prepare(cfg, report=quiet)
  damage(tmp_path / "data")
  with pytest.raises(UserError, match=message):
    read_meta(cfg.out)


def test_command_prepares_repeats_and_refuses(command, texts, tmp_path):
  arguments = [f"--out={tmp_path / 'data'}", f"--sources={texts}", "--vocab_size=360", "--heldout=0.2"]
  done = command("prepare", *arguments)
  assert done.returncode == 0, done.stderr
  assert "train" in done.stdout
  again = command("prepare", *arguments)
  assert again.returncode == 0
  assert "prepared already" in again.stdout
  refused = command("prepare", *arguments, "--seed=1")
  assert refused.returncode == 2
  assert refused.stderr.count("\n") == 1
  assert "seed 0, now it is 1" in refused.stderr


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"out": ""}, "--out is empty"),
    ({"sources": ["/nonexistent/folder"]}, "/nonexistent/folder does not exist"),
    ({"tokenizer": "/nonexistent/t.model"}, "tokenizer file /nonexistent/t.model cannot be read"),
    ({"vocab_size": 10}, "vocab_size 10 is too small"),
    ({"heldout": 1.0}, "heldout 1.0 is not a fraction"),
    ({"max_bytes": 1}, "max_bytes 1 is less than every file"),
    ({"out": "/proc/nonexistent/data"}, "cannot write /proc/nonexistent"),
  ],
)
def test_bad_arguments_are_one_clear_line_and_leave_nothing(cfg, tmp_path, change, message):
  with pytest.raises(UserError, match=message) as error:
    prepare(dataclasses.replace(cfg, **change), report=quiet)
  assert "\n" not in str(error.value)
  assert not list(tmp_path.iterdir())
