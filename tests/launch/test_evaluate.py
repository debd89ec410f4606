"""launch.evaluate as its users meet it: a table, a JSON file, one line for each mistake."""

import json
import re
import shutil

import pytest

from glm5_jax.config import DataConfig, RunConfig
from glm5_jax.train.checkpoint import SUBFOLDER, save_params_checkpoint
from tests.evals import runs
from tests.model import toy
from tests.parallel.processes import Group

QUICK = ("--rows=4", "--batch_size=4", "--prompts=2", "--prompt_tokens=16", "--new_tokens=8")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("evaluate")
  return runs.make_run(folder / "run", runs.make_data(folder / "data"))


def test_all_tasks_of_a_run(command, run, tmp_path):
  done = command("evaluate", f"--checkpoint={run}", *QUICK, f"--json={tmp_path}/scores.json")
  assert done.returncode == 0, done.stderr
  written = json.loads((tmp_path / "scores.json").read_text())
  assert (written["checkpoint"], written["step"]) == (str(run), runs.STEP)
  assert written["data"] == str(run.parent / "data")
  assert {"bits_per_byte", "perplexity", "accuracy", "mtp_accuracy_1", "mtp_accuracy_2"} <= written["tasks"][
    "lm"
  ].keys()
  assert written["tasks"]["accept_length"]["accept_length"] >= 1
  lines = done.stdout.splitlines()
  assert f"{run}, step {runs.STEP}" in lines[0]
  shown = {line.split()[0]: line.split()[-1] for line in lines[1:]}
  assert shown["bits_per_byte"] == f"{written['tasks']['lm']['bits_per_byte']:.4f}"


def test_needles_in_both_modes(command, run, tmp_path):
  flags = "--tasks=needle", "--needle_lengths=200,256", "--needle_prompts=2", "--needle_keys=2"
  file = tmp_path / "needles.json"
  done = command("evaluate", f"--checkpoint={run}", *flags, "--dsa_modes=dense,sparse", f"--json={file}")
  assert done.returncode == 0, done.stderr
  found = json.loads(file.read_text())["tasks"]["needle"]
  for length in (200, 256):
    for name in ("dense", "sparse", "sparse_minus_dense"):
      assert {
        f"{kind}_{length}_{name}{se}" for kind in ("exact", "token") for se in ("", "_se")
      } <= found.keys()
      assert re.search(rf"token_{length}_{name} +-?\d\.\d{{4}} ± \d\.\d{{4}}\n", done.stdout)


def test_needles_without_a_data_folder(command, run, tmp_path):
  """A model with its tokeniser beside it: the text is made up."""
  folder = tmp_path / "alone"
  save_params_checkpoint(
    folder, toy.params(runs.config()), RunConfig(model=runs.config(), data=DataConfig(seq_len=200))
  )
  shutil.copy(run / "tokenizer.model", folder)
  flags = "--needle_prompts=2", "--needle_keys=2"
  done = command("evaluate", f"--checkpoint={folder}", "--tasks=needle", *flags)
  assert done.returncode == 0, done.stderr
  assert "on made-up words" in done.stdout and "exact_200 " in done.stdout
  done = command("evaluate", f"--checkpoint={folder}", "--tasks=needle,lm", *flags)
  assert done.returncode == 2 and "names no data folder; set --data" in done.stderr


@pytest.fixture(scope="module")
def experts(run, tmp_path_factory):
  """A run of which trunk and MTP layer have experts."""
  folder = tmp_path_factory.mktemp("experts") / "run"
  return runs.make_run(folder, run.parent / "data", first_k_dense_replace=0)


def scores(done, file):
  assert done.returncode == 0 and done.stderr == "", done.stderr
  return json.loads(file.read_text())["tasks"]


def assert_same_scores(found, expected):
  """Sums over tokens are in another order; what is counted or generated is the same."""
  assert found.keys() == expected.keys() == {"lm", "accept_length"}
  assert found["lm"] == pytest.approx(expected["lm"], rel=1e-5)
  assert all(found["lm"][name] == expected["lm"][name] for name in ("tokens", "bytes"))
  assert found["accept_length"] == expected["accept_length"]


@pytest.mark.slow
def test_same_scores_on_eight_devices(command, experts, tmp_path):
  """Ten rows are no multiple of eight, and four at a time are fewer."""
  flags = f"--checkpoint={experts}", *QUICK, "--rows=10"
  alone = scores(command("evaluate", *flags, f"--json={tmp_path}/alone"), tmp_path / "alone")
  for name, mesh, shown in (
    ("split", [], "8 × cpu (fsdp 8)"),
    ("mixed", ["--mesh=expert=2,context=2,tensor=2"], "8 × cpu (expert 2 × context 2 × tensor 2)"),
  ):
    done = command("evaluate", *flags, *mesh, f"--json={tmp_path}/{name}", JAX_NUM_CPU_DEVICES="8")
    assert_same_scores(scores(done, tmp_path / name), alone)
    assert done.stdout.splitlines()[0].endswith(f", on {shown}")
    assert done.stdout.splitlines()[1] == "accept_length generates on one of the devices"


@pytest.mark.slow
def test_same_scores_in_two_processes(command, experts, tmp_path):
  flags = f"--checkpoint={experts}", *QUICK
  alone = scores(command("evaluate", *flags, "--tasks=lm", f"--json={tmp_path}/alone"), tmp_path / "alone")
  with Group(tmp_path) as group:
    for i in (0, 1):
      arguments = ["-m", "launch.evaluate", *flags, f"--json={tmp_path}/scores"]
      group.start(arguments, i, JAX_NUM_CPU_DEVICES="2")
    assert group.codes(300) == [0, 0], group.said_wrong()
    first, second = (worker.said() for worker in group.workers)
  found = json.loads((tmp_path / "scores").read_text())["tasks"]
  assert found["lm"] == pytest.approx(alone["lm"], rel=1e-5) and list(found) == ["lm"]
  assert "on 4 × cpu in 2 processes (fsdp 4)" in first
  assert "accept_length is left out: it generates on one device, and the parameters are dealt out" in first
  assert "bits_per_byte" in first and "bits_per_byte" not in second


@pytest.mark.slow
def test_same_needles_in_two_processes(command, experts, tmp_path):
  flags = f"--checkpoint={experts}", "--tasks=needle", "--needle_lengths=256", "--needle_prompts=6"
  alone = scores(command("evaluate", *flags, f"--json={tmp_path}/alone"), tmp_path / "alone")
  with Group(tmp_path) as group:
    for i in (0, 1):
      arguments = ["-m", "launch.evaluate", *flags, f"--json={tmp_path}/scores"]
      group.start(arguments, i, JAX_NUM_CPU_DEVICES="2")
    assert group.codes(300) == [0, 0], group.said_wrong()
  found = json.loads((tmp_path / "scores").read_text())["tasks"]
  assert found == alone and found["needle"]["token_256"] > 0


def assert_refused(done, *said):
  """Exit code 2 and one line on stderr with every one of `said`."""
  assert done.returncode == 2, done.stdout + done.stderr
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
  assert all(text in lines[0] for text in said), lines[0]


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "--checkpoint is needed"),
    (["--checkpoint=/nonexistent"], "no folder /nonexistent"),
    (["--checkpoint={run}", "--step=8"], "no complete checkpoint of step 8"),
    (["--checkpoint={run}", "--tasks=lm,chess"], "no task 'chess'; there are lm, accept_length"),
    (["--checkpoint={run}", "--rows=-1"], "--rows=-1"),
    (["--checkpoint={run}", "--needle_lengths=4k"], "--needle_lengths: '4k' should be a number of tokens"),
    (["--checkpoint={run}", "--tasks=needle", "--needle_lengths=300"], "300 is more than the model's max_po"),
    (["--checkpoint={run}", "--tasks=needle", "--needle_lengths=90"], "a needle length of 90 is too short"),
    (["--checkpoint={run}", "--json=/nonexistent/x"], "--json: no folder /nonexistent"),
    (["--checkpoint={run}", "--mesh=fsdp"], "--mesh: 'fsdp' should be at least 1, or -1"),
    (
      ["--checkpoint={run}", "--mesh=rows=2"],
      "--mesh: 'rows=2' should be an axis, once, and a number, of data",
    ),
    (["--checkpoint={run}", "--mesh=fsdp=2,fsdp=2"], "--mesh: 'fsdp=2' should be an axis, once"),
    (
      ["--checkpoint={run}", "--mesh=fsdp=-1,data=-1"],
      "--mesh: 'data=-1' should be at least 1, or -1, for one",
    ),
    (["--checkpoint={run}", "--mesh=dcn_data=-1"], "--mesh: 'dcn_data=-1' should be at least 1"),
    (["--checkpoint={run}", "--mesh=fsdp=4"], "1 found; for a dry run on CPU set JAX_NUM_CPU_DEVICES=4"),
  ],
)
def test_mistakes_are_one_line(command, run, arguments, said):
  assert_refused(command("evaluate", *(argument.format(run=run) for argument in arguments)), said)


def test_data_of_another_tokenizer(command, run, tmp_path):
  other = runs.make_data(tmp_path / "other", vocab_size=340)
  done = command("evaluate", f"--checkpoint={run}", f"--data={other}")
  assert_refused(done, f"{other}/tokenizer.model", f"the checkpoint {run}", "fingerprint")


def test_a_torn_checkpoint(command, run, tmp_path):
  copy = shutil.copytree(run, tmp_path / "copy")
  for path in (copy / SUBFOLDER / str(runs.STEP) / "state").rglob("d/*"):
    path.write_bytes(path.read_bytes()[:-100])
  assert_refused(
    command("evaluate", f"--checkpoint={copy}", "--tasks=lm"), str(copy / SUBFOLDER / str(runs.STEP))
  )
