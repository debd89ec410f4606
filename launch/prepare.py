"""Folders of text to a data folder of packed-ready token ids: python -m launch.prepare --out=runs/data"""

from collections.abc import Sequence

from absl import flags

from glm5_jax.data.prepare import PrepareConfig, prepare
from glm5_jax.data.sources import DEFAULT_SUFFIXES
from launch.common import run

OUT = flags.DEFINE_string("out", "", "Folder to make.")
SOURCES = flags.DEFINE_list("sources", [], "Folders or files; none: this interpreter's standard library.")
TOKENIZER = flags.DEFINE_string("tokenizer", "", "sentencepiece .model or tokenizer.json; none: train one.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 2048, "Ids of the tokenizer to train.")
HELDOUT = flags.DEFINE_float("heldout", 0.02, "Fraction of the files to hold out.")
MAX_BYTES = flags.DEFINE_integer(
  "max_bytes", 0, "Bytes of text to take, in whole files; 0: all.", lower_bound=0
)
SUFFIXES = flags.DEFINE_list("suffixes", list(DEFAULT_SUFFIXES), "File endings to take; empty: every file.")
SEED = flags.DEFINE_integer("seed", 0, "Of the file order and the held-out split.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a data folder made with other arguments.")


def main(argv: Sequence[str]) -> None:
  del argv
  cfg = PrepareConfig(
    out=OUT.value,
    sources=SOURCES.value,
    tokenizer=TOKENIZER.value,
    vocab_size=VOCAB_SIZE.value,
    heldout=HELDOUT.value,
    max_bytes=MAX_BYTES.value,
    suffixes=SUFFIXES.value,
    seed=SEED.value,
  )
  prepare(cfg, overwrite=OVERWRITE.value)


if __name__ == "__main__":
  run(main)
