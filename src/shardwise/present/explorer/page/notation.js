// Which device holds what: the mesh, every weight in the named-axis notation, and the parts of one of them.

import { h, panel, svg, table } from "./dom.js";
import { count, quantity } from "./format.js";
import { number } from "./numbers.js";

const STATES = { rest: "at rest", use: "in use", gradient: "gradient", optimizer: "optimizer" };

export function drawNotation(payload, context) {
  const units = Object.entries(payload.units);
  const every = units.flatMap(([unit, { weights }]) =>
    weights.map((weight, index) => ({
      unit,
      weight,
      key: `${unit}.${weight.name}`,
      place: `units.${unit}.weights.${index}`,
    })),
  );
  const parts = (one) => one.weight.shards.rest.parts.reduce((product, number) => product * number, 1);
  const first = every.reduce((best, one) => (parts(one) > parts(best) ? one : best), every[0]);
  const shown = h("div", { class: "parts" });
  const state = h(
    "select",
    { id: "notation-state", onchange: () => pick() },
    Object.entries(STATES).map(([key, name]) => h("option", { value: key }, name)),
  );
  const weight = h(
    "select",
    { id: "notation-weight", onchange: () => pick() },
    every.map((one) => h("option", { value: one.key }, one.key)),
  );
  const pick = () => {
    const one = every.find((other) => other.key === weight.value);
    shown.replaceChildren(...drawParts(one, state.value, context));
  };
  weight.value = first.key;
  pick();
  const heads = ["weight", "shape", ...Object.values(STATES), "part at rest", "copies"];
  const rows = every.map(({ unit, weight: one, place }) => [
    `${unit}.${one.name}`,
    Object.entries(one.shape)
      .map(([dim, size]) => `${dim}=${count(size)}`)
      .join(" "),
    ...Object.keys(STATES).map((key) => one.specs[key]),
    number(one.shards.rest.shape.map(count).join(" × "), `${place}.shards.rest.elements`, context),
    number(count(one.shards.rest.copies), `${place}.shards.rest.copies`, context),
  ]);
  const sizes = payload.mesh
    .map((one, index) => [one, `mesh.${index}.size`])
    .filter(([one]) => one.size > 1)
    .map(([one, place], index) => [`${index ? ", " : ""}${one.axis}: `, number(count(one.size), place, context)]);
  return [
    panel(
      "The mesh",
      {},
      h("p", { class: "lead" }, "{", sizes.length ? sizes : "one device", "}"),
      h(
        "p",
        { class: "quiet" },
        `Axes of degree 1 are left out. Ranks are numbered with the last axis the fastest to vary. tp is tp_kv · tp_rep: key-value heads are split over tp_kv, and each has copies over tp_rep. The hidden state rests as X${payload.hidden}. W[D_fsdp, F_tp] is split over fsdp along D and over tp along F; {U_tp} is a partial sum over tp.`,
      ),
    ),
    panel(
      "Who holds which part",
      {},
      h(
        "p",
        { class: "choose" },
        h("label", { for: "notation-weight" }, "weight"),
        weight,
        h("label", { for: "notation-state" }, "state"),
        state,
      ),
      shown,
    ),
    panel("Every weight", {}, table("where each weight of a unit lies", heads, rows)),
  ];
}

// The array as a grid of its parts, each with the ranks that hold it.
function drawParts({ weight, place }, state, context) {
  const shard = weight.shards[state];
  const dims = Object.keys(weight.shape);
  const lead = h(
    "p",
    { class: "lead" },
    `${weight.name}${weight.specs[state]}: ${shard.shape.map(count).join(" × ")} of ${dims.map((dim) => `${dim}=${count(weight.shape[dim])}`).join(" × ")}, `,
    number(quantity(shard.elements), `${place}.shards.${state}.elements`, context),
    " elements on a device, each part on ",
    number(count(shard.copies), `${place}.shards.${state}.copies`, context),
    shard.copies === 1 ? " device" : " devices",
  );
  if (!shard.holders.length) return [lead, h("p", { class: "quiet" }, "too many parts to draw")];
  const split = dims.map((dim, index) => index).filter((index) => shard.parts[index] > 1);
  const [down, across] = [split[0], split[1]];
  const rowsOf = (one) => (down === undefined ? 0 : one.place[down]);
  const columnOf = (one) => (across === undefined ? 0 : one.place[across]);
  const numRows = 1 + Math.max(...shard.holders.map(rowsOf)),
    numColumns = 1 + Math.max(...shard.holders.map(columnOf));
  const width = Math.max(context.width, 300),
    left = 26,
    cell = Math.min((width - left - 8) / numColumns, 220),
    high = 28;
  const name = (index) => (index === undefined ? "" : `${dims[index]} in ${shard.parts[index]}`);
  const text = (one) => {
    const listed = one.ranks.join(", ");
    return one.num_ranks > one.ranks.length ? `${listed}, …` : listed;
  };
  const figure = svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} ${numRows * high + 44}`,
      width,
      height: numRows * high + 44,
      role: "img",
      "aria-label": `parts of ${weight.name} and the ranks that hold them`,
    },
    svg("text", { class: "axis", x: left, y: 12 }, name(across)),
    svg(
      "text",
      {
        class: "axis",
        x: 12,
        y: 24 + (numRows * high) / 2,
        "text-anchor": "middle",
        transform: `rotate(-90 12 ${24 + (numRows * high) / 2})`,
      },
      name(down),
    ),
    shard.holders.map((one) => {
      const fits = Math.floor((cell - 10) / 6.6),
        full = text(one);
      return svg(
        "g",
        { transform: `translate(${left + columnOf(one) * cell} ${20 + rowsOf(one) * high})` },
        svg("title", {}, `ranks ${full} (${one.num_ranks})`),
        svg("rect", {
          class: "part",
          width: cell - 2,
          height: high - 2,
          style: { fill: `var(--series-${(rowsOf(one) + columnOf(one) * 5) % 13})` },
        }),
        svg(
          "text",
          { x: 6, y: high / 2 + 3, style: { fill: `var(--on-series-${(rowsOf(one) + columnOf(one) * 5) % 13})` } },
          full.length > fits ? `${full.slice(0, Math.max(fits - 1, 1))}…` : full,
        ),
      );
    }),
  );
  return [lead, h("div", { class: "scroll" }, figure), h("p", { class: "quiet" }, "ranks of the first pipeline stage")];
}
