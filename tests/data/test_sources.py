import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.data.sources import (
  SourceFile,
  collect,
  default_sources,
  limit_bytes,
  read_pieces,
  split_heldout,
)
from glm5_jax.errors import UserError


def names(collection):
  return sorted(os.path.basename(file.path) for file in collection.files)


def test_unusable_files_are_counted_by_reason(tmp_path):
  (tmp_path / "good.py").write_text("x = 1\n")
  (tmp_path / "copy.py").write_text("x = 1\n")
  (tmp_path / "empty.py").write_bytes(b"")
  (tmp_path / "binary.py").write_bytes(b"abc\0def")
  (tmp_path / "latin.py").write_bytes("é".encode("latin-1"))
  (tmp_path / "cut.txt").write_bytes("é".encode()[:1])
  (tmp_path / "link.py").symlink_to(tmp_path / "absent")
  (tmp_path / "picture.png").write_bytes(b"\x89PNG")
  found = collect([str(tmp_path)])
  assert names(found) == ["copy.py"]  # the first of the two equal ones by name
  assert found.skipped == {"duplicate": 1, "empty": 1, "binary": 1, "not UTF-8": 2, "unreadable": 1}


def test_character_across_two_blocks_is_utf8(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"x" * ((1 << 20) - 1) + "é".encode())
  assert names(collect([str(tmp_path)])) == ["a.txt"]


def test_hidden_and_installed_folders_are_not_entered(tmp_path):
  for folder in ("a", ".git", "site-packages", "__pycache__"):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "x.py").write_text(folder)
  assert [file.path for file in collect([str(tmp_path)]).files] == [str(tmp_path / "a" / "x.py")]


def test_suffixes_choose_files_and_none_takes_all(tmp_path):
  for name in ("a.py", "b.c", "LICENSE"):
    (tmp_path / name).write_text(name)
  assert names(collect([str(tmp_path)], [".c"])) == ["b.c"]
  assert names(collect([str(tmp_path)], [])) == ["LICENSE", "a.py", "b.c"]
  assert names(collect([str(tmp_path / "LICENSE")])) == ["LICENSE"]  # a file that is named is wanted


def test_missing_and_empty_sources_are_named(tmp_path):
  with pytest.raises(UserError, match="absent does not exist"):
    collect([str(tmp_path / "absent")])
  with pytest.raises(UserError, match=r"no text in .*: no file of that kind .* suffixes \.py \.txt"):
    collect([str(tmp_path)])
  (tmp_path / "empty.py").touch()
  with pytest.raises(UserError, match=r"no text in .*: 1 empty"):
    collect([str(tmp_path)])


def test_default_is_the_standard_library():
  assert os.path.exists(os.path.join(default_sources()[0], "argparse.py"))
  assert default_sources()[0].startswith(sys.base_prefix)


def test_order_and_split_depend_on_content_and_seed_alone(tmp_path):
  for i in range(30):
    for folder, name in (("one", f"{i}.py"), ("two/deep", f"z{30 - i}.py")):
      (tmp_path / folder).mkdir(parents=True, exist_ok=True)
      (tmp_path / folder / name).write_text(f"content {i}")
  keys = [[file.key for file in collect([str(tmp_path / folder)]).files] for folder in ("one", "two")]
  assert keys[0] == keys[1]
  other = [file.key for file in collect([str(tmp_path / "one")], seed=1).files]
  assert set(other).isdisjoint(keys[0])


FILES = st.lists(st.integers(0, 2**128 - 1), min_size=2, max_size=40, unique=True).map(
  lambda keys: [SourceFile(f"{key:x}", 10, key) for key in sorted(keys)]
)


@settings(deadline=None)
@given(files=FILES, fraction=st.floats(0.01, 0.99))
def test_split_is_by_file_and_stable_when_files_come(files, fraction):
  train, heldout = split_heldout(files, fraction)
  assert train
  assert heldout
  assert sorted([*train, *heldout], key=lambda file: file.key) == files
  fewer = [file for file in files if file is not files[0]]
  if len(fewer) > 1 and len(heldout) > 1 and len(train) > 1:
    again = split_heldout(fewer, fraction)[1]
    assert set(again) - set(heldout) == set() or len(again) == 1


def test_split_takes_about_the_fraction():
  files = [SourceFile(str(i), 1, hash((i, "x")) % 2**64 | i << 64) for i in range(5000)]
  assert 0.08 < len(split_heldout(files, 0.1)[1]) / 5000 < 0.12
  assert split_heldout(files, 0)[1] == []


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0])
def test_impossible_fraction_is_named(fraction):
  with pytest.raises(UserError, match=f"heldout {fraction} is not a fraction"):
    split_heldout([SourceFile("a", 1, 1)], fraction)


def test_a_single_file_cannot_be_split():
  with pytest.raises(UserError, match="needs at least 2 files"):
    split_heldout([SourceFile("a", 1, 1)], 0.1)


def test_limit_takes_whole_files_in_order():
  files = [SourceFile(str(i), size, i) for i, size in enumerate([50, 10, 20, 30, 1])]
  assert [file.size for file in limit_bytes(files, 35)] == [10, 20]
  assert limit_bytes(files, 0) == files
  with pytest.raises(UserError, match="max_bytes 9 is less than every file; the smallest has 10 bytes"):
    limit_bytes(files[:4], 9)


@settings(deadline=None)
@given(text=st.text(alphabet="ab é日🦊\n\r", min_size=1, max_size=80), limit=st.integers(4, 20))
def test_pieces_of_a_long_file_are_the_file(tmp_path_factory, text, limit):
  content = text.encode()
  path = tmp_path_factory.getbasetemp() / "long.txt"
  path.write_bytes(content)
  pieces = list(read_pieces(SourceFile(str(path), len(content), 0), limit))
  assert b"".join(piece.text.encode() for piece in pieces) == content
  assert all(0 < piece.size <= limit and piece.size == len(piece.text.encode()) for piece in pieces)
  assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
  # A piece that does not end at a line end has none inside: its line alone is too long.
  assert all(piece.text.endswith("\n") or "\n" not in piece.text for piece in pieces[:-1])


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path):
  path = tmp_path / "large.txt"
  path.write_bytes(b"0123456789abcde\n" * (1 << 16))  # 1 MiB
  pieces = read_pieces(SourceFile(str(path), 1 << 20, 0), 1000)
  sizes = [piece.size for piece in pieces]
  assert sum(sizes) == 1 << 20
  assert set(sizes[:-1]) == {992}
