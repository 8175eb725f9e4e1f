"""Train a DFlash head: accelerate launch -q train/dflash.py recipes/quickstart-dflash.yaml [key.sub=value ...]."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("dflash")
