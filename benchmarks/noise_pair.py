"""The gradient noise scale of a character model by three estimates of the norms of single examples' gradients, side by side.

    python benchmarks/noise_pair.py [--steps 2000] [--every 5] [--out benchmarks/noise_pair.json]

The experiment is the one that Cerebras publishes as nanoGNS (README.md, gns_type exact and sogns): nanoGPT with 4 layers, 4
heads, d = 128, sequences of 64, batches of 32, 2,000 steps, no dropout, and averages with a decay of 0.9 for each step. The text
is Python's standard library, for Shakespeare's is not at hand, so curves are not theirs; the ratio of the estimates is compared.

exact         of the weights of all linear layers, |sum over t of g_t x_t'|^2 of each example
approximate   the same from output gradients alone: mean square of the inputs · inputs · |sum over t of g_t|^2 (Gray, Samar and
              Hestness 2023, Efficient and Approximate Per-Example Gradient Norms for Gradient Noise Scale)
norms         of the weights of the LayerNorms alone, exactly (Gray et al. 2024, arXiv 2411.00999)

All three come from the same backward passes. Prints the noise scales in sequences at some steps and the median ratio to the exact
one over the last half, and writes them with versions and the command.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.batch_size.noise_estimators import NoiseSample, RunningNoise

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 4, 4, 128, 64, 32
# nanoGPT, config/train_shakespeare_char.py: but for the sizes, which are nanoGNS's.
RATE, LEAST_RATE, WARMUP, BETAS, DECAY, CLIP = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0
AVERAGE = 0.9  # nanoGNS, train.py: the decay of both averages in a step
ESTIMATES = ("exact", "approximate", "norms")
SHOWN = 10  # rows that are printed
TEXT_CHARACTERS = 2_000_000


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projected.view(*projected.shape[:2], HEADS, -1).transpose(1, 2)
            for projected in self.qkv(self.norm_1(x)).split(WIDTH, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A GPT with learned positions and a tied head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if deep else 0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Norms:
    """Squared norms of gradients of single examples (their mean) and of the batch, by estimate, of the latest backward pass."""

    def __init__(self, model: Model) -> None:
        self.measures = False
        self.small, self.big = dict.fromkeys(ESTIMATES, 0.0), dict.fromkeys(ESTIMATES, 0.0)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.register_forward_hook(self.observe)

    def watch(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Take the norms when the gradient of the output is there."""
        if self.measures:
            take = self.of_linear if isinstance(module, nn.Linear) else self.of_norm
            output.register_hook(lambda gradient: take(inputs[0].detach(), gradient))

    def of_linear(self, x: Tensor, g: Tensor) -> None:
        """Exact: [example, in, out]; approximate: as if all inputs of an example were its root mean square."""
        weights = torch.einsum("bti,bto->bio", x, g)
        self.add("exact", weights)
        self.add("approximate", x.square().mean((1, 2)).mul(x.shape[-1]).sqrt()[:, None] * g.sum(1))

    def of_norm(self, x: Tensor, g: Tensor) -> None:
        """Of the weight: sum over t of g_t · (x_t - mean) / deviation."""
        self.add("norms", (functional.layer_norm(x, x.shape[-1:]) * g).sum(1))

    def add(self, estimate: str, gradients: Tensor) -> None:
        """Count gradients of the mean loss, a row for each example, which is one of `BATCH`."""
        self.small[estimate] += float((BATCH * gradients).square().sum()) / BATCH
        self.big[estimate] += float(gradients.sum(0).square().sum())

    def samples(self) -> Iterator[tuple[str, NoiseSample]]:
        """Those of the pass, in sequences; the next one begins at nothing."""
        for name in ESTIMATES:
            yield name, NoiseSample(self.small[name], self.big[name], 1, BATCH)
            self.small[name] = self.big[name] = 0.0


def characters() -> Tensor:
    """The text, as numbers of its characters."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    plain = [character for character in text if character == "\n" or " " <= character <= "~"][:TEXT_CHARACTERS]
    numbers = {character: number for number, character in enumerate(sorted(set(plain)))}
    return torch.tensor([numbers[character] for character in plain])


def rate(step: int, steps: int) -> float:
    """A warm-up, then a cosine."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(steps - WARMUP, 1)
    return LEAST_RATE + 0.5 * (RATE - LEAST_RATE) * (1.0 + math.cos(math.pi * done))


def train(steps: int, every: int) -> Iterator[dict[str, float]]:
    """Of each measured step its number, the loss and the noise scales by estimate; both are averaged."""
    torch.manual_seed(1337)
    text = characters()
    model = Model(int(text.max()) + 1)
    norms = Norms(model)
    averages = {name: RunningNoise(decay=AVERAGE**every) for name in ESTIMATES}
    groups = [
        [parameter for parameter in model.parameters() if (parameter.dim() == 2) is matrix] for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": DECAY}, {"params": groups[1], "weight_decay": 0.0}], betas=BETAS, lr=RATE
    )
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1)) + torch.arange(LENGTH + 1)
        norms.measures = (step + 1) % every == 0
        loss = model(text[starts[:, :-1]], text[starts[:, 1:]])
        loss.backward()
        if norms.measures:
            for name, sample in norms.samples():
                averages[name].add(sample)
            scales = {name: average.tokens or math.nan for name, average in averages.items()}
            yield {"step": step + 1, "loss": round(loss.item(), 4), **{k: round(v, 4) for k, v in scales.items()}}
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def summarise(rows: list[dict[str, float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """What is written: the ratios, their range, and rows."""
    last = [row for row in rows[len(rows) // 2 :] if not any(math.isnan(number) for number in row.values())]
    ratios = {name: sorted(row[name] / row["exact"] for row in last) for name in ESTIMATES[1:]}
    return {
        "command": f"python benchmarks/noise_pair.py --steps {arguments.steps} --every {arguments.every}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "median_ratio_to_exact": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "range80_of_ratio": {
            name: [round(values[len(values) // 10], 3), round(values[-1 - len(values) // 10], 3)]
            for name, values in ratios.items()
        },
        "rows": rows[:: max(len(rows) // 40, 1)],
    }  # fmt: skip


def main() -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=5, help="steps between measurements")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    print("step    loss   " + "  ".join(f"{name:>11}" for name in ESTIMATES))
    for row in train(arguments.steps, arguments.every):
        rows.append(row)
        if row["step"] % max(arguments.steps // SHOWN, 1) == 0:
            print(
                f"{row['step']:<7} {row['loss']:.4f} " + "  ".join(f"{row[name]:11.2f}" for name in ESTIMATES),
                flush=True,
            )
    result = summarise(rows, arguments)
    print(json.dumps({name: figure for name, figure in result.items() if name != "rows"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
