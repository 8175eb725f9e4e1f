"""Write into a draft's IR which layers of the target it reads: python openvino_layers.py FOLDER ID,ID,ID

OpenVINO GenAI numbers a layer by its output, and takes layers 2, n/2 and n - 3 where the IR names none: each one deeper
than EAGLE's.
"""

import shutil
import sys
from pathlib import Path

import openvino


def main(folder: str, ids: str) -> None:
    model = openvino.Core().read_model(Path(folder) / "openvino_model.xml")
    model.set_rt_info(ids.replace(",", " "), "hidden_layers_list")
    beside = Path(folder) / "changed"
    beside.mkdir()
    openvino.save_model(model, beside / "openvino_model.xml", compress_to_fp16=False)
    del model
    for file in beside.iterdir():
        shutil.move(file, Path(folder) / file.name)
    beside.rmdir()


if __name__ == "__main__":
    main(*sys.argv[1:])
