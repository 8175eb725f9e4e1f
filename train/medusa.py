"""Train Medusa heads: accelerate launch -q train/medusa.py recipes/quickstart-medusa.yaml [key.sub=value ...]."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("medusa")
