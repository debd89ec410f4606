"""The tree keeps its promises: resolved experiments, declared dependencies, a README in each room.

`make golden` rewrites the resolved configs after a deliberate change of a default; review the diff.
"""

import ast
import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from glm5_jax.config import RunConfig

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "configs"
EXPERIMENTS = sorted(path.stem for path in (ROOT / "experiments").glob("*.py") if path.stem != "__init__")
ROOMS = ("glm5_jax", "pallas_kernels", "launch", "experiments", "envs", "tests")


def resolve(experiment: str) -> RunConfig:
  return importlib.import_module(f"experiments.{experiment}").get_config()


def rewrite_golden() -> None:
  GOLDEN.mkdir(parents=True, exist_ok=True)
  for path in GOLDEN.glob("*.json"):
    path.unlink()
  for experiment in EXPERIMENTS:
    (GOLDEN / f"{experiment}.json").write_text(resolve(experiment).to_json() + "\n")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_is_valid_and_resolves_as_recorded(experiment):
  run = resolve(experiment)
  run.validate()
  recorded = GOLDEN / f"{experiment}.json"
  assert recorded.exists(), "a new experiment: run `make golden`"
  assert run.to_json() + "\n" == recorded.read_text(), "a default changed: if deliberate, run `make golden`"


def test_no_recorded_config_is_left_over():
  assert sorted(path.stem for path in GOLDEN.glob("*.json")) == EXPERIMENTS


@pytest.mark.parametrize("version", ["5", "5.1", "5.2"])
def test_full_size_experiment_trains_on_the_published_tokens(version):
  from experiments import glm5_744b

  run = glm5_744b.get_config(version)
  run.validate()
  done = tokens = 0
  for rows, until in glm5_744b.batch_warmup():
    tokens += (until - done) * rows * run.data.seq_len
    done = until
  assert tokens == pytest.approx(500e9, rel=1e-3)
  assert run.train.batch_size * run.data.seq_len == pytest.approx(64e6, rel=1e-2)
  tokens += (run.train.steps - done) * run.train.batch_size * run.data.seq_len
  assert tokens == pytest.approx(27e12, rel=1e-3)


def requirements() -> dict[str, set[str]]:
  """Distributions that setup.py asks for: {"core": …, "dev": …, …}, names normalised."""
  tree = ast.parse((ROOT / "setup.py").read_text())
  values = {
    node.targets[0].id: ast.literal_eval(node.value)
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
  }
  return {
    name: {_normal(line) for line in lines}
    for name, lines in {"core": values["CORE"], **values["EXTRAS"]}.items()
  }


def _normal(requirement: str) -> str:
  name = requirement
  for stop in "<>=[":
    name = name.partition(stop)[0]
  return name.strip().lower().replace("_", "-")


def third_party(path: Path) -> set[str]:
  """Top-level modules that a file imports, without the standard library's and ours."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name.partition(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      names.add(node.module.partition(".")[0])
  return names - sys.stdlib_module_names - set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_import_is_declared_in_setup_py(room):
  """A module that happens to come along with another one goes away with its next release."""
  asked = requirements()
  distributions = importlib.metadata.packages_distributions()
  for path in sorted((ROOT / room).rglob("*.py")):
    allowed = set(asked["core"])
    if room == "tests":
      allowed |= asked["dev"] | asked["bench"]
    if "benchmarks" in path.parts:
      allowed |= asked["bench"]
    for module in third_party(path):
      names = {_normal(name) for name in distributions.get(module, [module])}
      assert names & allowed, f"{path.relative_to(ROOT)} imports {module}, which setup.py does not ask for"


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_what_it_is_for(room):
  lines = (ROOT / room / "README.md").read_text().splitlines()
  assert lines[0].startswith("# ") and 4 <= len(lines) <= 40


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "tests"])
def test_every_folder_is_a_package(room):
  """The import contract does not see a folder without __init__.py."""
  folders = {path.parent for path in (ROOT / room).rglob("*.py")}
  assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_fake_devices(on_devices):
  """The fixture for sharding tests gives the number of devices asked for."""
  assert on_devices("import jax; print(jax.device_count())", count=3) == "3\n"


if __name__ == "__main__":
  rewrite_golden()
