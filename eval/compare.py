"""Measure several heads side by side. An alias of eval/bench.py, with the same options.

python eval/compare.py runs/eagle runs/medusa runs/mtp runs/draft lookup:3 --tree chain:4,tree:4x4x16
"""

import sys

from eval.bench import main
from eval.measure.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
