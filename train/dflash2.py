"""Train a DFlash2 head: python train/dflash2.py RECIPE.yaml, or --model MODEL --data DATA."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("dflash2")
