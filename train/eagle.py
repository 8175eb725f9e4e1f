"""Train an EAGLE-3 head: accelerate launch -q train/eagle.py recipes/quickstart.yaml [key.sub=value ...]."""

from train.entry import run_entry

if __name__ == "__main__":
    run_entry("eagle")
