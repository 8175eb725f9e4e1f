"""llama.cpp's converter for a target whose tokenizer it does not know: python llamacpp_convert.py CONVERTER OPTIONS

The converter stops at such a tokenizer, because text would be split otherwise than by the target's own. Where a server
gets token ids and no text, that does not matter. The name `default` is then in the file.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1]).parent
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def name_of(model: TextModel, tokenizer: object) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            print("unknown tokenizer")
            return "default"

    TextModel.get_vocab_base_pre = name_of
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
