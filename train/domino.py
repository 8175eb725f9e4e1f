"""Train a Domino head: python train/domino.py RECIPE.yaml, or --model MODEL --data DATA."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("domino")
