"""Random small models through the frameworks' own loading and saving: `make weights-check`.

    python benchmarks/weights_check/run.py [FORMAT ...] [--count 40] [--sources FOLDER]

Models are written in the names of a framework, which loads them in an environment of its own under out/weights-check, computes
logits in float64 and saves them; what it saved is read again. The frameworks are those of `make export-check`, at the same
releases (a checkout of Megatron-LM is found under --sources). A format in which a logit differs ends the command with status 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
sys.path.insert(0, str(HERE.parent))

from export_check.judges import JUDGES, MEGATRON_LM, TORCH, Judge, Script, framework_arguments, make_environment  # noqa: E402

_MEGATRON = Judge(
    (Script("megatron.py", "weights"),), (TORCH, "packaging", "numpy", "triton", "psutil"), checkouts=(MEGATRON_LM,)
)
FORMATS: Mapping[str, Judge] = {
    "torchtitan": JUDGES["torchtitan"]._replace(scripts=(Script("torchtitan.py", "weights"),)),
    "megatron": _MEGATRON,
    "megatron-ranks": _MEGATRON,
}


def check(name: str, count: int, sources: Path | None) -> int:
    """The exit status of what loads and what reads random models in a format."""
    judge, out = FORMATS[name], ROOT / "out" / "weights-check"
    script = judge.scripts[0].file
    framework_folder, models = out / script.removesuffix(".py"), out / f"models-{name}"
    framework_folder.mkdir(parents=True, exist_ok=True)
    python = make_environment(judge, framework_folder)
    where = framework_arguments(judge, python, framework_folder, sources)
    shutil.rmtree(models, ignore_errors=True)  # of other sources: what ranks saved then would be read with these
    ours = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, str(HERE / "write.py"), name, str(count), str(models)], check=True, env=ours)
    theirs = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(python), str(HERE / script), *where, str(models)], env=theirs)
    read = subprocess.run([sys.executable, str(HERE / "read.py"), name, str(models)], env=ours)
    code = max(done.returncode, read.returncode)
    print(f"{name}: {'loaded and read' if code == 0 else 'differs'}", flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; all of them without one"
    )
    parser.add_argument("--count", type=int, default=40, help="models of each (default: 40)")
    parser.add_argument("--sources", type=Path, help="a folder with a checkout of Megatron-LM")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.formats if name not in FORMATS]
    if unknown:
        parser.error(f"found {', '.join(unknown)}; one of {', '.join(FORMATS)} is required")
    return max(check(name, arguments.count, arguments.sources) for name in arguments.formats or FORMATS)


if __name__ == "__main__":
    sys.exit(main())
