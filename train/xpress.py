"""Train an XPress head: python train/xpress.py RECIPE.yaml, or --model MODEL --data DATA."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("xpress")
