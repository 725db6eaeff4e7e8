// The verdict, and the figures that follow a drag.

import { drawMemory, drawTime } from "./bars.js";
import { h, panel } from "./dom.js";
import { bytes, count, days, digits, energy, percent, seconds, shortCount, usd } from "./format.js";
import { number } from "./numbers.js";

export const mark = (good) =>
  h("span", { class: `mark ${good ? "good" : "bad"}`, "aria-hidden": "true" }, good ? "✓" : "✕");

// Whether it fits, how far it is from the best, and what bounds it.
export function drawVerdict(payload, context) {
  if (payload.problems.length) {
    if (searching(payload))
      return h("section", { class: "verdict", "aria-label": "verdict" }, h("h1", {}, "Searching for the best layout"), progress(payload));
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
    searching(payload) ? progress(payload) : null,
    h("p", { class: "quiet layout" }, `this layout: ${payload.layout_text}`),
    searching(payload) ? null : best(payload, context),
    facts(priced, estimate, verdict, context),
  );
}

// Whether the layout stands in until a search has found the best.
const searching = ({ layout_source, search }) => layout_source === "fallback" && search && !search.best && !search.problems.length;

const progress = ({ model_name, cluster_name }) =>
  h(
    "p",
    { class: "progress" },
    `Searching all layouts of ${model_name} on ${cluster_name} for the best that fits. Until then this page shows parameters sharded over all devices (ZeRO-3).`,
  );

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
  const linked = (text) => number(text, "verdict.times_the_best", context);
  if (times < 1.005)
    return times > 0.995
      ? "as fast as the best"
      : [linked(percent(1 - times)), " faster than the best that leaves a tenth free"];
  return [linked(times < 1.1 ? percent(times - 1) : `${digits(times, 2)}×`), " slower than the best"];
}

// Whether the best layout is the answer to a task that is still worked on.
export const hidesBest = ({ task }) => Boolean(task && !task.done);

// What the search found, as something to take.
function best({ search, verdict, task }, context) {
  if (!search || hidesBest({ task })) return null;
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
  const linked = (text, name) => number(text, `estimate.estimate.${name}`, context);
  const around = priced.interval90?.map((value, end) => linked(seconds(value), `interval90.${end}`));
  const rows = [
    ["step", seconds(priced.step_time_s), "step_time_s", around ? [`${kind}, 90%: `, around[0], " to ", around[1]] : kind],
    ["tokens/s per device", count(priced.tokens_per_s_per_device), "tokens_per_s_per_device", kind],
    ["MFU", percent(priced.mfu), "mfu", ["HFU ", number(percent(priced.hfu), "hfu", context)]],
    ["memory", bytes(priced.memory_bytes), "memory_bytes", ["of ", linked(bytes(priced.memory_capacity_bytes), "memory_capacity_bytes")]],
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
    rows.splice(1, 0, ["lower bound", seconds(estimate.bound_s), "bound_s", "at the best rates measured"]);
  return factList(rows.map(([name, text, key, note]) => [name, number(text, key, context), note]));
}

const factList = (rows) =>
  h(
    "dl",
    { class: "facts" },
    rows.map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, note)))),
  );

// Tokens, days, dollars and energy of the whole run; "-" with the reason where a price or a power has no source.
function drawRun({ training_run: run }, context) {
  const linked = (text, place) => number(text, `training_run.${place}`, context);
  const row = (name, place, format, note) => {
    const interval = run.interval90[place]?.map((value, end) => linked(format(value), `interval90.${place}.${end}`));
    const around = interval ? ["90%: ", interval[0], " to ", interval[1]] : "a lower bound";
    if (run[place] === null) return [name, h("span", { class: "number unknown" }, "-"), run.missing[place]];
    return [name, linked(format(run[place]), place), [around, note && h("span", { class: "source" }, note)]];
  };
  return panel(
    "Whole run",
    { class: "run" },
    factList([
      ["tokens", linked(shortCount(run.tokens), "tokens"), run.assumes_optimal_tokens ? "20 per parameter: the job names none" : "of the job"],
      ["steps", linked(count(run.num_steps), "num_steps"), "optimizer steps"],
      row("days", "days", days),
      row("dollars", "usd", usd, run.price_date && `prices of ${run.price_date}`),
      row("energy", "energy_mwh", energy, "chips alone"),
    ]),
    h("p", { class: "quiet" }, "goodput ", linked(percent(run.goodput), "goodput"), ": interruptions and checkpoints are in the days"),
  );
}

// Memory and time side by side, and what else the estimate says.
export function drawPriced(payload, context) {
  if (!payload.estimate) return null;
  const half = { ...context, width: context.half };
  return [
    drawRun(payload, context),
    h("div", { class: "pair" }, drawMemory(payload.memory, half), drawTime(payload.estimate.estimate, half, payload.reconcile)),
    panel(
      "What to know",
      { class: "notes" },
      h(
        "ul",
        {},
        payload.notes.map((note) => h("li", {}, note)),
      ),
    ),
  ];
}
