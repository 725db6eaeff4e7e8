// Stacked bars of terms: one for each stage's memory, one for the step's time.

import { h, numbers, panel, svg } from "./dom.js";
import { bytes, digits, percent, seconds } from "./format.js";
import { MEMORY, TIME, fill, number, swatch, textOn, words } from "./numbers.js";

const HEIGHT = 26;

// Segments of a bar, each with its term, from zero to the width that `per` gives a value.
function segments(values, order, per, height, format, tree, context) {
  let at = 0;
  return order
    .filter((term) => values[term] > 0)
    .map((term) => {
      const width = values[term] * per;
      const said = `${words(term)}, ${format(values[term])}`;
      const ask = context.why && {
        tabindex: 0,
        role: "button",
        onclick: () => context.why(`${tree}.${term}`),
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            context.why(`${tree}.${term}`);
          }
        },
      };
      const found = svg(
        "g",
        { class: "segment", "aria-label": said, ...ask },
        svg("title", {}, said),
        svg("rect", { x: at, y: 0, width: Math.max(width, 0.5), height, style: { fill: fill(term) } }),
        width > 7.2 * term.length + 8 &&
          svg("text", { x: at + 6, y: height / 2 + 4, style: { fill: textOn(term) } }, term),
      );
      at += width;
      return found;
    });
}

// The terms that are there (`shown`: elsewhere too), each with its value and its share.
function rows(values, order, format, tree, context, shown = (term) => values[term] > 0) {
  const whole = Object.values(values).reduce((sum, value) => sum + value, 0);
  return order
    .filter(shown)
    .map((term) =>
      h(
        "li",
        {},
        swatch(term),
        h("span", { class: "name" }, words(term)),
        number(format(values[term]), `${tree}.${term}`, context),
        h("span", { class: "share" }, percent(values[term] / whole)),
      ),
    );
}

// Memory of a device of each stage, beside what it has.
export function drawMemory(memory, context) {
  const [one] = memory.layouts;
  const capacity = memory.memory_capacity_bytes;
  const groups = one.stages
    .map((stage, index) => ({ stage, first: index, last: index }))
    .reduce((found, next) => {
      const before = found.at(-1);
      if (before && JSON.stringify(before.stage) === JSON.stringify(next.stage)) before.last = next.last;
      else found.push(next);
      return found;
    }, []);
  const name = ({ first, last }) =>
    one.stages.length === 1 ? "every device" : first === last ? `stage ${first}` : `stages ${first}–${last}`;
  const sum = (stage) => Object.values(stage).reduce((total, value) => total + value, 0);
  const left = 92,
    width = Math.max(context.width, 280),
    most = Math.max(capacity, one.memory_bytes) * 1.02;
  const per = (width - left - 4) / most,
    step = HEIGHT + 8,
    height = groups.length * step + 22;
  const limit = left + capacity * per;
  const figure = svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "group",
      "aria-label": `memory of a device by stage, of ${bytes(capacity)}`,
    },
    groups.map((group, index) =>
      svg(
        "g",
        { transform: `translate(${left} ${index * step})` },
        svg("rect", { class: "empty", x: 0, y: 0, width: capacity * per, height: HEIGHT }),
        svg("text", { x: -8, y: HEIGHT / 2 + 4, "text-anchor": "end" }, name(group)),
        segments(group.stage, MEMORY, per, HEIGHT, bytes, "memory", context),
      ),
    ),
    svg("line", { class: "limit", x1: limit, x2: limit, y1: 0, y2: height - 16 }),
    svg("text", { class: "axis", x: limit - 4, y: height - 4, "text-anchor": "end" }, `${bytes(capacity)} of a device`),
  );
  const fullest = one.stages[one.fullest_stage];
  const somewhere = (term) => one.stages.some((stage) => stage[term] > 0);
  const heads = ["stage", ...MEMORY.filter(somewhere), "sum"];
  const whole = one.stages.length === 1 ? "" : ` on stage ${one.fullest_stage}, the fullest`;
  return panel(
    "Memory",
    {},
    h(
      "p",
      { class: "lead" },
      number(bytes(one.memory_bytes), "memory_bytes", context),
      ` of ${bytes(capacity)}${whole}`,
    ),
    figure,
    h("ul", { class: "terms" }, rows(fullest, MEMORY, bytes, "memory", context, somewhere)),
    numbers(
      "bytes of a device of each stage",
      heads,
      groups.map((group) => [
        name(group),
        ...heads.slice(1, -1).map((term) => bytes(group.stage[term])),
        bytes(sum(group.stage)),
      ]),
    ),
  );
}

// Seconds of a step by term, and what of the traffic is hidden; `run`: what a run of the plan measured, beside it.
export function drawTime(estimate, context, run) {
  const { time, step_time_s: step, hidden } = estimate;
  const said = (text, name) => number(text, `estimate.estimate.${name}`, context);
  const [low, high] = estimate.interval90?.map((value, end) => said(seconds(value), `interval90.${end}`)) ?? [];
  const interval = low ? [", 90% prediction interval ", low, " to ", high] : ", a bound";
  return panel(
    "Time of a step",
    {},
    h("p", { class: "lead" }, number(seconds(step), "step_time_s", context), interval, run && measured(run, context)),
    bars(estimate, run, context),
    h("ul", { class: "terms" }, rows(time, TIME, seconds, "time", context)),
    run && compared(run, context),
    h(
      "p",
      { class: "quiet" },
      Object.keys(hidden).length
        ? [
            "hidden behind compute: ",
            Object.entries(hidden).map(([axis, value], index) => [
              `${index ? ", " : ""}${axis} `,
              said(seconds(value), `hidden.${axis}`),
            ]),
          ]
        : "no traffic is hidden behind compute",
    ),
  );
}

const measured = ({ time }, context) => [
  "; ",
  number(seconds(time.measured_s), "reconcile.time.measured_s", context),
  " measured",
  time.within === null ? "" : time.within ? ", inside it" : ", outside it",
];

// The step as predicted and, where it ran, as measured, on one scale.
function bars(estimate, run, context) {
  const found = [["predicted", estimate.time, "time"]];
  if (run) found.push(["measured", Object.fromEntries(run.time.terms.map((one) => [one.name, one.measured_s])), ""]);
  const width = Math.max(context.width, 280),
    left = run ? 74 : 0,
    step = HEIGHT + 6,
    height = found.length * step - 6;
  const per = (width - left - 2) / Math.max(estimate.step_time_s, run?.time.measured_s ?? 0);
  const order = [...TIME, ...(run?.time.terms.map((one) => one.name).filter((name) => !TIME.includes(name)) ?? [])];
  return svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "group",
      "aria-label": `a step of ${seconds(estimate.step_time_s)} by term`,
    },
    found.map(([name, values, tree], index) =>
      svg(
        "g",
        { transform: `translate(${left} ${index * step})`, class: `${name}-bar` },
        run && svg("text", { x: -8, y: HEIGHT / 2 + 4, "text-anchor": "end" }, name),
        segments(values, order, per, HEIGHT, seconds, tree, tree ? context : {}),
      ),
    ),
  );
}

// Each term measured, with what it differs by from its prediction.
function compared(run, context) {
  const shown = run.time.terms.map((one, index) => [one, `reconcile.time.terms.${index}`]);
  return h(
    "ul",
    { class: "terms", "aria-label": "measured" },
    h("li", {}, h("span", {}), h("strong", {}, `measured on ${run.machine}`), h("span", {}), h("span", {})),
    shown
      .filter(([one]) => one.measured_s > 0)
      .map(([one, place]) =>
        h(
          "li",
          {},
          swatch(one.name),
          h("span", { class: "name" }, words(one.name)),
          number(seconds(one.measured_s), `${place}.measured_s`, context),
          h("span", { class: "share" }, one.predicted_s ? beside(one.measured_s / one.predicted_s) : ""),
        ),
      ),
  );
}

// How many times as long as predicted, or by which part longer.
const beside = (times) =>
  times > 2 || times < 0.5 ? `${digits(times)}×` : `${times < 1 ? "−" : "+"}${percent(Math.abs(times - 1), 0)}`;
