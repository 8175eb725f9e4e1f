"""Train a DFlash2 head: accelerate launch -q train/dflash2.py recipes/quickstart-dflash2.yaml [key.sub=value ...]."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("dflash2")
