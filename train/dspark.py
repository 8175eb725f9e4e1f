"""Train a DSpark head: accelerate launch -q train/dspark.py recipes/quickstart-dspark.yaml [key.sub=value ...]."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("dspark")
