// A run beside its plan: each term predicted and measured.

import { h, panel, svg, table } from "./dom.js";
import { bytes, seconds } from "./format.js";
import { fill, words } from "./numbers.js";

const ROW = 34,
  LEFT = 110;

export function drawMeasured(payload, context) {
  const found = payload.reconcile;
  const { time, memory } = found;
  const terms = time.terms.filter((one) => (one.predicted_s ?? 0) > 0 || one.measured_s > 0);
  const inside =
    time.within === null
      ? "the prediction is a bound"
      : time.within
        ? "inside the 90% interval"
        : "outside the 90% interval";
  const bytesOf = memory.terms.filter((one) => (one.predicted ?? 0) > 0 || (one.measured ?? 0) > 0);
  return [
    panel(
      "Measured against predicted",
      {},
      h(
        "p",
        { class: "lead" },
        `${seconds(time.measured_s)} measured over ${time.num_steps} steps, ${seconds(time.predicted_s)} predicted: ${inside}`,
      ),
      h(
        "p",
        {},
        `on ${found.machine}; half of the steps lie in the mean, 10th to 90th percentile ${seconds(time.low_s)} to ${seconds(time.high_s)}`,
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
            one.predicted_s === null ? "none" : seconds(one.predicted_s),
            seconds(one.measured_s),
            signed(one.difference_s),
            seconds(one.hidden_s),
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
            bytes(one.predicted ?? 0),
            one.measured === null ? "" : bytes(one.measured),
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
