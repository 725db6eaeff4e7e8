// Charts as Python sends them, in data coordinates: axes with marks, rows of spans, cells of an array.

import { fill, svg } from "./dom.js";
import { inUnit, percent, quantity, seconds } from "./format.js";

const EDGE = { left: 72, right: 14, top: 12, bottom: 40 };
const LETTER = 7.6; // pixels of a letter of a label, at most on average
const textOn = (term) => `var(--on-${String(term).replaceAll(" ", "-")}, var(--paper))`;
const tick = (value, unit) => (unit ? inUnit(value, unit) : quantity(value));

// Where values of a domain go: linear, or logarithmic.
function scale(domain, [start, end], log = false) {
  const [low, high] = log ? domain.map(Math.log) : domain;
  return (value) => start + (((log ? Math.log(value) : value) - low) / (high - low || 1)) * (end - start);
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
export function ticks([low, high], log, limit = 6) {
  if (log) {
    const within = ([every, steps]) => {
      const values = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1)
        if (power % every === 0) values.push(...steps.map((step) => step * 10 ** power));
      return values.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    };
    const fitting = LOG_STEPS.map(within).find((values) => values.length > 1 && values.length <= limit + 1);
    return fitting ?? ticks([low, high], false, limit);
  }
  const raw = (high - low) / limit || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= raw) ?? 10);
  const values = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) values.push(index * step);
  return values;
}

function figure(width, height, label, attributes, ...children) {
  const size = { viewBox: `0 0 ${width} ${height}`, width, height };
  return svg("svg", { class: "figure", ...size, role: "img", "aria-label": label, ...attributes }, children);
}

const upward = (x, y, text) => svg("text", { class: "axis", x, y, "text-anchor": "middle", transform: `rotate(-90 ${x} ${y})` }, text);

// What a click, Enter or the space bar on a mark does.
const pressed = (act) =>
  act && {
    tabindex: 0,
    role: "button",
    onclick: act,
    onkeydown: (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act();
    },
  };

function drawPlot({ label, height, x, y, marks }, context) {
  const width = Math.max(context.width, 280);
  const right = width - EDGE.right,
    bottom = height - EDGE.bottom;
  const across = scale(x.span, [EDGE.left, right], x.log);
  const up = scale(y.span, [bottom, EDGE.top], y.log);
  const grid = [
    ticks(x.span, x.log, Math.max(2, Math.floor((right - EDGE.left) / 90))).map((value) => [
      svg("line", { x1: across(value), x2: across(value), y1: EDGE.top, y2: bottom }),
      svg("text", { x: across(value), y: bottom + 15, "text-anchor": "middle" }, tick(value, x.unit)),
    ]),
    ticks(y.span, y.log, 5).map((value) => [
      svg("line", { x1: EDGE.left, x2: right, y1: up(value), y2: up(value) }),
      svg("text", { x: EDGE.left - 7, y: up(value) + 4, "text-anchor": "end" }, tick(value, y.unit)),
    ]),
    svg("text", { class: "axis", x: (EDGE.left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.title),
    upward(12, (EDGE.top + bottom) / 2, y.title),
  ];
  const drawn = marks.map((mark) => {
    if (mark.curve) {
      const path = mark.curve.map(([a, b], index) => `${index ? "L" : "M"}${across(a).toFixed(1)} ${up(b).toFixed(1)}`).join("");
      return svg("path", { class: mark.style, fill: "none", d: path });
    }
    if (mark.points) return mark.points.map((point) => drawPoint(point, across(point.x ?? 0), up(point.y ?? 0), mark, context));
    const at = across(mark.limit),
      base = mark.y === null ? EDGE.top + 10 : up(mark.y) - 6;
    const text = svg("text", { class: "axis", x: at - 4, y: base, "text-anchor": "end" }, mark.text);
    return mark.y === null ? [svg("line", { class: "limit", x1: at, x2: at, y1: EDGE.top, y2: bottom }), text] : text;
  });
  return figure(width, height, label, {}, svg("g", { class: "grid", "aria-hidden": "true" }, grid), svg("g", { class: "marks" }, drawn));
}

const SHAPES = {
  circle: (x, y, r) => ["circle", { cx: x, cy: y, r }],
  triangle: (x, y, r) => ["path", { d: `M${x} ${y - r - 1}L${x + r + 1} ${y + r}H${x - r - 1}Z` }],
  cross: (x, y, r) => ["path", { d: `M${x - r} ${y}H${x + r}M${x} ${y - r}V${y + r}` }],
};

function drawPoint({ title, edit, path, shape = "circle", term }, x, y, { style, radius }, { go, why }) {
  const [tag, place] = SHAPES[shape](x, y, radius);
  const onclick = edit ? go && (() => go(edit)) : path ? why && (() => why(path)) : null;
  return svg(tag, { class: style, ...place, onclick, style: term ? { fill: fill(term) } : null }, svg("title", {}, title));
}

// The class of a label that fits into so many pixels; null where none does.
const labelSize = (text, room) => (room > 7.2 * text.length + 2 ? "" : room > 5.8 * text.length + 1 ? "thin" : null);

function label(text, room, height, term) {
  const size = text && height > 12 ? labelSize(text, room) : null;
  const place = { x: room / 2, y: height / 2 + 4, "text-anchor": "middle" };
  return size !== null && svg("text", { class: size, ...place, style: { fill: textOn(term) } }, text);
}

const valueAt = (payload, path) => path.split(".").reduce((value, key) => value?.[key], payload);

function drawRows(chart, context) {
  const width = Math.max(context.width, chart.min_width);
  const names = chart.rows.map((row) => row.label);
  const longest = Math.max(...names.map((name) => name.length));
  const left = longest && Math.min(LETTER * longest + 10, width * 0.36);
  const notes = Math.max(0, ...chart.rows.map((row) => LETTER * (row.note ?? "").length));
  const per = (width - left - 6 - notes) / (chart.end || 1);
  let top = 2;
  const rows = chart.rows.map((row) => {
    const height = row.height ?? 26;
    const drawn = svg("g", { transform: `translate(${left} ${top})`, class: row.style }, drawRow(row, chart, height, per, left, context));
    top += height + (row.curve ? 10 : row.source ? 1 : 6);
    return drawn;
  });
  const edge = left + (chart.limit?.[0] ?? 0) * per;
  const limit = chart.limit && [
    svg("line", { class: "limit", x1: edge, x2: edge, y1: 0, y2: top }),
    svg("text", { class: "axis", x: edge - 4, y: top + 12, "text-anchor": "end" }, chart.limit[1]),
  ];
  const axis =
    chart.ticks &&
    ticks([0, chart.end], false, Math.max(2, Math.floor(width / 130))).map((value) => [
      svg("line", { x1: left + value * per, x2: left + value * per, y1: 0, y2: top }),
      svg("text", { x: left + value * per, y: top + 14, "text-anchor": "middle" }, tick(value, chart.ticks)),
    ]);
  const high = top + (chart.limit || chart.ticks ? 20 : 0);
  const attributes = { class: `figure ${chart.style}`, role: chart.mark === "segment" ? "group" : "img" };
  const grid = svg("g", { class: "grid", "aria-hidden": "true" }, axis);
  return figure(width, high, chart.label, attributes, grid, rows, limit);
}

function drawRow(row, chart, height, per, left, context) {
  const short = LETTER * row.label.length > left ? `${row.label.slice(0, Math.floor(left / LETTER) - 2)}…` : row.label;
  const thin = height < 20 || row.curve ? "thin" : "";
  const end = Math.max(0, ...row.spans.map((span) => span[1]));
  const fullName = short === row.label ? null : svg("title", {}, row.label);
  const ground = svg("rect", { class: "empty", width: (chart.limit?.[0] ?? chart.end) * per, height });
  return [
    short && svg("text", { class: thin, x: -7, y: height / 2 + (thin ? 3 : 4), "text-anchor": "end" }, short, fullName),
    row.curve ? drawCurve(valueAt(context.payload, row.curve), chart, row, height, per) : ground,
    row.source && valueAt(context.payload, row.source).map((span) => busySpan(span, height, per)),
    row.spans.map((span) => drawSpan(span, chart.mark, height, per, context)),
    row.edges?.map((pass) => drawEdge(pass, height, per)),
    row.note && svg("text", { x: end * per + 6, y: height / 2 + 4 }, row.note),
  ];
}

function drawSpan([start, end, term, title, text = "", path = "", lane = 0, lanes = 1, solid = true], mark, height, per, { why }) {
  const width = Math.max((end - start) * per, 0.5),
    high = height / lanes;
  const act = path && why ? pressed(() => why(path)) : {};
  const style = solid ? { fill: fill(term) } : { fill: "none", stroke: fill(term) };
  const rect = svg("rect", { class: mark === "segment" ? null : mark, width, height: high, style });
  const inside = solid && (mark !== "segment" || width > 7.2 * text.length + 8) && label(text, width, high, term);
  const place = { class: mark === "segment" ? "segment" : null, transform: `translate(${start * per} ${lane * high})` };
  return svg("g", { ...place, "aria-label": title, ...act }, svg("title", {}, title), rect, inside);
}

function busySpan([start, end, term, busy], height, per) {
  const title = `${term}, ${seconds(end - start)}${busy < 0.995 ? `, busy for ${percent(busy)} of it` : ""}`;
  const style = { fill: fill(term), fillOpacity: 0.25 + 0.75 * busy };
  return svg("rect", { x: start * per, width: Math.max((end - start) * per, 0.4), height, style }, svg("title", {}, title));
}

function drawEdge([start, end, text, title, term], height, per) {
  const line = svg("line", { class: "edge", y2: height });
  const inside = label(text, (end - start) * per, height, term);
  return svg("g", { transform: `translate(${start * per} 0)` }, svg("title", {}, title), line, inside);
}

// Bytes over time in steps, on the scale of all rows; the limit where it is within the scale.
function drawCurve(curve, chart, row, height, per) {
  const y = (value) => height - (value / chart.curve_end) * height;
  const steps = curve
    .map(([when, value], index) => `${index ? "H" : "M"}${(when * per).toFixed(1)}${index ? "V" : " "}${y(value).toFixed(1)}`)
    .join("");
  const end = chart.end * per,
    limit = y(chart.curve_limit);
  const title = svg("title", {}, `memory of a device over time, at most ${row.label}`);
  return [
    limit > 0 && svg("line", { class: "limit", x2: end, y1: limit, y2: limit }),
    svg("path", { class: "held", d: `${steps}H${end.toFixed(1)}V${height}H0Z` }, title),
  ];
}

const CELL = 28;

// The parts of an array as a grid, each with the ranks that hold it.
function drawCells({ label: name, source, down, across }, { payload, ...context }) {
  const { holders } = valueAt(payload, source);
  const width = Math.max(context.width, 300),
    left = 26;
  const place = (holder, split) => (split ? holder.place[split[0]] : 0);
  const [numRows, numColumns] = [down, across].map((split) => 1 + Math.max(...holders.map((holder) => place(holder, split))));
  const cell = Math.min((width - left - 8) / numColumns, 220);
  const cells = holders.map((holder) => {
    const [row, column] = [place(holder, down), place(holder, across)];
    const ranks = `${holder.ranks.join(", ")}${holder.num_ranks > holder.ranks.length ? ", …" : ""}`;
    const fits = Math.floor((cell - 10) / 6.6);
    const hue = (row + column * 5) % 13;
    const text = ranks.length > fits ? `${ranks.slice(0, Math.max(fits - 1, 1))}…` : ranks;
    return svg(
      "g",
      { transform: `translate(${left + column * cell} ${20 + row * CELL})` },
      svg("title", {}, `ranks ${ranks} (${holder.num_ranks})`),
      svg("rect", { class: "part", width: cell - 2, height: CELL - 2, style: { fill: `var(--series-${hue})` } }),
      svg("text", { x: 6, y: CELL / 2 + 3, style: { fill: `var(--on-series-${hue})` } }, text),
    );
  });
  const heading = svg("text", { class: "axis", x: left, y: 12 }, across?.[1] ?? "");
  return figure(width, numRows * CELL + 30, name, {}, heading, upward(12, 24 + (numRows * CELL) / 2, down?.[1] ?? ""), cells);
}

const KINDS = { plot: drawPlot, rows: drawRows, cells: drawCells };

// A chart at the width of its context; `payload` of the context is the answer that the chart refers to.
export const drawChart = (chart, context) => KINDS[chart.kind](chart, context);
