// The critical batch: steps against tokens to the same loss, and the days that each batch takes on this layout.

import { around, axes, path } from "./chart.js";
import { h, panel, svg, table } from "./dom.js";
import { count, digits, quantity, seconds } from "./format.js";
import { number } from "./numbers.js";

export function drawBatch(payload, context) {
  const { rows, fields: of } = payload;
  const said = (text, name) => number(text, name, context);
  const half = Math.max(context.half, 280);
  const trade = axes({
    width: half,
    height: 280,
    label: "tokens against steps to the same loss",
    x: {
      domain: around(
        rows.map((row) => row.steps),
        true,
      ),
      log: true,
      label: "steps, S(B)",
      format: (value) => quantity(value),
    },
    y: {
      domain: around(
        rows.map((row) => row.tokens),
        true,
      ),
      log: true,
      label: "tokens, E(B)",
      format: (value) => quantity(value),
    },
  });
  trade.marks.append(
    path(
      rows.map((row) => [trade.x(row.steps), trade.y(row.tokens)]),
      { class: "front" },
    ),
    ...rows.map((row) => point(trade.x(row.steps), trade.y(row.tokens), row, payload)),
  );
  const knee = [trade.x(2 * payload.min_steps), trade.y(2 * payload.min_tokens)];
  trade.marks.append(
    svg(
      "circle",
      { class: "best-ring", cx: knee[0], cy: knee[1], r: 9 },
      svg(
        "title",
        {},
        `the critical batch: ${quantity(payload.critical_batch_tokens)} tokens, twice the fewest steps and the fewest tokens`,
      ),
    ),
  );
  const priced = rows.filter((row) => row.days !== null);
  return [
    panel(
      "Critical batch size",
      {},
      h(
        "p",
        { class: "lead" },
        said(quantity(payload.critical_batch_tokens), "critical_batch_tokens"),
        " tokens; this batch of ",
        said(quantity(payload.batch_tokens), "batch_tokens"),
        " takes ",
        said(`${digits(payload.times_min_steps)}×`, "times_min_steps"),
        " the fewest steps and ",
        said(`${digits(payload.times_min_tokens)}×`, "times_min_tokens"),
        " the fewest tokens",
      ),
      noise(payload, context),
      h(
        "p",
        { class: "quiet" },
        `${["rows.*.steps", "rows.*.tokens", "critical_batch_tokens"].map((name) => of[name].formula).join("; ")}. Closed forms: ${of.critical_batch_tokens.source}.`,
      ),
      payload.noise_given
        ? null
        : h("p", { class: "quiet" }, `No noise scale was given: this is ${of.noise_tokens.words} (${of.noise_tokens.source}). Measure your own.`),
    ),
    h(
      "div",
      { class: "pair" },
      panel(
        "Steps and tokens",
        {},
        trade.root,
        h("p", { class: "quiet" }, "the ring is the critical batch: twice the least of both"),
      ),
      days(priced, payload, half),
    ),
    panel(
      "Batches",
      {},
      table(
        "batches to the same loss",
        ["batch, tokens", "steps", "tokens", "step", "days", ""],
        rows.map((row, index) => [
          count(row.batch_tokens),
          said(count(row.steps), `rows.${index}.steps`),
          said(quantity(row.tokens), `rows.${index}.tokens`),
          row.step_time_s === null ? "" : said(seconds(row.step_time_s), `rows.${index}.step_time_s`),
          row.days === null ? "" : said(digits(row.days), `rows.${index}.days`),
          row.problem,
        ]),
      ),
    ),
  ];
}

function days(priced, payload, width) {
  if (!priced.length) return panel("Days", {}, h("p", { class: "quiet" }, "the layout runs none of these batches"));
  const figure = axes({
    width,
    height: 280,
    label: "days to the same loss by batch",
    x: {
      domain: around(
        priced.map((row) => row.batch_tokens),
        true,
      ),
      log: true,
      label: "batch, tokens",
      format: (value) => quantity(value),
    },
    y: {
      domain: around(
        priced.map((row) => row.days),
        true,
        0.15,
      ),
      log: true,
      label: "days on this layout",
      format: (value) => digits(value),
    },
  });
  figure.marks.append(
    path(
      priced.map((row) => [figure.x(row.batch_tokens), figure.y(row.days)]),
      { class: "front" },
    ),
    ...priced.map((row) => point(figure.x(row.batch_tokens), figure.y(row.days), row, payload)),
  );
  return panel("Days", {}, figure.root, h("p", { class: "quiet" }, payload.fields["rows.*.days"].formula));
}

function point(cx, cy, row, payload) {
  const own = row.batch_tokens === payload.batch_tokens;
  return svg(
    "circle",
    { class: own ? "own-dot" : "on-front", cx, cy, r: own ? 7 : 4 },
    svg(
      "title",
      {},
      `${quantity(row.batch_tokens)} tokens: ${count(row.steps)} steps, ${quantity(row.tokens)} tokens${row.days === null ? "" : `, ${digits(row.days)} days`}`,
    ),
  );
}

// The gradient's noise scale, which is unknown before a run.
function noise(payload, context) {
  if (!context.go) return h("p", {}, `noise scale of ${quantity(payload.noise_tokens)} tokens`);
  const options = payload.noise_options;
  const nearest = options.reduce(
    (best, one, index) =>
      Math.abs(Math.log(tokens(one.value) / payload.noise_tokens)) <
      Math.abs(Math.log(tokens(options[best].value) / payload.noise_tokens))
        ? index
        : best,
    0,
  );
  const shown = h("output", { for: "noise" }, number(quantity(payload.noise_tokens), "noise_tokens", context));
  const input = h("input", {
    id: "noise",
    type: "range",
    min: 0,
    max: options.length - 1,
    step: 1,
    onchange: () => context.go(options[input.value].edit, { push: true }),
    oninput: () => {
      shown.value = options[input.value].value;
    },
  });
  input.value = nearest;
  return h(
    "div",
    { class: "control" },
    h("label", { for: "noise" }, "noise scale of the gradient, tokens"),
    shown,
    input,
  );
}

const UNITS = { Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30 };
const tokens = (text) => parseFloat(text) * (UNITS[text.slice(-2)] ?? 1);
