"""Distil a draft model: accelerate launch -q train/distill.py recipes/quickstart-distill.yaml [key.sub=value ...]."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("distill")
