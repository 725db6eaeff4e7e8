// Scales, axes and marks of the figures.

import { svg } from "./dom.js";

const EDGE = { left: 64, right: 14, top: 12, bottom: 40 };

// Where values of a domain go: linear, or logarithmic.
export function scale(domain, range, log = false) {
  const [low, high] = log ? domain.map(Math.log) : domain;
  const at = (value) =>
    range[0] + (((log ? Math.log(value) : value) - low) / (high - low || 1)) * (range[1] - range[0]);
  return Object.assign(at, { domain, log });
}

// Steps of a logarithmic axis, the finest first: every so many powers of ten, and between them.
const LOG_STEPS = [
  [1, [1, 2, 5]],
  [1, [1, 3]],
  [1, [1]],
  [2, [1]],
  [3, [1]],
  [6, [1]],
];

// Round values within a domain.
export function ticks([low, high], log, most = 6) {
  if (log) {
    const within = ([every, steps]) => {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1)
        if (power % every === 0) found.push(...steps.map((step) => step * 10 ** power));
      return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    };
    const found = LOG_STEPS.map(within).find((some) => some.length > 1 && some.length <= most + 1);
    return found ?? ticks([low, high], false, most);
  }
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= raw) ?? 10);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1)
    found.push(index * step);
  return found;
}

// A figure with two axes: `x` and `y` have a domain, a label, a format, and may be logarithmic.
export function axes({ width, height, x, y, label }) {
  const right = Math.max(width - EDGE.right, EDGE.left + 80);
  const across = scale(x.domain, [EDGE.left, right], x.log);
  const up = scale(y.domain, [height - EDGE.bottom, EDGE.top], y.log);
  const few = Math.max(2, Math.floor((right - EDGE.left) / 90));
  const root = svg("svg", {
    class: "figure",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": label,
  });
  const grid = svg("g", { class: "grid", "aria-hidden": "true" });
  for (const value of ticks(x.domain, x.log, few)) {
    const at = across(value);
    grid.append(
      svg("line", { x1: at, x2: at, y1: EDGE.top, y2: height - EDGE.bottom }),
      svg("text", { x: at, y: height - EDGE.bottom + 15, "text-anchor": "middle" }, x.format(value)),
    );
  }
  for (const value of ticks(y.domain, y.log, 5)) {
    const at = up(value);
    grid.append(
      svg("line", { x1: EDGE.left, x2: right, y1: at, y2: at }),
      svg("text", { x: EDGE.left - 7, y: at + 4, "text-anchor": "end" }, y.format(value)),
    );
  }
  grid.append(
    svg("text", { class: "axis", x: (EDGE.left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.label),
  );
  grid.append(
    svg(
      "text",
      {
        class: "axis",
        x: 12,
        y: (EDGE.top + height - EDGE.bottom) / 2,
        "text-anchor": "middle",
        transform: `rotate(-90 12 ${(EDGE.top + height - EDGE.bottom) / 2})`,
      },
      y.label,
    ),
  );
  const marks = svg("g", { class: "marks" });
  root.append(grid, marks);
  return { root, marks, x: across, y: up };
}

export function path(points, attributes) {
  return svg("path", {
    fill: "none",
    d: points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""),
    ...attributes,
  });
}

// The least and the largest of some values, with some room on either side.
export function around(values, log, room = 0.06) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (log) return [low / (1 + 3 * room), high * (1 + 3 * room)];
  const more = (high - low || Math.abs(high) || 1) * room;
  return [low - more, high + more];
}
