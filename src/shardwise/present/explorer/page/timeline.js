// The simulated step: kernels and traffic of each rank over time, and what a device holds.

import { ticks } from "./chart.js";
import { h, numbers, panel, svg } from "./dom.js";
import { bytes, percent, seconds } from "./format.js";
import { inWords, labelSize } from "./schedule.js";
import { TIME, fill, legend, number, textOn, truncated } from "./numbers.js";

const ROW = 22,
  THIN = 11,
  CURVE = 28,
  LEFT = 74,
  RIGHT = 10;

export function drawTimeline(payload, context) {
  const { simulation } = payload;
  const width = Math.max(context.width, 300),
    per = (width - LEFT - RIGHT) / payload.end_s;
  const alone = payload.num_ranks === 1;
  const groups = [];
  const used = new Set();
  let at = 4;
  for (const rank of payload.ranks) {
    groups.push(row(rank.compute, at, ROW, per, alone ? "device" : `rank ${rank.rank}`, used));
    groups.push(labels(rank.passes, at, per));
    at += ROW + 1;
    for (const [name, spans] of Object.entries(rank.streams)) {
      groups.push(row(spans, at, THIN, per, name, used));
      at += THIN + 1;
    }
    groups.push(memoryCurve(rank, payload, at, per, alone));
    at += (alone ? 2 * CURVE : CURVE) + 10;
  }
  const height = at + 26;
  const figure = svg(
    "svg",
    {
      class: "figure timeline",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      "aria-label": `simulated step of ${seconds(payload.end_s)}, bubble ${percent(simulation.bubble)}`,
    },
    svg(
      "g",
      { class: "grid", "aria-hidden": "true" },
      ticks([0, payload.end_s], false, Math.max(2, Math.floor(width / 130))).map((value) => [
        svg("line", { x1: LEFT + value * per, x2: LEFT + value * per, y1: 0, y2: at }),
        svg("text", { x: LEFT + value * per, y: at + 16, "text-anchor": "middle" }, seconds(value)),
      ]),
    ),
    groups,
  );
  const linked = (text, name) => number(text, `simulation.${name}`, context);
  const exposed = Object.entries(simulation.exposed).map(([axis, value], index) => [
    `${index ? ", " : ""}${axis} `,
    linked(seconds(value), `exposed.${axis}`),
  ]);
  return panel(
    "Simulated step",
    {},
    h(
      "p",
      { class: "lead" },
      linked(seconds(simulation.step_time_s), "step_time_s"),
      " a step simulated, ",
      linked(seconds(simulation.estimate.step_time_s), "estimate.step_time_s"),
      " estimated; bubble ",
      linked(percent(simulation.bubble), "bubble"),
      "; exposed communication: ",
      exposed.length ? exposed : "none",
    ),
    truncated(payload.shown),
    legend(TIME.filter((term) => used.has(term))),
    h("div", { class: "scroll" }, figure),
    numbers(
      "what the length of the step is made of",
      ["part", "seconds", "share"],
      simulation.critical_path.map((part, index) => [
        part.axis ? `waiting for ${part.axis}, ${part.unit} ${part.phase}` : `${part.unit} ${part.phase}`,
        linked(seconds(part.seconds), `critical_path.${index}.seconds`),
        linked(percent(part.share), `critical_path.${index}.share`),
      ]),
    ),
  );
}

function row(spans, at, height, per, label, used) {
  return svg(
    "g",
    { transform: `translate(${LEFT} ${at})` },
    svg(
      "text",
      { class: height < ROW ? "thin" : "", x: -7, y: height / 2 + (height < ROW ? 3 : 4), "text-anchor": "end" },
      label,
    ),
    svg("rect", {
      class: "empty",
      x: 0,
      y: 0,
      width: "100%",
      height,
      style: { clipPath: `inset(0 ${RIGHT + LEFT}px 0 0)` },
    }),
    spans.map(([start, end, term, busy]) => {
      used.add(term);
      const title = `${term}, ${seconds(end - start)}${busy < 0.995 ? `, busy for ${percent(busy)} of it` : ""}`;
      return svg(
        "rect",
        {
          x: start * per,
          y: 0,
          width: Math.max((end - start) * per, 0.4),
          height,
          style: { fill: fill(term), fillOpacity: 0.25 + 0.75 * busy },
        },
        svg("title", {}, title),
      );
    }),
  );
}

// Edges of passes and, where there is room, which micro-batch it is.
function labels(passes, at, per) {
  return passes.map(([start, end, name]) => {
    const room = (end - start) * per,
      short = name.replaceAll(/\d+[FBIW]/g, "");
    const size = labelSize(short, room);
    return svg(
      "g",
      { transform: `translate(${LEFT + start * per} ${at})` },
      svg("title", {}, `${name.split("&").map(inWords).join(" and ")}, ${seconds(end - start)}`),
      svg("line", { class: "edge", x1: 0, x2: 0, y1: 0, y2: ROW }),
      size !== null &&
        svg(
          "text",
          {
            class: size,
            x: room / 2,
            y: ROW / 2 + 4,
            "text-anchor": "middle",
            style: { fill: textOn(name.includes("F") ? "forward" : "backward") },
          },
          short,
        ),
    );
  });
}

// Bytes of a device over time, against what it has.
function memoryCurve(rank, payload, at, per, alone) {
  const high = alone ? 2 * CURVE : CURVE;
  const most = Math.max(...payload.ranks.flatMap(({ curve }) => curve.map(([, value]) => value))) * 1.08;
  const y = (value) => high - (value / most) * high;
  const steps = rank.curve
    .map(
      ([when, value], index) =>
        `${index ? "H" : "M"}${(when * per).toFixed(1)}${index ? "V" : " "}${y(value).toFixed(1)}`,
    )
    .join("");
  const peak = Math.max(...rank.curve.map(([, value]) => value));
  return svg(
    "g",
    { transform: `translate(${LEFT} ${at + 2})` },
    svg("text", { class: "thin", x: -7, y: high / 2 + 4, "text-anchor": "end" }, bytes(peak)),
    most > payload.memory_capacity_bytes &&
      svg("line", {
        class: "limit",
        x1: 0,
        x2: payload.end_s * per,
        y1: y(payload.memory_capacity_bytes),
        y2: y(payload.memory_capacity_bytes),
      }),
    svg(
      "path",
      { class: "held", d: `${steps}H${(payload.end_s * per).toFixed(1)}V${high}H0Z` },
      svg("title", {}, `memory of a device over time, at most ${bytes(peak)}`),
    ),
  );
}
