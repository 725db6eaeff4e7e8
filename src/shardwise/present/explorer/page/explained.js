// The story of a plan: does it fit, does it reach the batch, what bounds it, what else there was.

import { h, panel, svg, table } from "./dom.js";
import { bytes, count, digits, percent, seconds } from "./format.js";
import { fill, swatch, words } from "./numbers.js";

export function drawExplanation(found, context) {
  const { fit, batch, throughput } = found;
  const half = { ...context, width: context.half };
  const more = [...found.notes, `${fit.held}; recomputation: ${fit.because}`];
  return [
    h("p", { class: "lead" }, found.layout.text),
    h(
      "div",
      { class: "pair" },
      panel(
        "Does it fit?",
        {},
        h(
          "p",
          { class: "lead" },
          `${fit.fits ? `yes, ${percent(fit.margin, 0)} free` : `no, ${percent(-fit.margin, 0)} too much`}: ${bytes(fit.memory_bytes)} of ${bytes(fit.memory_capacity_bytes)}`,
        ),
        shares(fit.memory, bytes, half),
        h("p", {}, `binding constraint: ${fit.binding}`),
        fit.smallest_change && h("p", {}, `smallest change that fits: ${fit.smallest_change}`),
      ),
      panel(
        "What bounds throughput?",
        {},
        h(
          "p",
          { class: "lead" },
          `${throughput.bound}: ${seconds(throughput.step_time_s)} a step, MFU ${percent(throughput.mfu)}, HFU ${percent(throughput.hfu)}`,
        ),
        shares(throughput.time, seconds, half),
        h(
          "p",
          { class: "quiet" },
          `hidden behind compute: ${
            Object.entries(throughput.hidden)
              .map(([axis, value]) => `${axis} ${seconds(value)}`)
              .join(", ") || "nothing"
          }`,
        ),
      ),
    ),
    panel(
      "Does it reach the batch?",
      {},
      h(
        "p",
        { class: "lead" },
        `${count(batch.global_batch_tokens)} tokens are ${count(batch.num_seqs)} sequences: ${count(batch.num_replicas)} replicas, ${count(batch.num_micro_batches)} micro-batches of ${batch.micro_batch_seqs}`,
      ),
      h("p", {}, batch.because),
    ),
    panel(
      "What else there was",
      {},
      table(
        "each option and the step at which it drops out",
        ["option", "step", "memory", "verdict", "layout"],
        found.options.map((one) => [
          one.what,
          one.step_time_s === null ? "" : seconds(one.step_time_s),
          one.memory_bytes === null ? "" : bytes(one.memory_bytes),
          one.verdict,
          one.layout.text,
        ]),
      ),
    ),
    panel(
      "Runners-up",
      {},
      table(
        "why each lost",
        ["layout", "step", "memory", "reason"],
        found.runners_up.map((one) => [one.layout.text, seconds(one.step_time_s), bytes(one.memory_bytes), one.reason]),
      ),
    ),
    panel(
      "Which constant moves the answer most",
      {},
      moved(found.constants, context),
      table(
        "each constant made a tenth worse",
        ["constant", "value", "change of the step", "meaning"],
        found.constants.map((one) => [
          one.name,
          one.value === null ? "" : digits(one.value, 4),
          percent(one.change, 2),
          one.meaning ?? "",
        ]),
      ),
      [...new Set(found.constants.map((one) => one.source).filter(Boolean))].map((source) =>
        h("p", { class: "quiet" }, `source of the constants with a meaning: ${source}`),
      ),
    ),
    panel(
      "What to know",
      { class: "notes" },
      h(
        "ul",
        {},
        more.map((line) => h("li", {}, line)),
      ),
    ),
  ];
}

// A tree of terms: a bar, and each with its formula.
function shares(rows, format, context) {
  const width = Math.max(context.width, 260);
  let at = 0;
  const bar = svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} 24`,
      width,
      height: 24,
      role: "img",
      "aria-label": rows.map((one) => `${one.term} ${percent(one.share)}`).join(", "),
    },
    rows.map((one) => {
      const found = svg(
        "g",
        { class: "segment" },
        svg("title", {}, `${words(one.term)} ${format(one.value)}`),
        svg("rect", { x: at, width: one.share * width, height: 24, style: { fill: fill(one.term) } }),
      );
      at += one.share * width;
      return found;
    }),
  );
  return [
    bar,
    h(
      "ul",
      { class: "terms" },
      rows.map((one) =>
        h(
          "li",
          { title: one.formula },
          swatch(one.term),
          h("span", { class: "name" }, words(one.term)),
          h("span", { class: "number" }, format(one.value)),
          h("span", { class: "share" }, percent(one.share)),
        ),
      ),
    ),
    h(
      "details",
      { class: "data" },
      h("summary", {}, "formulas"),
      table(
        "what each term is made of",
        ["term", "formula"],
        rows.map((one) => [one.term, one.formula]),
      ),
    ),
  ];
}

function moved(constants, context) {
  const rows = constants.filter((one) => Math.abs(one.change) > 1e-4).slice(0, 12);
  if (!rows.length) return null;
  const width = Math.max(context.width, 300),
    left = 210,
    step = 22,
    most = Math.max(...rows.map((one) => Math.abs(one.change)));
  return svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} ${rows.length * step + 4}`,
      width,
      height: rows.length * step + 4,
      role: "img",
      "aria-label": "change of the step for each constant",
    },
    rows.map((one, index) =>
      svg(
        "g",
        { transform: `translate(${left} ${index * step})` },
        svg("text", { x: -8, y: 15, "text-anchor": "end" }, one.name),
        svg("rect", {
          x: 0,
          y: 3,
          width: (Math.abs(one.change) / most) * (width - left - 80),
          height: 15,
          style: { fill: "var(--term-forward)" },
        }),
        svg("text", { x: (Math.abs(one.change) / most) * (width - left - 80) + 6, y: 15 }, percent(one.change, 1)),
      ),
    ),
  );
}
