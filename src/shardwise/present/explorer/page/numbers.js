// Numbers that say where they are from, and the colours of terms.

import { h } from "./dom.js";
import { count } from "./format.js";

export const TIME = [
  "forward",
  "backward",
  "recompute",
  "tp",
  "cp",
  "ep",
  "pp",
  "fsdp",
  "dp",
  "control",
  "host",
  "bubble",
  "optimizer",
];
export const MEMORY = [
  "parameters",
  "gradients",
  "master",
  "optimizer",
  "activations",
  "workspace",
  "gathered",
  "logits",
  "buffers",
  "runtime",
];
// Of the terms whose names say too little.
const WORDS = {
  tp: "tensor parallel",
  cp: "context parallel",
  ep: "expert parallel",
  pp: "pipeline",
  fsdp: "sharded data parallel",
  dp: "data parallel",
  control: "loss, norm, router sums",
};
const PLAIN = {
  master: "master weights",
  gathered: "gathered weights",
  host: "host transfers",
  optimizer: "optimizer",
};

export const words = (term) => PLAIN[term] ?? (WORDS[term] ? `${term}: ${WORDS[term]}` : term);
export const fill = (term) => `var(--term-${String(term).replaceAll(" ", "-")}, var(--faint))`;
export const textOn = (term) => `var(--on-${String(term).replaceAll(" ", "-")}, var(--paper))`;

// A number that opens its provenance; plain text where a report has none of it.
export function number(text, name, context) {
  if (!context?.why) return h("span", { class: "number" }, text);
  return h(
    "button",
    {
      type: "button",
      class: "number",
      "data-why": name,
      onclick: () => context.why(name),
      title: "formula, inputs and source",
    },
    text,
  );
}

// How much of a step a picture shows, where that is not all of it: micro-batches, ranks, passes.
export function truncated(shown) {
  const parts = [
    ["micro_batches", "micro-batches"],
    ["ranks", "ranks"],
    ["passes", "passes"],
  ]
    .filter(([name]) => shown[name] < shown[`num_${name}`])
    .map(([name, word]) => `${count(shown[name])} of ${count(shown[`num_${name}`])} ${word}`);
  if (!parts.length) return null;
  const fewer = shown.micro_batches < shown.num_micro_batches ? " Its seconds and its bubble are those of the micro-batches shown." : "";
  return h("p", { class: "truncated" }, `Truncated: ${parts.join(", ")} are shown.${fewer}`);
}

// A square of a term's colour.
export const swatch = (term) =>
  h("span", { class: "swatch", style: { background: fill(term) }, "aria-hidden": "true" });

export function legend(terms) {
  return h(
    "ul",
    { class: "legend", "aria-label": "colours" },
    terms.map((term) => h("li", {}, swatch(term), words(term))),
  );
}
