// Time against memory of the layouts that were searched; a point is a layout to take.

import { around, axes, path } from "./chart.js";
import { h, numbers, panel, svg } from "./dom.js";
import { bytes, count, quantity, seconds } from "./format.js";
import { number } from "./numbers.js";

export function drawPareto(payload, context) {
  const { search, own } = payload;
  const title = "Pareto front";
  if (!search.front)
    return panel(
      title,
      {},
      h("p", { class: "quiet" }, search.problems?.length ? search.problems[0] : "searching all layouts of this job"),
    );
  const fast = own ? Math.min(own.step_time_s, search.best.step_time_s) : search.best.step_time_s;
  const points = search.points.filter((one) => one.step_time_s < 30 * fast);
  const every = [...points, ...search.front, ...(own ? [own] : [])];
  const x = {
    domain: around([...every.map((one) => one.memory_bytes), payload.memory_capacity_bytes], false),
    label: "memory of a device",
    format: bytes,
  };
  const y = {
    domain: around(
      every.map((one) => one.step_time_s),
      true,
    ),
    log: true,
    label: "seconds of a step",
    format: seconds,
  };
  x.domain[0] = Math.max(0, x.domain[0]);
  const figure = axes({
    width: Math.max(context.width, 300),
    height: 300,
    x,
    y,
    label: "time against memory of every layout searched",
  });
  const at = (one) => [figure.x(one.memory_bytes), figure.y(one.step_time_s)];
  const put = (...marks) => figure.marks.append(...marks);
  const limit = figure.x(payload.memory_capacity_bytes);
  put(
    svg("line", { class: "limit", x1: limit, x2: limit, y1: 12, y2: 260 }),
    svg("text", { class: "axis", x: limit - 4, y: 22, "text-anchor": "end" }, `${bytes(payload.memory_capacity_bytes)} of a device`),
  );
  put(
    ...points.map((one) => dot(one, at(one), 2.6, "searched", context)),
    path(search.front.map(at), { class: "front" }),
    ...search.front.map((one) => dot(one, at(one), 4.5, "on-front", context)),
  );
  put(ring(at(search.best), "best-ring", `the plan: ${search.best.text}`));
  if (own) put(cross(at(own), `this layout: ${own.text}, ${seconds(own.step_time_s)}, ${bytes(own.memory_bytes)}`));
  const take = (one) =>
    context.go
      ? h("button", { type: "button", class: "take", onclick: () => context.go({ layout: one.layout }) }, "take it")
      : "";
  return panel(
    title,
    {},
    h(
      "p",
      { class: "lead" },
      number(count(search.num_layouts), "search.num_layouts", context),
      " layouts searched, ",
      number(count(search.num_fitting), "search.num_fitting", context),
      ` fit; ${search.front.length} are on the front`,
    ),
    h(
      "ul",
      { class: "legend" },
      h("li", {}, h("span", { class: "key front-key" }), "on the front"),
      h("li", {}, h("span", { class: "key searched-key" }), "fastest of its degrees"),
      h("li", {}, h("span", { class: "key ring-key" }), "the plan"),
      h("li", {}, h("span", { class: "key cross-key" }, "✚"), "this layout"),
    ),
    figure.root,
    h("p", { class: "quiet" }, "Hover to read a layout, click to take it; the table has the front for the keyboard."),
    numbers(
      "layouts on the front",
      ["layout", "step", "memory", ""],
      search.front.map((one, index) => [
        one.text,
        number(seconds(one.step_time_s), `search.front.${index}.step_time_s`, context),
        number(quantity(one.memory_bytes, "B"), `search.front.${index}.memory_bytes`, context),
        take(one),
      ]),
    ),
  );
}

function dot(one, [cx, cy], r, name, context) {
  return svg(
    "circle",
    { class: name, cx, cy, r, onclick: context.go && (() => context.go({ layout: one.layout })) },
    svg("title", {}, `${one.text}\n${seconds(one.step_time_s)}, ${bytes(one.memory_bytes)}`),
  );
}

const ring = ([cx, cy], name, said) => svg("circle", { class: name, cx, cy, r: 9 }, svg("title", {}, said));
const cross = ([x, y], said) =>
  svg("path", { class: "own", d: `M${x - 8} ${y}H${x + 8}M${x} ${y - 8}V${y + 8}` }, svg("title", {}, said));
