"""Train a Domino head: python train/domino.py RECIPE.yaml, or --model MODEL --data DATA."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("domino")
