"""The verbs of the command line: typed functions of `import shardwise as sw`, a module for each family.

`GROUPS` is the table that `shardwise --help` prints; a verb's module is loaded when the verb is used.

Functions take names and paths as well as values. A *model* is a name of the catalogue, a Hugging Face id, the path of a
`config.json` or of its folder, or an `Architecture`. A *cluster* is CHIP:COUNT or CHIP:SHAPE, the path of a `.toml` file, or a
`Cluster`; with a name, `stack` is the software stack to predict. A *job* is a `Job`, or its fields as keywords, whose numbers may
be written as "4Mi". A *layout* is a `Layout` or its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwise.present.verb import Verb


class VerbEntry(NamedTuple):
    """A verb, what it does in one line, and its function as "module:function" below `present.verbs`."""

    name: str
    line: str
    function: str

    def load(self) -> Verb:
        """Load the verb's module and return the verb."""
        module, _, name = self.function.partition(":")
        loaded: Verb = getattr(import_module(f"shardwise.present.verbs.{module}"), name).verb
        return loaded


GROUPS: Mapping[str, tuple[VerbEntry, ...]] = {
    "plan a run": (
        VerbEntry("plan", "search all layouts and choose the fastest that fits", "planning:plan"),
        VerbEntry("estimate", "price one layout", "estimate:price_layout"),
        VerbEntry("memory", "what fills the devices under given layouts", "memory:memory"),
        VerbEntry("kv-cache", "size a model's key-value cache", "memory:kv_cache"),
    ),
    "serve a model": (
        VerbEntry("serve", "latency and cost of serving a model; the layout for a load", "serving:serving"),
    ),
    "understand": (
        VerbEntry("explain", "why a plan is what it is, and how another layout compares", "explanation:explain"),
        VerbEntry("instructions", "what each device of a plan does, in order", "simulation:instructions"),
        VerbEntry("simulate", "play a plan's step on streams of compute and traffic", "simulation:simulation"),
        VerbEntry("schedule", "play, check and draw a schedule of pipeline stages", "pipeline_schedule:schedule"),
        VerbEntry("roofline", "what bounds a kernel or a model's block on one chip", "rooflines_and_rules:roofline"),
        VerbEntry("rule", "work out one of the books' rules, with its formula and source", "rooflines_and_rules:rule"),
        VerbEntry("cheat-sheet", "rules and typical scales for a model on one page", "cheat_sheets:cheat_sheet"),
        VerbEntry("precision", "floating-point formats: bits, range, resolution", "rooflines_and_rules:precision"),
        VerbEntry("explore", "drag a layout's degrees on a page, and see what changes", "explorer:explore"),
    ),
    "notation and network": (
        VerbEntry("matmul", "price a sharded product and find the cheapest way to it", "sharded_products:matmul"),
        VerbEntry("reshard", "the cheapest way from one sharding to another", "sharded_products:reshard"),
        VerbEntry("collective", "time one collective on a chip's network", "sharded_products:collective"),
        VerbEntry("network", "levels of switches, and which group crosses which", "switched_networks:network"),
    ),
    "run and measure": (
        VerbEntry("tokenize", "write text as token shards to train on", "training:tokenize"),
        VerbEntry("verify", "check that a plan's layout trains as one process does", "training:verify"),
        VerbEntry("rehearse", "run one rank of a plan without the others", "training:rehearse"),
        VerbEntry("train", "train the model of a plan as it says, and measure it", "training:train"),
        VerbEntry("batch", "how large a batch pays, from runs at several batches", "batch_size:batch"),
        VerbEntry("experiments", "many runs that predict first and lose nothing", "experiments:experiments"),
        VerbEntry("reconcile", "compare a run with its plan, term by term", "measurement:reconcile"),
        VerbEntry("trace", "compare a measured step with the plan, find bottlenecks", "measurement:trace"),
        VerbEntry("mfu", "MFU of a measured run, and where the rest of its time goes", "measurement:mfu"),
        VerbEntry("bench", "measure what this machine reaches", "calibration:bench"),
        VerbEntry("kernels", "kernels in several ways, up to the roofline", "kernels:kernels"),
        VerbEntry("calibrate", "fit predictions to runs and micro-benchmarks of your own", "calibration:calibrate"),
        VerbEntry("validate", "compare predictions with published training runs", "calibration:validate"),
    ),
    "hand over": (
        VerbEntry("export", "write a plan as the launch of a framework", "interop:export_plan"),
        VerbEntry("read", "what a framework's launch costs, and what would be faster", "interop:read_launch"),
        VerbEntry("convert", "a model's weights as another framework reads them", "interop:convert"),
        VerbEntry("mcp", "offer planning to agents (Model Context Protocol)", "environment:mcp"),
    ),
    "catalogue": (
        VerbEntry("show", "models, chips, stacks, rules, ...: every value and its source", "catalogue:show"),
        VerbEntry("figures", "draw the figures of the books", "catalogue:figures"),
        VerbEntry("completion", "let bash, zsh or fish complete this command line", "environment:completion"),
        VerbEntry("doctor", "what is installed here, and which verbs work", "environment:doctor"),
    ),
}  # fmt: skip


# Other names that a user may try for a verb, and the command line that does it.
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("search", "optimize", "optimise", "tune", "shard"), "plan MODEL CLUSTER"),
    "sweep": "plan MODEL CLUSTER --sweep NAME=VALUES",
    "compare": "plan MODEL CLUSTER CLUSTER, or of layouts explain PLAN --against LAYOUT",
    **dict.fromkeys(("cost", "price", "predict"), "estimate MODEL CLUSTER --layout LAYOUT"),
    **dict.fromkeys(("benchmark", "measure"), "bench machine"),
    **dict.fromkeys(("profile", "analyze", "analyse"), "trace"),
    **dict.fromkeys(("import", "parse"), "read FILE"),
    **dict.fromkeys(("run", "launch"), "train PLAN"),
    "fit": "calibrate",
    **dict.fromkeys(("list", "ls"), "show"),
}
