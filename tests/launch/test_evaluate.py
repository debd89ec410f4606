"""launch.evaluate as its users meet it: a table, a JSON file, one line for each mistake."""

import json
import shutil

import pytest

from glm5_jax.train.checkpoint import SUBFOLDER
from tests.evals import runs

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
    (["--checkpoint={run}", "--json=/nonexistent/x"], "--json: no folder /nonexistent"),
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
