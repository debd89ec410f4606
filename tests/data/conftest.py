import pytest

from glm5_jax.data.prepare import PrepareConfig, prepare


def write_texts(folder, count=40):
  """Small files of different length that share words; the longest is some thousand bytes."""
  folder.mkdir(parents=True, exist_ok=True)
  for i in range(count):
    lines = [f"def function_{i}_{j}(value):\n    return value + {j * i}\n" for j in range(1 + i * 7 % 23)]
    (folder / f"file_{i:03d}.py").write_text("".join(lines))
  return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
  return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def data_folder(texts, tmp_path_factory):
  out = tmp_path_factory.mktemp("prepared") / "data"
  prepare(PrepareConfig(str(out), [str(texts)], vocab_size=360, heldout=0.2), report=lambda line: None)
  return str(out)
