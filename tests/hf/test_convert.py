"""launch.convert, both ways, from the command line."""

from safetensors.numpy import load_file


def test_there_and_back(command, golden, tmp_path):
  there = command("convert", f"--source={golden}", f"--target={tmp_path}/ours")
  assert there.returncode == 0, there.stderr
  back = command(
    "convert", f"--source={tmp_path}/ours", f"--target={tmp_path}/back", "--max_shard_bytes=400000"
  )
  assert back.returncode == 0, back.stderr
  assert "329,112 parameters" in back.stdout
  shards = list((tmp_path / "back").glob("*.safetensors"))
  assert len(shards) == 4
  after = {name: array for shard in shards for name, array in load_file(shard).items()}
  before = load_file(golden / "model.safetensors")
  assert before.keys() == after.keys()
  assert all((before[name] == after[name]).all() for name in before)


def test_mistakes_are_one_line(command, golden, tmp_path):
  (tmp_path / "config.json").write_text('{"model_type": "llama"}')
  for arguments, named in [
    ([f"--source={golden}"], "--target"),
    ([f"--source={tmp_path}", f"--target={tmp_path}/x"], "model_type is 'llama'"),
  ]:
    done = command("convert", *arguments)
    assert done.returncode == 2
    assert named in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()
