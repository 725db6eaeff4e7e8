// The verdict, and the figures that follow a drag.

import { drawMemory, drawTime } from "./bars.js";
import { h, panel } from "./dom.js";
import { bytes, count, digits, percent, seconds } from "./format.js";
import { number } from "./numbers.js";

export const mark = (good) =>
  h("span", { class: `mark ${good ? "good" : "bad"}`, "aria-hidden": "true" }, good ? "✓" : "✕");

// Whether it fits, how far it is from the best, and what bounds it.
export function drawVerdict(payload, context) {
  if (payload.problems.length) {
    return h(
      "section",
      { class: "verdict cannot", "aria-label": "verdict" },
      h("h1", {}, mark(false), "This layout cannot run"),
      h(
        "ul",
        {},
        payload.problems.map((problem) => h("li", {}, problem)),
      ),
      best(payload, context),
    );
  }
  const { verdict, estimate } = payload;
  const priced = estimate.estimate;
  return h(
    "section",
    { class: `verdict ${verdict.fits ? "" : "cannot"}`, "aria-label": "verdict" },
    h(
      "h1",
      {},
      mark(verdict.fits),
      h("span", { class: "claim" }, headroom(verdict, context)),
      h("span", { class: "claim" }, compared(payload, context)),
      h("span", { class: "claim" }, `bound by ${verdict.bound}`),
    ),
    h("p", { class: "quiet layout" }, `this layout: ${payload.layout_text}`),
    best(payload, context),
    facts(priced, estimate, verdict, context),
  );
}

// Whether it fits, and how much of a device is free or missing.
export const headroom = ({ fits, margin }, context) =>
  fits
    ? ["Fits with ", number(percent(margin, 0), "margin", context), " headroom"]
    : ["Does not fit: ", number(percent(-margin, 0), "margin", context), " over a device's memory"];

function compared({ verdict, search }, context) {
  if (!search) return verdict.kind === "bound" ? "a bound" : "a prediction";
  if (verdict.times_the_best === null)
    return search.problems.length ? "no layout of this job fits" : "searching for the best";
  if (verdict.is_best) return "the best layout";
  const times = verdict.times_the_best;
  const said = (text) => number(text, "verdict.times_the_best", context);
  if (times < 1.005)
    return times > 0.995
      ? "as fast as the best"
      : [said(percent(1 - times)), " faster than the best that leaves a tenth free"];
  return [said(times < 1.1 ? percent(times - 1) : `${digits(times, 2)}×`), " slower than the best"];
}

// What the search found, as something to take.
function best({ search, verdict }, context) {
  if (!search) return null;
  if (!search.best)
    return h("p", { class: "quiet" }, search.problems.length ? search.problems[0] : "searching all layouts");
  if (verdict?.is_best) return h("p", { class: "quiet" }, `of all layouts searched, by the rule of shardwise plan`);
  return h(
    "p",
    { class: "quiet best" },
    `best: ${search.best.text}, `,
    number(seconds(search.best.step_time_s), "search.best.step_time_s", context),
    ", ",
    number(bytes(search.best.memory_bytes), "search.best.memory_bytes", context),
    " ",
    context.go &&
      h(
        "button",
        { type: "button", class: "take", onclick: () => context.go({ layout: search.best.layout }) },
        "take it",
      ),
  );
}

function facts(priced, estimate, verdict, context) {
  const kind = verdict.kind === "bound" ? "a bound" : "predicted";
  const said = (text, name) => number(text, `estimate.estimate.${name}`, context);
  const around = priced.interval90?.map((value, end) => said(seconds(value), `interval90.${end}`));
  const items = [
    ["step", seconds(priced.step_time_s), "step_time_s", around ? [`${kind}, 90%: `, around[0], " to ", around[1]] : kind],
    ["tokens/s per device", count(priced.tokens_per_s_per_device), "tokens_per_s_per_device", kind],
    ["MFU", percent(priced.mfu), "mfu", ["HFU ", number(percent(priced.hfu), "hfu", context)]],
    ["memory", bytes(priced.memory_bytes), "memory_bytes", ["of ", said(bytes(priced.memory_capacity_bytes), "memory_capacity_bytes")]],
    [
      "bubble",
      percent(verdict.bubble),
      "bubble",
      "idle over ideal time",
    ],
    [
      "micro-batches",
      count(estimate.layout.num_micro_batches),
      "num_micro_batches",
      `of ${estimate.layout.micro_batch_seqs} sequence${estimate.layout.micro_batch_seqs > 1 ? "s" : ""}`,
    ],
  ];
  if (estimate.bound_s)
    items.splice(1, 0, ["lower bound", seconds(estimate.bound_s), "bound_s", "at the best rates measured"]);
  return h(
    "dl",
    { class: "facts" },
    items.map(([name, text, key, note]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, number(text, key, context), h("small", {}, note))),
    ),
  );
}

// Memory and time side by side, and what else the estimate says.
export function drawPriced(payload, context) {
  if (!payload.estimate) return null;
  const half = { ...context, width: context.half };
  return [
    h("div", { class: "pair" }, drawMemory(payload.memory, half), drawTime(payload.estimate.estimate, half, payload.reconcile)),
    notes(payload.estimate.estimate),
  ];
}

function notes(priced) {
  const waste = Object.entries(priced.waste).map(([name, value]) =>
    name === "nearest_full_batch_tokens"
      ? `a batch without waste: ${count(value)} tokens`
      : `waste by uneven ${name}: ${percent(value)}`,
  );
  return panel(
    "What to know",
    { class: "notes" },
    h(
      "ul",
      {},
      [...waste, ...priced.notes].map((note) => h("li", {}, note)),
    ),
  );
}
