"""Rooms of the package and the tests that have to notice what changes there."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SUITE = Path(__file__).with_name("suite.csv")
USUAL_S = 0.5  # of a file of tests that was not measured

# A room of the package and the tests that have to notice what changes there, quick ones first; the first prefix that fits.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "sharding": ("unit/sharding", "derivation", "verify", "property/test_reshard.py", "property/test_expressions.py", "golden"),
    "hardware": ("unit/network", "unit/cluster", "unit/cost", "golden", "cli/test_show.py", "cli/test_collective.py",
                 "planning/test_clusters.py", "unit/calibrate"),
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
    "batch_size": ("unit/batch", "unit/books", "golden", "cli/test_batch.py", "cli/test_batch_noise.py", "cli/test_schemas.py"),
    "serve": ("unit/serve", "cli/test_schemas.py", "explore/test_explore_serving.py"),
    "search/serving": ("unit/serve", "cli/test_schemas.py", "explore/test_explore_serving.py"),
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
               "train/test_verify_small.py", "train/test_verify_judge.py", "train/test_verify.py", "train/test_verify_faults.py"),
    "measure/batch_experiments": ("train/test_trials.py", "unit/batch", "train/test_batch_sweep.py",
                                  "train/test_batch_branch.py"),
    "measure/calibrate": ("unit/calibrate", "bench", "unit/test_choices.py", "unit/reconcile/test_memory.py",
                          "cli/test_calibrate.py", "cli/test_schemas.py", "planning"),
    "measure/microbenchmarks": ("bench", "unit/test_choices.py", "unit/calibrate"),
    "measure/reconcile": ("unit/reconcile", "cli/test_reconcile.py", "cli/test_rehearse.py", "train/test_rehearsals.py"),
    "measure": ("measurement", "planning/test_account.py", "cli/test_mfu.py", "cli/test_calibrate.py", "cli/test_reconcile.py",
                "cli/test_schemas.py", "unit/calibrate"),
    "values/symbolic.py": ("unit/test_symbolic.py", "unit/layout", "unit/cost"),
    "values/precision.py": ("unit/cost", "unit/test_choices.py", "train/test_memory.py"),
    "values/engine_policies.py": ("unit/cost", "planning", "unit/test_choices.py", "unit/lowering"),
    "values": ("unit/test_units.py", "unit/test_payload.py", "unit/floats", "unit/test_names.py", "unit/test_choices.py",
               "unit/test_notebooks.py", "conversion/test_arrangement.py", "data/test_token_shards.py", "train/test_box.py",
               "train/test_quantise.py", "train/test_scaled_state.py", "unit/layout", "unit/cost", "train/test_admission.py",
               "train/test_checkpoint.py", "train/test_checkpoint_manifest.py", "cli"),
    "records": ("measurement", "unit/reconcile", "unit/draw", "unit/batch", "cli/test_batch_noise.py", "train/test_measure.py",
                "train/test_watch.py", "train/test_loop.py", "train/test_pace.py", "train/test_launch.py",
                "train/test_batch_sweep.py", "cli/test_reconcile.py", "distributed/test_traced.py"),
    "run/data": ("data", "train", "cli/test_tokenize.py"),
    "run/parallel": ("distributed", "train", "conversion"),
    "run/checkpoints": ("train", "distributed", "conversion", "cli/test_train.py"),
    "run": ("train", "conversion", "distributed", "cli/test_train.py", "cli/test_convert.py"),
    "train.py": ("train", "conversion", "distributed", "cli/test_train.py", "cli/test_convert.py"),
    "interop/weights": ("conversion", "train", "distributed", "cli/test_convert.py"),
    "interop": ("export", "cli/test_launches.py", "conversion", "train/test_export.py", "train/test_huggingface.py",
                "cli/test_completion.py"),
    "present/charts": ("unit/draw", "unit/sharding/test_draw.py", "unit/books", "unit/reconcile", "unit/network/test_messages.py",
                       "unit/test_notebooks.py", "cli/test_figures.py", "cli/test_pictures.py", "cli/test_precision_verb.py",
                       "cli/test_schedule.py", "cli/test_sweep.py", "docs/test_pictures_of_documents.py", "explore",
                       "docs/test_site.py"),
    "present/figures": ("unit/books", "unit/draw", "cli/test_figures.py", "docs/test_pictures_of_documents.py",
                        "docs/test_site.py"),
    "present/explorer": ("explore", "cli/test_explore.py", "docs/test_site.py"),
    "present": ("unit/test_names.py", "unit/test_notebooks.py", "unit/test_payload.py", "unit/simulate/test_step.py",
                "unit/reconcile", "cli", "docs", "explore", "unit/calibrate", "planning"),
    "__init__.py": ("unit/test_api.py", "cli/test_imports.py"),
    "__main__.py": ("cli/test_cli.py",),
    "version.py": ("cli/test_cli.py",),
}  # fmt: skip


def room_of(file: str) -> str | None:
    """The room of a file of the package, by its path below it."""
    return next((room for room in ROOMS if file == room or file.startswith(f"{room}/")), None)


def files_of_tests(file: str, tests: Path) -> list[str]:
    """The files of the tests of its room, below `tests`: those that name the module, then the others as the room lists them;
    quick ones first among the former and within a folder."""
    listed = dict.fromkeys(path for folder in ROOMS[room_of(file) or ""] for path in _files(folder, tests))
    return sorted(listed, key=lambda path: (0, _seconds(path)) if _names(tests / path, file) else (1, 0.0))


def _files(path: str, tests: Path) -> list[str]:
    if (tests / path).is_file():
        return [path]
    files = (file.relative_to(tests).as_posix() for file in (tests / path).rglob("test_*.py"))
    return sorted(files, key=lambda file: (_seconds(file), file))


def _seconds(file: str) -> float:
    """How long a file of tests takes."""
    return _measured_seconds().get(file, USUAL_S)


@cache
def _measured_seconds() -> Mapping[str, float]:
    with SUITE.open(encoding="utf-8", newline="") as file:
        return {row["file"]: float(row["wall_s"]) for row in csv.DictReader(file)}


def _names(test: Path, file: str) -> bool:
    """Whether a test imports the module: `from shardwise.a.b import`, or `from shardwise.a import b`."""
    *packages, name = file.removesuffix(".py").split("/")
    package = re.escape(".".join(["shardwise", *packages]))
    pattern = rf"from {package}(\.{name} import | import .*\b{name}\b)"
    return re.search(pattern, test.read_text(encoding="utf-8")) is not None
