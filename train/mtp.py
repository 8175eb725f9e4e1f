"""Train multi-token prediction: accelerate launch -q train/mtp.py recipes/quickstart-mtp.yaml [key.sub=value ...]."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("mtp")
