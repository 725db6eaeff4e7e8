// A sweep: for each point the step by its parts, and the layout that was taken.

import { around, axes, path } from "./chart.js";
import { h, panel, svg, table } from "./dom.js";
import { bytes, count, digits, percent, seconds } from "./format.js";
import { fill, legend } from "./numbers.js";

const PARTS = ["compute", "recompute", "exposed communication", "bubble", "optimizer and host"];

export function drawSweep(found, context) {
  const name = (point) =>
    Object.entries(point.at)
      .map(([key, value]) => `${key}=${typeof value === "number" ? count(value) : value}`)
      .join(" ");
  const good = found.points.filter((point) => point.problem === null);
  const numeric =
    found.sweeps.length === 1 &&
    good.length > 1 &&
    good.every((point) => typeof Object.values(point.at)[0] === "number");
  const heads = ["point", "layout", "step", "tokens/s per device", "MFU", "memory", "bound by"];
  return [
    good.length
      ? panel(
          "Where the time goes",
          {},
          legend(PARTS.filter((part) => good.some((point) => point.parts[part] > 0))),
          stacks(good, name, context),
        )
      : null,
    numeric
      ? h(
          "div",
          { class: "pair" },
          line("Seconds of a step", good, (point) => point.step_time_s, seconds, found.sweeps[0].name, {
            ...context,
            width: context.half,
          }),
          line(
            "MFU",
            good,
            (point) => point.mfu,
            (value) => percent(value, 0),
            found.sweeps[0].name,
            { ...context, width: context.half },
          ),
        )
      : null,
    panel(
      "Points",
      {},
      table(
        "what was planned at each point",
        heads,
        found.points.map((point) =>
          point.problem === null
            ? [
                name(point),
                point.layout.text,
                seconds(point.step_time_s),
                count(point.tokens_per_s_per_device),
                percent(point.mfu),
                bytes(point.memory_bytes),
                point.bound,
              ]
            : [name(point), point.problem, "", "", "", "", ""],
        ),
      ),
    ),
    knees(found),
  ];
}

function knees(found) {
  const known = found.knees.filter((knee) => knee.reason);
  return known.length
    ? panel(
        "Knees",
        {},
        h(
          "ul",
          {},
          known.map((knee) => h("li", {}, knee.reason)),
        ),
      )
    : null;
}

function stacks(points, name, context) {
  const width = Math.max(context.width, 300),
    left = 130,
    step = 30;
  return svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} ${points.length * step + 4}`,
      width,
      height: points.length * step + 4,
      role: "img",
      "aria-label": "shares of each point's step",
    },
    points.map((point, index) => {
      let at = 0;
      const per = (width - left - 80) / point.step_time_s;
      return svg(
        "g",
        { transform: `translate(${left} ${index * step})` },
        svg("text", { x: -8, y: 17, "text-anchor": "end" }, name(point)),
        PARTS.filter((part) => point.parts[part] > 0).map((part) => {
          const one = svg(
            "g",
            { class: "segment" },
            svg(
              "title",
              {},
              `${part} ${seconds(point.parts[part])}, ${percent(point.parts[part] / point.step_time_s)}`,
            ),
            svg("rect", { x: at, y: 2, width: point.parts[part] * per, height: 22, style: { fill: fill(part) } }),
          );
          at += point.parts[part] * per;
          return one;
        }),
        svg("text", { x: at + 6, y: 17 }, seconds(point.step_time_s)),
      );
    }),
  );
}

function line(title, points, value, format, label, context) {
  const at = points.map((point) => [Object.values(point.at)[0], value(point)]);
  const log = at.every(([x]) => x > 0) && Math.max(...at.map(([x]) => x)) / Math.min(...at.map(([x]) => x)) > 8;
  const figure = axes({
    width: Math.max(context.width, 280),
    height: 250,
    label: `${title} over ${label}`,
    x: {
      domain: around(
        at.map(([x]) => x),
        log,
      ),
      log,
      label,
      format: (one) => digits(one, 5),
    },
    y: {
      domain: around(
        at.map(([, y]) => y),
        false,
        0.15,
      ),
      label: title,
      format,
    },
  });
  figure.marks.append(
    path(
      at.map(([x, y]) => [figure.x(x), figure.y(y)]),
      { class: "front" },
    ),
    ...at.map(([x, y]) =>
      svg(
        "circle",
        { class: "on-front", cx: figure.x(x), cy: figure.y(y), r: 4.5 },
        svg("title", {}, `${label}=${count(x)}: ${format(y)}`),
      ),
    ),
  );
  return panel(title, {}, figure.root);
}
