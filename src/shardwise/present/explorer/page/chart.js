// Charts as Python sends them: marks in the coordinates of axes, whose ticks are texts. The page has the width.

import { colour, h, onColour, svg } from "./dom.js";
import { percent, seconds } from "./format.js";

const EDGE = { left: 72, right: 14, top: 12, bottom: 40 };
const LETTER = 7.6; // pixels of a letter of a label, at most on average

// Where values of an axis go: linear, or logarithmic.
function scale({ ends, log }, start, end) {
  const [low, high] = log ? ends.map(Math.log) : ends;
  return (value) => start + (((log ? Math.log(value) : value) - low) / (high - low || 1)) * (end - start);
}

// The finest ticks of an axis that have room.
const fitting = ({ ticks }, limit) => ticks.find((set) => set.length > 1 && set.length <= limit + 1) ?? ticks.at(-1) ?? [];

function figure(width, height, label, attributes, ...children) {
  const size = { viewBox: `0 0 ${width} ${height}`, width, height };
  return svg("svg", { class: "figure", ...size, role: "img", "aria-label": label, ...attributes }, children);
}

const upward = (x, y, text) => svg("text", { class: "axis", x, y, "text-anchor": "middle", transform: `rotate(-90 ${x} ${y})` }, text);

// What a click on a mark does: it takes its state, or explains its number.
function action({ query, path }, { go, why }) {
  if (query) return go && (() => go(Object.fromEntries(new URLSearchParams(query))));
  return path && why && (() => why(path));
}

// The same for Enter and the space bar.
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

const SHAPES = {
  circle: (x, y, r = 4.5) => ["circle", { cx: x, cy: y, r }],
  dot: (x, y) => SHAPES.circle(x, y, 2.6),
  disc: (x, y) => SHAPES.circle(x, y, 7),
  ring: (x, y, r = 9) => SHAPES.circle(x, y, r),
  triangle: (x, y, r = 4.5) => ["path", { d: `M${x} ${y - r - 1}L${x + r + 1} ${y + r}H${x - r - 1}Z` }],
  cross: (x, y, r = 8) => ["path", { d: `M${x - r} ${y}H${x + r}M${x} ${y - r}V${y + r}` }],
};

// A point, or the sample of a legend.
function drawShape(shape, x, y, name, attributes, radius) {
  const [tag, place] = SHAPES[shape](x, y, radius);
  const isOutline = shape === "ring" || shape === "cross";
  const style = isOutline ? { fill: "none", stroke: colour(name) } : { fill: colour(name) };
  return svg(tag, { ...place, style, ...attributes, class: `point ${shape} ${attributes.class ?? ""}` });
}

const PLOTTED = {
  Curve: ({ points, colour: name, reference, label }, across, up) => {
    const place = ([x, y], index) => `${index ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
    const line = { class: `curve ${reference ? "reference" : ""}`, d: points.map(place).join(""), style: { stroke: colour(name) } };
    const [x, y] = points.at(-1);
    return [svg("path", line), label && svg("text", { class: "axis", x: across(x) - 4, y: up(y) - 6, "text-anchor": "end" }, label)];
  },
  Points: (mark, across, up, context) => {
    const onclick = action(mark, context);
    const attributes = { class: onclick ? (mark.query ? "takes" : "explains") : "", onclick };
    return mark.points.map(([x, y]) => {
      const point = drawShape(mark.shape ?? "circle", across(x), up(y), mark.colour, attributes);
      point.append(svg("title", {}, mark.hover));
      return point;
    });
  },
  RuleLine: ({ at, label }, across, up, context, bottom) => {
    const x = across(at);
    const text = svg("text", { class: "axis", x: x - 4, y: EDGE.top + 10, "text-anchor": "end" }, label);
    return [svg("line", { class: "limit", x1: x, x2: x, y1: EDGE.top, y2: bottom }), text];
  },
};

function drawPlot({ x, y, marks, size }, label, context) {
  const width = Math.max(context.width, 280);
  const right = width - EDGE.right,
    bottom = EDGE.top + size[1];
  const across = scale(x, EDGE.left, right);
  const up = scale(y, bottom, EDGE.top);
  const grid = [
    fitting(x, Math.max(2, Math.floor((right - EDGE.left) / 90))).map(([value, text]) => [
      svg("line", { x1: across(value), x2: across(value), y1: EDGE.top, y2: bottom }),
      svg("text", { x: across(value), y: bottom + 15, "text-anchor": "middle" }, text),
    ]),
    fitting(y, 5).map(([value, text]) => [
      svg("line", { x1: EDGE.left, x2: right, y1: up(value), y2: up(value) }),
      svg("text", { x: EDGE.left - 7, y: up(value) + 4, "text-anchor": "end" }, text),
    ]),
    svg("text", { class: "axis", x: (EDGE.left + right) / 2, y: bottom + EDGE.bottom - 6, "text-anchor": "middle" }, x.title),
    upward(12, (EDGE.top + bottom) / 2, y.title),
  ];
  const drawn = marks.map((mark) => PLOTTED[mark.kind](mark, across, up, context, bottom));
  return figure(
    width,
    bottom + EDGE.bottom,
    label,
    {},
    svg("g", { class: "grid", "aria-hidden": "true" }, grid),
    svg("g", { class: "marks" }, drawn),
  );
}

// The class of a label that fits into so many pixels; null where none does.
const labelSize = (text, room) => (room > 7.2 * text.length + 2 ? "" : room > 5.8 * text.length + 1 ? "thin" : null);

function inside(text, room, height, name) {
  const size = text && height > 12 ? labelSize(text, room) : null;
  const place = { x: room / 2, y: height / 2 + 4, "text-anchor": "middle" };
  return size !== null && svg("text", { class: size, ...place, style: { fill: onColour(name) } }, text);
}

const valueAt = (payload, path) => path.split(".").reduce((value, key) => value?.[key], payload);
const isCurve = (mark) => mark.form === "curve";

// Rows of bars or spans from 0 on, each behind its label.
function drawRows({ x, y, marks, size: [least, usual], gap = 0 }, label, context) {
  const width = Math.max(context.width, least);
  const longest = Math.max(...y.categories.map((row) => row.label.length));
  const left = longest && Math.min(LETTER * longest + 10, width * 0.36);
  const notes = Math.max(0, ...y.categories.map(({ lines = [""] }) => LETTER * lines[0].length));
  const end = x.ends[1];
  const per = (width - left - 6 - notes) / (end || 1);
  const curves = marks.filter(isCurve).map((mark) => [mark.row ?? 0, valueAt(context.payload, mark.source)]);
  const limit = marks.find((mark) => mark.kind === "RuleLine" && mark.axis !== "y");
  const room = {
    per,
    left,
    end,
    ground: limit?.at ?? end,
    top: 1.08 * Math.max(0, ...curves.flatMap(([, curve]) => curve.map(([, value]) => value))),
    level: marks.find((mark) => mark.kind === "RuleLine" && mark.axis === "y")?.at,
  };
  let top = 2;
  const rows = y.categories.map((category, row) => {
    const hasCurve = curves.some(([number]) => number === row);
    const height = hasCurve ? (curves.length > 1 ? 28 : 56) : category.thin ? usual / 2 : usual;
    top += row && (category.thin ? 1 : gap);
    const of = { ...room, row, height, hasCurve };
    const drawn = svg("g", { transform: `translate(${left} ${top})`, "data-row": category.label }, drawRow(category, marks, of, context));
    top += height;
    return drawn;
  });
  top += gap;
  const edge = left + room.ground * per;
  const border = limit && [
    svg("line", { class: "limit", x1: edge, x2: edge, y1: 0, y2: top }),
    svg("text", { class: "axis", x: edge - 4, y: top + 12, "text-anchor": "end" }, limit.label),
  ];
  const axis = fitting(x, Math.max(2, Math.floor(width / 130))).map(([value, text]) => [
    svg("line", { x1: left + value * per, x2: left + value * per, y1: 0, y2: top }),
    svg("text", { x: left + value * per, y: top + 14, "text-anchor": "middle" }, text),
  ]);
  const high = top + (limit || axis.length ? 20 : 0);
  const role = marks.some((mark) => mark.kind === "StackedBars") ? "group" : "img";
  return figure(width, high, label, { role }, svg("g", { class: "grid", "aria-hidden": "true" }, axis), rows, border);
}

function drawRow({ label, lines: [note] = [] }, marks, room, context) {
  const { row, height, per, left, hasCurve } = room;
  const short = LETTER * label.length > left ? `${label.slice(0, Math.floor(left / LETTER) - 2)}…` : label;
  const thin = height < 20 || hasCurve ? "thin" : "";
  const fullName = short === label ? null : svg("title", {}, label);
  const bar = marks.find((mark) => mark.kind === "StackedBars")?.bars[row] ?? [];
  const end = bar.reduce((sum, part) => sum + part.value, 0);
  return [
    short && svg("text", { class: thin, x: -7, y: height / 2 + (thin ? 3 : 4), "text-anchor": "end" }, short, fullName),
    !hasCurve && svg("rect", { class: "empty", width: room.ground * per, height }),
    marks.map((mark) => IN_ROWS[mark.kind]?.(mark, room, context)),
    note && svg("text", { x: end * per + 6, y: height / 2 + 4 }, note),
  ];
}

const ofRow = (mark, row) => mark.spans.filter((span) => (span.row ?? 0) === row);

const IN_ROWS = {
  StackedBars: ({ bars }, { row, height, per }, context) => {
    let start = 0;
    return bars[row].map((part) => {
      const segment = drawSegment(part, start * per, height, per, context);
      start += part.value;
      return segment;
    });
  },
  Spans: (mark, { row, height, per }) => ofRow(mark, row).map((span) => drawPass(span, height, per)),
  SpanEdges: (mark, { row, height, per }) => ofRow(mark, row).map((span) => drawEdge(span, height, per)),
  PayloadMark: (mark, room, { payload }) => {
    if ((mark.row ?? 0) !== room.row) return null;
    const values = valueAt(payload, mark.source);
    return isCurve(mark) ? drawCurve(values, mark, room) : values.map((span) => drawBusySpan(span, room));
  },
};

function drawSegment(part, start, height, per, context) {
  const width = Math.max(part.value * per, 0.5);
  const rect = svg("rect", { width, height, style: { fill: colour(part.colour) } });
  const text = width > 7.2 * part.name.length + 8 && inside(part.name, width, height, part.colour);
  const place = { class: "segment", transform: `translate(${start} 0)`, "aria-label": part.hover };
  return svg("g", { ...place, ...pressed(action(part, context)) }, svg("title", {}, part.hover), rect, text);
}

function drawPass({ start, end, colour: name, hover, text = "", lane: [lane, lanes] = [0, 1] }, height, per) {
  const width = Math.max((end - start) * per, 0.5),
    high = height / lanes;
  const rect = svg("rect", { class: "pass", width, height: high, style: { fill: colour(name) } });
  const place = { transform: `translate(${start * per} ${lane * high})`, "aria-label": hover };
  return svg("g", place, svg("title", {}, hover), rect, inside(text, width, high, name));
}

function drawEdge({ start, end, colour: name, hover, text }, height, per) {
  const line = svg("line", { class: "edge", y2: height });
  const place = { transform: `translate(${start * per} 0)` };
  return svg("g", place, svg("title", {}, hover), line, inside(text, (end - start) * per, height, name));
}

function drawBusySpan([start, end, term, busy], { height, per }) {
  const title = `${term}, ${seconds(end - start)}${busy < 0.995 ? `, busy for ${percent(busy)} of it` : ""}`;
  const style = { fill: colour(`term:${term}`), fillOpacity: 0.25 + 0.75 * busy };
  return svg("rect", { x: start * per, width: Math.max((end - start) * per, 0.4), height, style }, svg("title", {}, title));
}

// Values over time in steps, on the scale of all rows; the level where it is within the scale.
function drawCurve(curve, { hover }, { height, per, end, top, level }) {
  const y = (value) => height - (value / top) * height;
  const steps = curve
    .map(([when, value], index) => `${index ? "H" : "M"}${(when * per).toFixed(1)}${index ? "V" : " "}${y(value).toFixed(1)}`)
    .join("");
  const right = end * per;
  return [
    level < top && svg("line", { class: "limit", x2: right, y1: y(level), y2: y(level) }),
    svg("path", { class: "held", d: `${steps}H${right.toFixed(1)}V${height}H0Z` }, svg("title", {}, hover)),
  ];
}

const CELL = 28;

// The parts of an array as a grid, each with the ranks that hold it.
function drawCells({ x, y, marks: [{ source, dims = [null, null] }] }, label, { payload, ...context }) {
  const holders = valueAt(payload, source);
  const width = Math.max(context.width, 300),
    left = 26;
  const place = (holder, axis) => (dims[axis] === null ? 0 : holder.place[dims[axis]]);
  const [numRows, numColumns] = [0, 1].map((axis) => 1 + Math.max(...holders.map((holder) => place(holder, axis))));
  const cell = Math.min((width - left - 8) / numColumns, 220);
  const cells = holders.map((holder) => {
    const [row, column] = [place(holder, 0), place(holder, 1)];
    const ranks = `${holder.ranks.join(", ")}${holder.num_ranks > holder.ranks.length ? ", …" : ""}`;
    const fits = Math.floor((cell - 10) / 6.6);
    const name = `series:${(row + column * 5) % 13}`;
    const text = ranks.length > fits ? `${ranks.slice(0, Math.max(fits - 1, 1))}…` : ranks;
    return svg(
      "g",
      { transform: `translate(${left + column * cell} ${20 + row * CELL})` },
      svg("title", {}, `ranks ${ranks} (${holder.num_ranks})`),
      svg("rect", { class: "part", width: cell - 2, height: CELL - 2, style: { fill: colour(name) } }),
      svg("text", { x: 6, y: CELL / 2 + 3, style: { fill: onColour(name) } }, text),
    );
  });
  const heading = svg("text", { class: "axis", x: left, y: 12 }, x.title ?? "");
  return figure(width, numRows * CELL + 30, label, {}, heading, upward(12, 24 + (numRows * CELL) / 2, y.title ?? ""), cells);
}

function drawPanel(panel, label, context) {
  const draw = panel.y.categories ? drawRows : panel.marks[0].form === "cells" ? drawCells : drawPlot;
  return draw(panel, label, context);
}

// A square of a colour.
export const swatch = (name) => h("span", { class: "swatch", style: { background: colour(name) }, "aria-hidden": "true" });

function sample({ sample: shape = "box", colour: name }) {
  if (shape === "box") return swatch(name);
  const radius = shape === "ring" || shape === "cross" ? 4 : undefined;
  const point = drawShape(shape === "point" ? "circle" : shape, 6, 6, name, {}, radius);
  return svg("svg", { class: "sample", width: 12, height: 12, "aria-hidden": "true" }, point);
}

// A chart at the width of its context, under its legend; `payload` of the context is the answer that the chart refers to.
export function drawChart({ title, panels, legend }, context) {
  const entries = legend.map((entry) => h("li", {}, sample(entry), entry.label));
  return [
    entries.length > 0 && h("ul", { class: "legend", "aria-label": "colours" }, entries),
    panels.map((panel) => h("div", { class: "scroll" }, drawPanel(panel, title, context))),
  ];
}
