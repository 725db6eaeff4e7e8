// A run beside its plan: each term predicted and measured.

import { h, panel, svg, table } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { fill, number, words } from "./numbers.js";

const ROW = 34,
  LEFT = 110;

export function drawMeasured(payload, context) {
  const found = payload.reconcile;
  const { time, memory } = found;
  const said = (text, name) => number(text, `reconcile.${name}`, context);
  const placed = (terms) => terms.map((one, index) => ({ ...one, index }));
  const terms = placed(time.terms).filter((one) => (one.predicted_s ?? 0) > 0 || one.measured_s > 0);
  const inside =
    time.within === null
      ? "the prediction is a bound"
      : time.within
        ? "inside the 90% interval"
        : "outside the 90% interval";
  const bytesOf = placed(memory.terms).filter((one) => (one.predicted ?? 0) > 0 || (one.measured ?? 0) > 0);
  return [
    panel(
      "Measured against predicted",
      {},
      h(
        "p",
        { class: "lead" },
        said(seconds(time.measured_s), "time.measured_s"),
        " measured over ",
        said(count(time.num_steps), "time.num_steps"),
        " steps, ",
        said(seconds(time.predicted_s), "time.predicted_s"),
        ` predicted: ${inside}`,
      ),
      h(
        "p",
        {},
        `on ${found.machine}; the mean is over the middle half of the steps; 10th to 90th percentile `,
        said(seconds(time.low_s), "time.low_s"),
        " to ",
        said(seconds(time.high_s), "time.high_s"),
      ),
      found.attribution &&
        h(
          "p",
          {},
          `the error is attributed to ${found.attribution.term}${found.attribution.depends_on.length ? `, which depends on ${found.attribution.depends_on.join(", ")}` : ""}`,
        ),
      h(
        "ul",
        {},
        [...found.remarks, ...found.advice].map((remark) => h("li", {}, remark)),
      ),
    ),
    h(
      "div",
      { class: "pair" },
      panel(
        "Seconds by term",
        {},
        pairs(
          terms.map((one) => [one.name, one.predicted_s, one.measured_s]),
          seconds,
          context.half,
        ),
        table(
          "seconds of a step by term",
          ["term", "predicted", "measured", "difference", "hidden"],
          terms.map((one) => [
            words(one.name),
            one.predicted_s === null ? "none" : said(seconds(one.predicted_s), `time.terms.${one.index}.predicted_s`),
            said(seconds(one.measured_s), `time.terms.${one.index}.measured_s`),
            said(signed(one.difference_s), `time.terms.${one.index}.difference_s`),
            said(seconds(one.hidden_s), `time.terms.${one.index}.hidden_s`),
          ]),
        ),
      ),
      panel(
        "Bytes by term",
        {},
        pairs(
          bytesOf.map((one) => [one.name, one.predicted, one.measured]),
          bytes,
          context.half,
        ),
        table(
          "bytes of a device by term",
          ["term", "predicted", "measured"],
          bytesOf.map((one) => [
            words(one.name),
            said(bytes(one.predicted ?? 0), `memory.terms.${one.index}.predicted`),
            one.measured === null ? "" : said(bytes(one.measured), `memory.terms.${one.index}.measured`),
          ]),
        ),
      ),
    ),
    panel(
      "Collectives",
      {},
      h(
        "p",
        { class: "lead" },
        found.collectives.equal
          ? "the collectives that were issued are those that were planned"
          : "the collectives that were issued are not those that were planned",
      ),
      found.collectives.miscounted.length
        ? table(
            "miscounted collectives",
            ["collective", "planned", "found"],
            found.collectives.miscounted.map((one) => [
              `${one.kind} ${[one.axes].flat().join("·")}`,
              one.planned,
              one.found,
            ]),
          )
        : null,
    ),
  ];
}

const signed = (value) => `${value < 0 ? "−" : "+"}${seconds(Math.abs(value))}`;

// For each term two bars: outlined as predicted, filled as measured.
function pairs(rows, format, wide) {
  const width = Math.max(wide, 280),
    most = Math.max(...rows.flatMap(([, predicted, measured]) => [predicted ?? 0, measured ?? 0]), 1e-12);
  const per = (width - LEFT - 104) / most;
  return svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} ${rows.length * ROW + 4}`,
      width,
      height: rows.length * ROW + 4,
      role: "img",
      "aria-label": "predicted and measured by term",
    },
    rows.map(([name, predicted, measured], index) =>
      svg(
        "g",
        { transform: `translate(${LEFT} ${index * ROW})` },
        svg("text", { x: -8, y: 19, "text-anchor": "end" }, name),
        svg("rect", {
          class: "predicted",
          x: 0.5,
          y: 3,
          width: Math.max((predicted ?? 0) * per, 0),
          height: 12,
          style: { stroke: fill(name) },
        }),
        svg("rect", {
          x: 0,
          y: 17,
          width: Math.max((measured ?? 0) * per, 0),
          height: 12,
          style: { fill: fill(name) },
        }),
        svg(
          "text",
          { class: "thin", x: (predicted ?? 0) * per + 5, y: 13 },
          predicted === null || predicted === undefined
            ? "not predicted"
            : `${format(predicted)} predicted`.slice(0, 24),
        ),
        svg(
          "text",
          { class: "thin", x: (measured ?? 0) * per + 5, y: 27 },
          measured === null || measured === undefined ? "not measured" : `${format(measured)}`,
        ),
      ),
    ),
  );
}
