"""Rooms of the package and the tests that have to notice what changes there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# A room of the package and the tests that have to notice what changes there, quick ones first; the first prefix that fits.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "sharding": ("unit/sharding", "derivation", "verify", "property/test_reshard.py", "property/test_expressions.py", "golden"),
    "hardware": ("unit/network", "unit/cluster", "unit/cost", "golden", "cli/test_show.py", "cli/test_collective.py",
                 "unit/calibrate"),
    "model/job.py": ("unit/test_job.py", "unit/cost", "planning"),
    "model/optimizers": ("unit/test_optimizer.py", "unit/test_choices.py", "train/test_memory.py", "property/test_derivation.py"),
    "model": ("unit/model", "derivation", "unit/cost", "unit/layout", "property/test_gradients.py", "property/test_structures.py",
              "crosscheck/test_transformers.py", "train/test_model.py"),
    "layout": ("unit/layout", "derivation", "unit/lowering", "unit/cost", "planning/test_pins.py", "property/test_structures.py",
               "property/test_derivation.py", "property/test_search.py"),
    "derive": ("unit/derive", "derivation", "unit/lowering", "unit/cost", "property/test_structures.py",
               "property/test_expressions.py", "property/test_derivation.py", "verify"),
    "step": ("unit/lowering", "derivation", "property/test_traffic.py", "unit/cost", "planning/test_instructions.py",
                 "train/test_model.py", "distributed/test_captured.py"),
    "pipeline": ("unit/schedule", "property/test_schedules.py", "cli/test_schedule.py", "unit/cost", "unit/layout",
                 "property/test_search.py"),
    "price/simulation": ("unit/simulate", "property/test_streams.py", "cli/test_simulate.py"),
    "price": ("unit/cost", "golden", "unit/test_choices.py", "unit/test_api.py", "planning", "property/test_search.py"),
    "book_formulas": ("unit/books", "golden", "unit/test_api.py", "cli/test_kv_cache.py", "cli/test_pictures.py",
                      "cli/test_figures.py", "cli/test_schemas.py"),
    "batch_size": ("unit/batch", "unit/books", "golden", "cli/test_schemas.py"),
    "search": ("unit/search", "unit/test_choices.py", "planning", "train/test_admission.py", "unit/test_api.py",
               "cli/test_sweep.py", "cli/test_cli.py", "cli/test_product.py", "cli/test_schemas.py", "property/test_search.py"),
    "run/numpy": ("property/test_gradients.py", "derivation", "property/test_structures.py",
                     "property/test_derivation.py", "verify"),
    "run/kernels": ("unit/test_optimizer.py", "train/test_gradients.py", "train/test_experts.py", "train/test_model.py",
                     "train/test_recompute.py", "train/test_attention.py", "train/test_products.py", "train/test_memory.py",
                     "train/test_gpu_shapes.py", "train/test_huggingface.py",
                     "distributed/test_equality.py"),
    "run/engine": ("train/test_gradients.py", "train/test_experts.py", "train/test_model.py", "train/test_recompute.py",
                   "train/test_memory.py", "train/test_gpu_shapes.py", "distributed/test_equality.py"),
    "verify": ("crosscheck/test_hlo.py", "crosscheck/test_golden_xla.py", "verify",
               "train/test_verify_small.py", "train/test_verify_judge.py", "train/test_verify.py"),
    "measure/reconcile": ("unit/reconcile", "cli/test_reconcile.py", "cli/test_rehearse.py", "train/test_rehearsals.py"),
    "values/symbolic.py": ("unit/test_symbolic.py", "unit/layout", "unit/cost"),
    "values/precision.py": ("unit/cost", "unit/test_choices.py", "train/test_memory.py"),
    "values/engine_policies.py": ("unit/cost", "planning", "unit/test_choices.py", "unit/lowering"),
    "run/data": ("data", "train", "cli/test_tokenize.py"),
    "run/parallel": ("distributed", "train", "conversion"),
    "run": ("train", "conversion", "distributed", "cli/test_train.py", "cli/test_convert.py"),
    "train.py": ("train", "conversion", "distributed", "cli/test_train.py", "cli/test_convert.py"),
    "interop/weights": ("conversion", "train", "distributed", "cli/test_convert.py"),
    "run/checkpoints": ("train", "distributed", "conversion", "cli/test_train.py"),
}  # fmt: skip


def room_of(file: str) -> str | None:
    """The room of a file of the package, by its path below it."""
    return next((room for room in ROOMS if file == room or file.startswith(f"{room}/")), None)


def files_of_tests(file: str, tests: Path) -> list[str]:
    """The files of the tests of its room, below `tests`: those that name the module first, the others as the room lists them."""
    listed = list(
        dict.fromkeys(path for one in ROOMS[room_of(file) or ""] for path in _files(tests / one.partition("::")[0]))
    )
    return [path.relative_to(tests).as_posix() for path in sorted(listed, key=lambda path: not _names(path, file))]


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(path.rglob("test_*.py"))
    elif path.exists():
        yield path


def _names(test: Path, file: str) -> bool:
    """Whether a test imports the module: `from shardwise.a.b import`, or `from shardwise.a import b`."""
    *packages, name = file.removesuffix(".py").split("/")
    package = re.escape(".".join(["shardwise", *packages]))
    pattern = rf"from {package}(\.{name} import | import .*\b{name}\b)"
    return re.search(pattern, test.read_text(encoding="utf-8")) is not None
