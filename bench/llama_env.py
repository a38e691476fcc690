"""An environment with llama.cpp (the package llama-cpp-python, compiled for this processor) for `peers.py`.

    python bench/llama_env.py FOLDER [--model FILE.gguf]

The build for this processor is tried in a child process. Some virtual machines advertise instructions that kill the
process (AMX above all): then it is built again with the widest vectors that work, without those. Minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.3.36"
COMMON = "-DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"
# Best first. Without `native`, llama.cpp's default is AVX2; each option adds to it.
BUILDS = {
    "native": "-DGGML_NATIVE=ON",
    "AVX-512 without AMX": "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON "
    "-DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF",
    "AVX2": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
    "plain": "-DGGML_NATIVE=OFF -DGGML_AVX=OFF -DGGML_AVX2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF -DGGML_BMI2=OFF",
}
PROBE = """
import sys, llama_cpp
llama = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False, logits_all=True)
llama.eval(list(range(1, 65)))
llama.eval([1])
print(llama_cpp.llama_print_system_info().decode())
"""


def build(python: Path, flags: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--force-reinstall", "--no-binary"]
    command += ["llama-cpp-python", f"llama-cpp-python=={VERSION}"]
    subprocess.run(command, env=os.environ | {"CMAKE_ARGS": f"{COMMON} {flags}"}, check=True)


def works(python: Path, model: str) -> bool:
    """Whether a long and a short pass survive in a child process."""
    done = subprocess.run([str(python), "-c", PROBE, model], capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout.strip() or f"ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a GGUF file to try it with; default: the default model")
    options = parser.parse_args()
    model = options.model
    if model is None:
        from outrider.models.checkpoint import open_checkpoint

        model = str(open_checkpoint(None).path)
    venv.create(options.folder, with_pip=True)
    python = options.folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    for name, flags in BUILDS.items():
        print(f"Building llama.cpp ({name}); this takes minutes ...", flush=True)
        build(python, flags)
        if works(python, model):
            (options.folder / ".installed").write_text(f"{VERSION} {name}: {flags}\n")
            return
    sys.exit("No build of llama.cpp runs on this processor.")


if __name__ == "__main__":
    main()
